"""Tensors in files: saving them and reading them back, with errors that name the file.

The libraries' own writers report a full disk without the file's name, and their readers raise
errors of almost any type for a damaged file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import safetensors.torch
import torch
from torch import Tensor

from ..errors import ConfigError
from .files import read_regular, write_bytes
from .text import first_line


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors, such as those of a state dict, as a safetensors file."""
    # Cloned, because tied weights share memory, which the format refuses.
    own = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in tensors.items()
        if isinstance(value, Tensor)
    }
    write_bytes(path, safetensors.torch.save(own))


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays as a safetensors file."""
    own = {name: np.array(values) for name, values in arrays.items()}
    write_bytes(path, safetensors.numpy.save(own))


def load_tensors(path: Path, what: str = "tensors") -> dict[str, Tensor]:
    """Read a safetensors file; ``what`` it should hold is for the error."""
    return _load(path, safetensors.torch.load, what)


def load_arrays(path: Path, what: str = "arrays") -> dict[str, np.ndarray]:
    """Read a safetensors file as arrays."""
    return _load(path, safetensors.numpy.load, what)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write plain values and tensors with ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    write_bytes(path, buffer.getvalue())


def load_state(path: Path) -> Any:
    """Read what :func:`save_state` wrote; nothing in the file is executed."""

    def load(data: bytes) -> Any:
        return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")

    return _load(path, load, "the state of a training")


def _load(path: Path, load: Callable[[bytes], Any], what: str) -> Any:
    data = read_regular(path)
    try:
        return load(data)
    except Exception as error:  # an unknown type is a KeyError, a bad header almost anything
        raise ConfigError(
            f"{path}: found a damaged file ({first_line(error)}), expected {what}"
        ) from error
