"""The heads of a run as one: each reads the same activations, and the mean of their outputs counts.

Seeds differ in how they start and in the order of their batches, folds in the rows they learned
from; what they agree on is worth more than what one of them says, and how much they differ is the
spread of a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..heads.base import Readout
from ..tasks import TargetScale
from ..training.head_batches import HeadInputs
from ..training.networks import HeadNetwork


class HeadMember(nn.Module):
    """One trained head, from standardised activations to outputs in the units of the labels.

    Args:
        head: The head.
        standardizer: What brings the layers to one scale before it.
        scale: Of the targets it learned.
    """

    def __init__(self, head: Readout, standardizer: nn.Module | None, scale: TargetScale) -> None:
        super().__init__()
        self.standardizer = standardizer
        self.network = HeadNetwork(head)
        self.scale = scale

    def prepare(self, layers: Sequence[Tensor]) -> Tensor | list[Tensor]:
        """Return layers, each ``[num_nodes, D_l]`` as captured, the way the head learned them."""
        if self.standardizer is not None:
            layers = self.standardizer(layers)  # L of [num_nodes, D_l]
        uniform = len({layer.size(1) for layer in layers}) == 1
        return torch.stack(list(layers), dim=1) if uniform else list(layers)  # [num_nodes, L, D]

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        return self.scale.undo(self.network(inputs))


class HeadEnsemble(nn.Module):
    """The mean of the outputs of several heads: logits, or values in the units of the labels.

    Logits are divided by a temperature, so that the probabilities they stand for are calibrated.
    Every member undoes its own scale first: folds have other statistics and other targets.

    Args:
        members: The heads; those of one fold come together and share their standardizer.
        temperature: From validation; 1 leaves logits as they are.
    """

    def __init__(self, members: Sequence[HeadMember], temperature: float = 1.0) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.temperature = temperature

    def each(self, inputs: HeadInputs) -> Tensor:
        """Return the outputs of every member, each calibrated: ``[members, rows, out_dim]``.

        Args:
            inputs: Their history is a list of layers as captured, each ``[num_nodes, D_l]``.
        """
        found, before, prepared = [], None, inputs
        for number, member in enumerate(self.members):
            assert isinstance(member, HeadMember)
            if not number or member.standardizer is not before:
                before = member.standardizer
                prepared = replace(inputs, history=member.prepare(inputs.history))  # type: ignore[arg-type]
            found.append(member(prepared))  # [rows, out_dim]
        return torch.stack(found) / self.temperature

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return the mean over the members: ``[rows, out_dim]``."""
        return self.each(inputs).mean(dim=0)

    def __repr__(self) -> str:
        first = self.members[0]
        assert isinstance(first, HeadMember)
        name = type(first.network.head).__name__
        return f"HeadEnsemble({len(self.members)} x {name}, temperature={self.temperature:g})"
