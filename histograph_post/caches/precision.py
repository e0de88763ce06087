"""Which numbers a cache accepts: finite ones that its storage type can hold."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import CacheError
from .layout import Layout

TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

_WIDER = {"float16": "bfloat16 or float32", "bfloat16": "float32", "float32": "a smaller scale"}


def check_range(
    values: Tensor, layer: int, layout: Layout, graph_of_row: Callable[[int], str], where: str
) -> None:
    """Refuse activations of a layer that are not finite, or that the storage type would lose.

    One pass for the extremes; which graph is to blame is only searched on failure. A layer is lost
    when it is not all zero, yet below the smallest normal number of the type.
    """
    if not values.shape[0]:
        return
    # NaN survives both.  [2]
    low, high = torch.stack(torch.aminmax(values)).tolist()
    stored = TORCH_TYPES[layout.dtype]
    limits = torch.finfo(stored)
    largest = max(-low, high)
    if not (math.isfinite(low) and math.isfinite(high)):
        problem = "a value that is not finite, expected finite activations"
        wrong = ~torch.isfinite(values)
    elif largest > limits.max:
        problem = (
            f"{largest:.6g}, expected at most {limits.max:.6g} in {layout.dtype}; "
            f"use {_WIDER[layout.dtype]}"
        )
        wrong = values.double().abs() > limits.max
    elif 0 < largest < limits.tiny and values.dtype != stored:
        problem = (
            f"nothing above {largest:.3g}, expected at least {limits.tiny:.3g} in "
            f"{layout.dtype}, which would lose it; use {_WIDER[layout.dtype]}"
        )
        wrong = values.double().abs() == largest
    else:
        return
    row = int(wrong.any(dim=1).nonzero()[0])
    raise CacheError(
        f"{where}: graph {graph_of_row(row)!r}, layer {layout.layer_names[layer]!r}: "
        f"found {problem}"
    )
