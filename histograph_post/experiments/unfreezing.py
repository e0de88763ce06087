"""Which part of a backbone is fine-tuned: all of it, the last layers, or modules by name.

A parameter belongs to the first layer of the history that depends on it, whatever its module is
called. One that no layer depends on, such as the model's own classifier, cannot be trained through
the history.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from ..capture import Capture, CapturePlan
from ..capture.checks import needed_parameters
from ..capture.passes import frozen
from ..errors import ConfigError
from ..training.networks import StatisticsMode, set_training_modes, statistics_of
from ..training.options import LARGEST
from ..utils.decoding import require_number


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
        require_number("backbone_lr", self.lr, low=0, high=LARGEST)
        require_number("unfreeze_every", self.unfreeze_every, low=0, whole=True)
        if self.bn not in get_args(StatisticsMode):
            raise ConfigError(f"bn: found {self.bn!r}, expected one of {get_args(StatisticsMode)}")
        if self.unfreeze is not None and self.unfreeze_last is not None:
            raise ConfigError("unfreeze: found names and a number of last layers, expected one")
        if self.unfreeze_last is not None:
            require_number("unfreeze_last", self.unfreeze_last, low=1, whole=True)

    def check(self, device: torch.device) -> None:
        """Refuse mixed precision on a device that has none."""
        if self.autocast and device.type != "cuda":
            raise ConfigError(f"amp: found the device {device.type!r}, expected 'cuda'")


class Unfreezing:
    """The trainable parameters of a backbone, epoch by epoch.

    Args:
        layers: From :func:`layers_of_parameters`.

    Raises:
        ConfigError: if the options name something that does not exist or cannot be trained.
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
        #: The layers with such parameters, in the order in which they are unfrozen.
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
    """Return the parameters that match a pattern themselves, or by a module they are in."""
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
    """Return the names of the modules that a parameter is in, and its own."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


# --- which parameters gradients reach through the history, and which they should: checked before
# training, since a layer that silently stays frozen would invalidate every result


def layers_of_parameters(model: nn.Module, plan: CapturePlan, batch: Batch) -> dict[str, int]:
    """Return the first layer of the history that depends on each trainable parameter."""
    with frozen(model), torch.inference_mode(False), torch.enable_grad():
        history = Capture(model, plan).run(batch).history
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, int] = {}
    seen: set[Any] = set()
    for depth, layer in enumerate(history):
        for leaf in _new_leaves(layer, seen):
            if id(leaf) in names:
                found[names[id(leaf)]] = depth
    return found


def _new_leaves(tensor: Tensor, seen: set[Any]) -> Iterator[Tensor]:
    """Yield the leaves that a tensor was computed from, through steps not seen before."""
    steps = [tensor.grad_fn]
    while steps:
        step = steps.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        leaf = getattr(step, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        steps += [before for before, _ in step.next_functions]


def check_gradients(
    model: nn.Module,
    plan: CapturePlan,
    batch: Batch,
    layers: Mapping[str, int],
    options: BackboneOptions,
) -> list[str]:
    """Refuse to train parameters that the history depends on but no gradient reaches; return notes.

    Code under ``torch.no_grad``, behind a ``detach`` or in a reentrant checkpoint looks like any
    other, and would silently stay frozen.

    Args:
        layers: From :func:`layers_of_parameters`: what gradients reach.
    """
    rest = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in layers
    }
    cut = _cut_off(model, plan, batch, rest.keys(), options)
    asked = chosen_parameters(model, {**layers, **cut}, len(plan.points), options)
    lost = [name for name in rest if name in cut and name in asked]
    if lost:
        reached = ",".join(_modules_of(name for name in layers if name in asked))
        raise ConfigError(
            f"unfreeze: found no gradient in {', '.join(_modules_of(lost))} "
            f"({sum(rest[name].numel() for name in lost):,} parameters), which the history depends "
            "on: the model runs them under no_grad, behind detach() or in a reentrant checkpoint "
            "(use_reentrant=False has gradients); expected all that is asked for to be trained"
            + (f", or just the rest: --unfreeze {shlex.quote(reached)}" if reached else "")
        )
    unused = _modules_of(name for name in rest if name not in cut)
    if not unused or options.unfreeze is not None:
        return []
    return [f"not trained, since the history does not depend on it: {', '.join(unused)}"]


def _modules_of(names: Iterable[str]) -> list[str]:
    """Return the modules that parameters of these names are in."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def _cut_off(
    model: nn.Module,
    plan: CapturePlan,
    batch: Batch,
    among: Collection[str],
    options: BackboneOptions,
) -> dict[str, int]:
    """Return which of some parameters the history depends on, each with a layer.

    The layer tells only whether a parameter is among the last layers that are to be trained.
    """
    first = len(plan.points) - (options.unfreeze_last or 0)
    before = replace(plan, points=plan.points[:first])
    with frozen(model):
        needed = needed_parameters(model, batch, plan, among) if among else set()
        early = needed_parameters(model, batch, before, needed) if needed and first > 0 else set()
    return {name: 0 if name in early else first for name in needed}


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
        text = f"{self.parameters:,} of {self.all_parameters:,} parameters"
        if self.all_buffers:
            text += f" and {self.buffers:,} of {self.all_buffers:,} buffer values"
        return f"{text} of the backbone, and {self.head:,} parameters of the head"

    @classmethod
    def trainable(
        cls, backbone: nn.Module, unfreezing: Unfreezing, head: nn.Module
    ) -> ParameterCounts:
        """Count what training may change of a backbone and a head."""
        names = {*unfreezing.layers, *unfreezing.statistics}
        own = sum(p.numel() for p in head.parameters() if p.requires_grad)
        return cls._of(backbone, own, lambda name, value: value.numel() if name in names else 0)

    @classmethod
    def changed(
        cls,
        backbone: nn.Module,
        before: nn.Module,
        head: nn.Module,
        head_before: Mapping[str, Tensor],
    ) -> ParameterCounts:
        """Count what training has changed, bit for bit."""
        old = {**dict(before.named_parameters()), **dict(before.named_buffers())}
        own = sum(_differing(p, head_before[name]) for name, p in head.named_parameters())
        return cls._of(backbone, own, lambda name, value: _differing(value, old[name]))

    @classmethod
    def _of(
        cls, backbone: nn.Module, head: int, count: Callable[[str, Tensor], int]
    ) -> ParameterCounts:
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=head,
            parameters=sum(count(name, value) for name, value in parameters.items()),
            all_parameters=sum(value.numel() for value in parameters.values()),
            buffers=sum(count(name, value) for name, value in buffers.items()),
            all_buffers=sum(value.numel() for value in buffers.values()),
        )


def _differing(after: Tensor, before: Tensor) -> int:
    return int((after.detach().cpu() != before.detach().cpu()).sum())
