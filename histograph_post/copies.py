"""What the training loop trains: one network, or several that are run as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .training_options import TrainingOptions


class Copies(Protocol):
    """Networks that are trained at once, as the loop sees them: most often a single one."""

    optimizer: torch.optim.Optimizer

    def train(self, mode: bool) -> None:
        """Prepare for training, or for anything else."""
        ...

    def __call__(self, inputs: Any) -> Tensor:
        """Return the outputs of every network: ``[copies, rows, out_dim]``."""
        ...

    def aux_loss(self) -> Tensor | None:
        """Return what the last outputs add to the loss."""
        ...

    def clip(self, norm: float) -> None:
        """Scale the gradients of each network, by groups of parameters, down to this norm."""
        ...

    def settle(self) -> None:
        """Leave the networks and their optimizers as training has made them."""
        ...


class OneNetwork:
    """A single network, see :class:`Copies`.

    Args:
        network: Its ``aux_loss``, if any, joins the loss.
        optimizer: Of its parameters.
    """

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._network = network
        self.optimizer = optimizer

    def train(self, mode: bool) -> None:
        """Prepare for training, or for anything else."""
        self._network.train(mode)

    def __call__(self, inputs: Any) -> Tensor:
        """Return the outputs, ``[1, rows, out_dim]``."""
        outputs: Tensor = self._network(inputs)  # [rows, out_dim]
        return outputs.unsqueeze(0)

    def aux_loss(self) -> Tensor | None:
        """Return what the last outputs add to the loss."""
        return getattr(self._network, "aux_loss", None)

    def clip(self, norm: float) -> None:
        """Scale the gradients of each group of parameters down to this norm."""
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], norm)

    def settle(self) -> None:
        """Do nothing: the network is the one that was trained."""


def make_optimizer(
    parameters: Sequence[Mapping[str, Any]] | Sequence[Tensor], options: TrainingOptions
) -> torch.optim.AdamW:
    """Return the one optimizer there is, in its fastest form."""
    groups: Any = list(parameters)
    return torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay, fused=True)
