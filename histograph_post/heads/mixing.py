"""The stabiliser: a convex combination of a readout with a plain mean."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class Mixing(nn.Module):
    """``a * readout + (1 - a) * base`` with ``a`` in [0, 1].

    Args:
        kind: ``fixed``; ``learned``; or ``delayed``: learned, but not before ``delay`` training
            steps have passed.
        initial: The coefficient to start from.
        delay: Training steps a ``delayed`` coefficient waits.
    """

    steps: Tensor

    def __init__(self, kind: str, initial: float, delay: int) -> None:
        super().__init__()
        self.kind, self.initial, self.delay = kind, initial, delay
        if kind != "fixed":
            self.logit = nn.Parameter(torch.tensor(math.log(initial / (1 - initial))))
        if kind == "delayed":
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    @property
    def coefficient(self) -> Tensor | float:
        """The share ``a`` of the readout."""
        return self.initial if self.kind == "fixed" else self.logit.sigmoid()

    def forward(self, readout: Tensor, base: Tensor) -> Tensor:
        """Mix two tensors of the same shape."""
        coefficient = self.coefficient
        if self.kind == "delayed" and self.training and isinstance(coefficient, Tensor):
            if bool(self.steps < self.delay):
                coefficient = coefficient.detach()
            self.steps += 1
        return coefficient * readout + (1 - coefficient) * base

    def extra_repr(self) -> str:
        """Describe the coefficient in one line."""
        return f"kind={self.kind!r}, coefficient={float(self.coefficient):.3f}"
