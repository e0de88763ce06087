"""What moved: how many numbers of a network training may change, and how many it changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Movement:
    """Numbers that move, of numbers there are, by kind."""

    head: int
    parameters: int
    all_parameters: int
    buffers: int
    all_buffers: int

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} of {self.all_parameters:,} parameters and {self.buffers:,} of "
            f"{self.all_buffers:,} buffer values of the backbone, and {self.head:,} parameters "
            "of the head"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def asked(cls, backbone: nn.Module, moving: Collection[str], head: nn.Module) -> Movement:
        """Count what training may change: the backbone's tensors of these names, and the head."""
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=sum(p.numel() for p in head.parameters() if p.requires_grad),
            parameters=sum(p.numel() for name, p in parameters.items() if name in moving),
            all_parameters=sum(p.numel() for p in parameters.values()),
            buffers=sum(b.numel() for name, b in buffers.items() if name in moving),
            all_buffers=sum(b.numel() for b in buffers.values()),
        )

    @classmethod
    def done(
        cls,
        backbone: nn.Module,
        before: nn.Module,
        head: nn.Module,
        head_before: Mapping[str, Tensor],
    ) -> Movement:
        """Count what training did change, bit for bit."""
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=_changed(dict(head.named_parameters()), head_before),
            parameters=_changed(parameters, dict(before.named_parameters())),
            all_parameters=sum(p.numel() for p in parameters.values()),
            buffers=_changed(buffers, dict(before.named_buffers())),
            all_buffers=sum(b.numel() for b in buffers.values()),
        )


def _changed(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> int:
    return sum(
        int((value.detach().cpu() != before[name].detach().cpu()).sum())
        for name, value in after.items()
    )


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the parameters as they stand."""
    return {
        name: parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in module.named_parameters()
    }
