"""Which parameters of a backbone gradients reach through its history, and which they should.

Asked before anything is trained: a layer that silently stays as it is makes every figure after it
one about something else.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from ..capture import Capture, CapturePlan
from ..capture.checks import needed_parameters
from ..capture.passes import frozen
from ..errors import ConfigError
from .unfreezing import BackboneOptions, chosen_parameters


def layers_of_parameters(model: nn.Module, plan: CapturePlan, batch: Batch) -> dict[str, int]:
    """Return the first layer of the history that depends on each trainable parameter.

    Args:
        model: The backbone; it is the same afterwards.
        plan: What is captured of it.
        batch: A few graphs.
    """
    with frozen(model), torch.inference_mode(False), torch.enable_grad(), _without_advice():
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
    """Yield the leaves a tensor was computed from, by steps that were not seen before."""
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
    """Refuse to train what the history depends on and no gradient reaches; return notes.

    Code under ``torch.no_grad``, behind a ``detach`` or in a checkpoint of the reentrant kind looks
    like any other, and would silently stay as it is.

    Args:
        model: The backbone; it is the same afterwards.
        plan: What is captured of it.
        batch: A few graphs.
        layers: From :func:`layers_of_parameters`: what gradients do reach.
        options: What is asked for.
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
    return [f"the history does not depend on {', '.join(unused)}: not trained"]


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
    """Return those of some parameters that the history depends on, and a layer that tells whether
    they are among the last ones that are asked for.
    """
    first = len(plan.points) - (options.unfreeze_last or 0)
    before = replace(plan, points=plan.points[:first])
    with frozen(model), _without_advice():
        needed = needed_parameters(model, batch, plan, among) if among else set()
        early = needed_parameters(model, batch, before, needed) if needed and first > 0 else set()
    return {name: 0 if name in early else first for name in needed}


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep reentrant checkpoints from warning of what is said here in other words."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield
