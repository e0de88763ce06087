"""Gradient checkpointing: the inside of a layer is computed again in the backward pass.

A deep backbone keeps the messages and the hidden rows of every layer until the backward pass. With
this it keeps what the layers hand on, which the history holds anyway, and one layer at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..capture import CapturePlan
from ..errors import ConfigError
from .modes import statistics_of


def checkpoint_layers(model: nn.Module, plan: CapturePlan) -> int:
    """Let every layer of the history be computed again in the backward pass; return how many.

    The weights, outputs and gradients stay what they are. The model keeps the change.

    Args:
        model: The backbone.
        plan: Names its layers.
    """
    modules = dict(model.named_modules())
    # Called `a+b` where layers are parallel, and `a#2` on the second call.
    labels = {label.partition("#")[0] for name in plan.names for label in name.split("+")}
    layers = [modules[label] for label in sorted(labels) if label and label in modules]
    if not layers:
        raise ConfigError(
            "checkpoint_layers: found no layer of the history that is a module of its own, "
            "expected at least one"
        )
    for layer in layers:
        _checkpoint(layer)
    return len(layers)


def _checkpoint(layer: nn.Module) -> None:
    forward = layer.forward

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: _contexts(layer), **kwargs
        )

    layer.forward = again


def _contexts(
    layer: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _statistics_stay(layer)


@contextmanager
def _statistics_stay(layer: nn.Module) -> Iterator[None]:
    """Let normalisations see a batch a second time without counting it twice."""
    kept = [
        (module, name, module.get_buffer(name))
        for module in layer.modules()
        for name in statistics_of(module)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
