"""Where tensors live."""

from __future__ import annotations

import os

import torch

from ..errors import ConfigError


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was given; a CPU has, when a call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def resolve_device(name: str = "auto") -> torch.device:
    """Turn ``auto``, ``cpu``, ``cuda``, ``cuda:1`` or ``mps`` into a device that is there."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: found {name!r}, expected auto, cpu, cuda or mps") from None
    available = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if not available.get(device.type, False):
        raise ConfigError(
            f"device: {name} was asked for, but this machine or build of torch has none"
        )
    return device
