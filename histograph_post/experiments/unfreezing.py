"""Which part of a backbone is fine-tuned: all of it, the last layers, or modules by name.

A parameter belongs to the first layer of the history that depends on it, whatever the modules of
the model are called; one that no layer depends on (the model's own classifier) cannot be trained
through the history.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..training.networks import StatisticsMode, set_training_modes, statistics_of


@dataclass(frozen=True)
class BackboneOptions:
    """How a backbone is fine-tuned."""

    #: Highest learning rate of the backbone; that of the head is the training's own.
    lr: float = 1e-4
    #: Names and globs of the modules or parameters that are trained; empty: none, None: all.
    unfreeze: tuple[str, ...] | None = None
    #: Train only the last so many layers.
    unfreeze_last: int | None = None
    #: Train the head alone at first, and one more layer every so many epochs, from the last to the
    #: first; 0 trains all of them from the start.
    unfreeze_every: int = 0
    #: Running statistics of the batch norms that are trained: ``train`` updates them, ``frozen``
    #: keeps those of the checkpoint.
    bn: StatisticsMode = "frozen"
    #: Gradient checkpointing: recompute the inside of every layer in the backward pass.
    checkpoint_layers: bool = False
    #: Run the backbone in bfloat16 where that is safe (CUDA).
    autocast: bool = False

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError(f"backbone_lr: found {self.lr}, expected 0 or more")
        if self.bn not in get_args(StatisticsMode):
            raise ConfigError(f"bn: found {self.bn!r}, expected one of {get_args(StatisticsMode)}")
        if self.unfreeze is not None and self.unfreeze_last is not None:
            raise ConfigError("unfreeze: found names and a number of last layers, expected one")
        if self.unfreeze_last is not None and self.unfreeze_last < 1:
            raise ConfigError(f"unfreeze_last: found {self.unfreeze_last}, expected 1 or more")
        if self.unfreeze_every < 0:
            raise ConfigError(f"unfreeze_every: found {self.unfreeze_every}, expected 0 or more")

    def check(self, device: torch.device) -> None:
        """Refuse mixed precision on a device that has none."""
        if self.autocast and device.type != "cuda":
            raise ConfigError(f"amp: found the device {device.type!r}, expected 'cuda'")


class Unfreezing:
    """The trainable parameters of a backbone, epoch by epoch.

    Args:
        model: The backbone; parameters that are not trained stop asking for gradients.
        layers: From :func:`~.gradients.layers_of_parameters`.
        num_layers: Of the history.
        options: What is asked for.

    Raises:
        ConfigError: where something is asked for that is not there or cannot be trained.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, int],
        num_layers: int,
        options: BackboneOptions,
    ) -> None:
        self._model = model
        self._every = options.unfreeze_every
        chosen = chosen_parameters(model, layers, num_layers, options)
        #: Name of every parameter that is trained in some epoch -> its layer.
        self.layers = {name: depth for name, depth in layers.items() if name in chosen}
        #: The layers that have any, in the order in which they are unfrozen.
        self._order = sorted(set(self.layers.values()), reverse=True)
        self.parameters = [
            parameter for name, parameter in model.named_parameters() if name in self.layers
        ]
        self._release(len(self._order))
        #: Names of the running statistics that training updates.
        self.statistics = self._updated_statistics(options.bn)
        if options.bn == "train" and not self.statistics:
            raise ConfigError(
                "bn: found 'train', but no running statistics among the layers that are trained"
            )
        self.enter(0)

    def enter(self, epoch: int) -> None:
        """Unfreeze what is trained in this epoch, and freeze the rest."""
        self._release(epoch // self._every if self._every else len(self._order))

    def _release(self, count: int) -> None:
        """Unfreeze the last so many layers."""
        unfrozen = set(self._order[:count])
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(self.layers.get(name) in unfrozen)

    def _updated_statistics(self, mode: StatisticsMode) -> list[str]:
        set_training_modes(self._model.train(), mode)
        return [
            f"{name}.{own}" if name else own
            for name, module in self._model.named_modules()
            if module.training
            for own in statistics_of(module)
        ]


def chosen_parameters(
    model: nn.Module, layers: Mapping[str, int], num_layers: int, options: BackboneOptions
) -> set[str]:
    """Return the names of the parameters that are asked for and can be trained."""
    if options.unfreeze_last is not None:
        if options.unfreeze_last > num_layers:
            raise ConfigError(
                f"unfreeze_last: found {options.unfreeze_last}, expected at most the "
                f"{num_layers} layers of the history"
            )
        first = num_layers - options.unfreeze_last
        chosen = {name for name, depth in layers.items() if depth >= first}
        asked = f"the last {options.unfreeze_last} layers"
    elif options.unfreeze is not None:
        if not options.unfreeze:
            return set()
        chosen = _matching(model, options.unfreeze) & layers.keys()
        asked = ", ".join(options.unfreeze)
    else:
        chosen, asked = set(layers), "the backbone"
    if not chosen:
        raise ConfigError(
            f"unfreeze: found no parameter in {asked} that the history depends on and that can "
            "be trained; ask for another part, or for none with an empty list"
        )
    return chosen


def _matching(model: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the parameters that are called so, or are in a module that is."""
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        matching = {name for name in names if any(fnmatchcase(n, pattern) for n in _around(name))}
        if not matching:
            known = list(dict.fromkeys(part for name in names for part in _around(name)))
            near = get_close_matches(pattern, known, n=3) or known[:3]
            raise ConfigError(
                f"unfreeze: found {pattern!r}, expected a module or parameter of the backbone, "
                f"such as {', '.join(near)}"
            )
        found |= matching
    return found


def _around(name: str) -> list[str]:
    """Return a parameter's name and those of the modules it is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# --- how many parameters and buffer values of a network are trainable, and how many changed


@dataclass(frozen=True)
class ParameterCounts:
    """How many values of a network are trainable, or have changed, and how many there are."""

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
    def trainable(
        cls, backbone: nn.Module, names: Collection[str], head: nn.Module
    ) -> ParameterCounts:
        """Count what training may change: the backbone's tensors of these names, and the head."""
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=sum(p.numel() for p in head.parameters() if p.requires_grad),
            parameters=sum(p.numel() for name, p in parameters.items() if name in names),
            all_parameters=sum(p.numel() for p in parameters.values()),
            buffers=sum(b.numel() for name, b in buffers.items() if name in names),
            all_buffers=sum(b.numel() for b in buffers.values()),
        )

    @classmethod
    def changed(
        cls,
        backbone: nn.Module,
        before: nn.Module,
        head: nn.Module,
        head_before: Mapping[str, Tensor],
    ) -> ParameterCounts:
        """Count what training has changed, bit for bit."""
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
    """Return a copy of the current parameters."""
    return {
        name: parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in module.named_parameters()
    }
