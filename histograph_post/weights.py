"""The identity of a network: one hash over its parameters and buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


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
