"""What is mixed with what attention makes: step 8 of the paper, and the linear starts of a head.

A head that starts from random weights first has to find what a linear map of the same layers gives
away at once. So it may start there: at the classifier of the network it reads
(:meth:`LinearStarts.warm_start`), or at a linear probe that was solved on the training rows
(:meth:`LinearStarts.start_at`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ...errors import DataError
from ..base import Readout
from .config import HistoGraphConfig


def map_parts(linear: nn.Linear, parts: Sequence[Tensor]) -> Tensor:
    """Apply a linear map to rows that come in parts, without joining them: ``[rows, out]``."""
    widths = [part.size(1) for part in parts]
    mapped: Tensor = linear.bias  # [out]
    for part, weight in zip(parts, linear.weight.split(widths, dim=1), strict=True):
        mapped = torch.addmm(mapped, part, weight.t())  # [rows, out]
    return mapped


class Mixing(nn.Module):
    """The stabiliser of step 8: ``a * readout + (1 - a) * base`` with ``a`` in [0, 1].

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


class LinearStarts(Readout):
    """A readout that can start where a linear one stands; both starts add parameters."""

    options: HistoGraphConfig
    #: The last map, from what the MLP returns to the outputs.
    output: nn.Linear
    #: Width of what is known of a row without attention.
    described_dim: int
    #: From the (mean) last layer straight to the outputs.
    shortcut: nn.Linear | None
    #: From what is known without attention to the outputs; it is not trained.
    probe: nn.Linear | None
    #: Share of the probe in the predictions: all of it until training begins.
    probe_share: Tensor

    @torch.no_grad()
    def warm_start(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Start where a mean-pool network stands: predict ``weight @ mean(last layer) + bias``.

        The network's classifier becomes a shortcut from the last layer, as the head is given it, to
        the outputs, and the head's own output map starts at zero: exact for every option, and
        all of it is trained. At node level there is no mean. Call it before making an optimizer.
        For rows that are standardised before they get here, see
        :meth:`~histograph_post.heads.standardize.Standardizer.fold_into`.

        Args:
            weight: Of the network's own classifier, ``[out_dim, D_last]``.
            bias: Of the same, ``[out_dim]``; zero if it has none.
        """
        _require_shape("warm start", weight, [self.out_dim, self.in_dims[-1]])
        self.options = replace(self.options, shortcut=True)
        self.shortcut = nn.Linear(*weight.shape[::-1]).to(self.output.weight)
        self.shortcut.weight.copy_(weight)
        self.shortcut.bias.zero_() if bias is None else self.shortcut.bias.copy_(bias)
        self.output.weight.zero_()
        self.output.bias.zero_()

    @torch.no_grad()
    def start_at(self, weight: Tensor, bias: Tensor) -> None:
        """Start where a solved linear probe stands: predict what it predicts.

        Once training has begun, its share is that of the options: the head learns by itself, and
        predicts the mean of both.

        Args:
            weight: Of the probe of what is known without attention, ``[out_dim, described_dim]``.
            bias: Of the same, ``[out_dim]``.
        """
        _require_shape("probe", weight, [self.out_dim, self.described_dim])
        self.options = replace(self.options, solved=True)
        self._add_probe()
        assert self.probe is not None
        self.probe.weight.copy_(weight)
        self.probe.bias.copy_(bias)

    def _add_probe(self) -> None:
        self.probe = nn.Linear(self.described_dim, self.out_dim).to(self.output.weight)
        self.probe.requires_grad_(False)
        self.register_buffer("probe_share", torch.ones(()).to(self.output.weight))


def _require_shape(name: str, weight: Tensor, expected: list[int]) -> None:
    if list(weight.shape) != expected:
        raise DataError(f"{name}: found weight {list(weight.shape)}, expected {expected}")
