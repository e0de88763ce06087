"""Whether a second pass gives the same numbers: bit for bit on a CPU, but for rounding elsewhere.

A GPU adds the messages of a node in whatever order they arrive, unless an algorithm is asked for
that keeps to one; not every operation has such an algorithm. So passes are run with them, and
compared up to what another order of summation explains.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

#: The largest difference, relative to the largest number of a layer, that another order of
#: summation explains, and with it other devices, machines and numbers of threads.
TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

#: Without it cuBLAS has no one order of summation; it is read when CUDA is first used.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def is_repeatable(device: torch.device) -> bool:
    """Whether the same pass gives the same bits on a device, whatever the model."""
    return device.type == "cpu"


def repeat_note(device: torch.device) -> str | None:
    """Say how far passes on a device can be repeated; None where they give the same bits."""
    if is_repeatable(device):
        return None
    found = "deterministic algorithms where PyTorch has them, else " if _asks(device) else ""
    return (
        f"computed on {device.type}: {found}sums in any order; compared up to rounding "
        f"({TOLERANCES[torch.float32]:.0e} of a layer's largest number in float32)"
    )


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Let sums be taken in one order on CUDA, where PyTorch has an algorithm for that."""
    if not _asks(device):
        yield
        return
    os.environ.setdefault(*_CUBLAS)
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # nobody reads it
    try:
        with warnings.catch_warnings():  # said once, by repeat_note
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = before[2]


def _asks(device: torch.device) -> bool:
    return device.type == "cuda"


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two passes gave the same; NaN equals NaN, since what is not finite is said later."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.nan_to_num(), other.nan_to_num()
    if torch.equal(one, other):
        return True
    return not is_repeatable(one.device) and apart(one, other) <= TOLERANCES.get(one.dtype, 0.0)


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest number of the first."""
    if not one.numel():
        return 0.0
    # On the host: not every device has double precision.
    before, now = one.detach().cpu().double(), other.detach().cpu().double()
    scale = float(before.abs().max())
    return float((before - now).abs().max()) / (scale or 1.0)
