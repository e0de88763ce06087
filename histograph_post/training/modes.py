"""Which modules of a partly frozen model train: dropout, and running statistics."""

from __future__ import annotations

from typing import Literal

from torch import nn

#: ``frozen`` keeps running statistics bit for bit; ``train`` lets those of what moves move.
StatisticsMode = Literal["frozen", "train"]

#: Buffers of normalisations that change while they are in training mode.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def set_training_modes(model: nn.Module, statistics: StatisticsMode) -> None:
    """Leave in training mode what moves, and put the rest into ``eval()``: it runs as cached.

    A module moves if a parameter in it does; one without parameters goes with the module it is
    in. A normalisation with frozen statistics stays in ``eval()`` whether its scale moves or not.
    """
    _set_mode(model, statistics, around=False)


def _set_mode(module: nn.Module, statistics: StatisticsMode, *, around: bool) -> None:
    parameters = list(module.parameters())
    moves = any(parameter.requires_grad for parameter in parameters) if parameters else around
    if statistics == "frozen" and statistics_of(module):
        moves = False
    # A model whose own train() keeps a part in eval() knows why.
    module.training = module.training and moves
    for child in module.children():
        _set_mode(child, statistics, around=moves)


def statistics_of(module: nn.Module) -> list[str]:
    """Return the names of the running statistics that are the module's own."""
    return [name for name in _STATISTICS if module._buffers.get(name) is not None]
