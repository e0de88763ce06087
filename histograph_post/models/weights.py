"""The weights of a network: their identity, one hash, and the file they are kept in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from ..utils.files import atomic_path


def weights_sha256(state_dict: Mapping[str, Any]) -> str:
    """Return a SHA-256 over names, dtypes, shapes and bytes, in the order of the names.

    The same weights give the same hash whatever file format, device or prefix they came with.
    Extra state that is no tensor does not count; a built-in model's settings do.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state_dict.items()):
        if not isinstance(value, Tensor):
            continue
        tensor = value.detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_weights(state_dict: Mapping[str, Any], path: Path) -> None:
    """Write parameters and buffers as a safetensors file."""
    # Cloned, because weights that are tied share memory, which the format refuses.
    weights = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state_dict.items()
        if isinstance(value, Tensor)
    }
    with atomic_path(path) as partial:
        partial.write_bytes(save(weights))  # its own writer leaves files that others cannot read
