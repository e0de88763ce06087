"""Autocasting stops at a head: it computes in the precision of its weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

_Head = TypeVar("_Head", bound=nn.Module)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def in_own_precision(
    method: Callable[Concatenate[_Head, _Arguments], _Result],
) -> Callable[Concatenate[_Head, _Arguments], _Result]:
    """Turn autocasting off on the device of a head while one of its methods runs.

    The kernels and the compiled loops write into memory that was made beforehand, and know one
    type of numbers in all of it.
    """

    @wraps(method)
    def run(head: _Head, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        device = next(head.parameters()).device.type
        # A meta device, which computes nothing, has no autocasting to ask about.
        if device == "meta" or not torch.is_autocast_enabled(device):
            return method(head, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(head, *args, **kwargs)

    return run
