"""Sizes that a constructor insists on, read from the weights that will be loaded.

The number of classes in the data says 1 for two classes; a checkpoint with two logits knows
better. Which tensors a size decides shows when the model is built with two other values of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import ModelError

#: Two values that no constructor treats in a way of its own, as one does 1 and 2.
_LOW, _HIGH = 5, 7

Shape = tuple[int, ...]
Construct = Callable[[Mapping[str, Any]], nn.Module]


def build_sized(
    construct: Construct, guessed: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[nn.Module, dict[str, Any]]:
    """Build a model with the sizes that its weights have; with the guessed ones if they fit.

    Args:
        construct: Builds the model with some sizes.
        guessed: The sizes as the data suggest them.
        weights: What will be loaded.

    Returns:
        The model, and the sizes that it was built with.
    """
    model = construct(guessed)
    if not guessed or not _misfits(model, weights):
        return model, dict(guessed)
    numbers = [name for name, size in guessed.items() if isinstance(size, int)]
    found = {name: _size(construct, guessed, name, weights) for name in numbers}
    sizes = {**guessed, **{name: size for name, size in found.items() if size is not None}}
    if sizes == dict(guessed):
        return model, sizes
    try:
        sized = construct(sizes)
    except ModelError:
        return model, dict(guessed)
    better = len(_misfits(sized, weights)) < len(_misfits(model, weights))
    return (sized, sizes) if better else (model, dict(guessed))


def _size(
    construct: Construct, sizes: Mapping[str, Any], name: str, weights: Mapping[str, Tensor]
) -> int | None:
    """Return the one value of a size that all tensors agree on; None if there is none."""
    try:
        low, high = (_shapes(construct({**sizes, name: value})) for value in (_LOW, _HIGH))
    except ModelError:
        return None
    values: set[float] = set()
    for tensor in low.keys() & high.keys():
        shape = _shape_in(weights, tensor)
        if shape is None or not len(shape) == len(low[tensor]) == len(high[tensor]):
            continue
        for saved, at_low, at_high in zip(shape, low[tensor], high[tensor], strict=True):
            if at_low != at_high:
                per_unit = (at_high - at_low) / (_HIGH - _LOW)
                values.add(_LOW + (saved - at_low) / per_unit)
    (value,) = values if len(values) == 1 else (0.0,)
    return int(value) if value >= 1 and value == int(value) else None


def _misfits(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    shapes = _shapes(model)
    return [
        name
        for name, shape in shapes.items()
        if _shape_in(weights, name) not in (None, shape) and shape != ()
    ]


def _shapes(model: nn.Module) -> dict[str, Shape]:
    return {
        name: tuple(value.shape)
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not is_lazy(value)
    }


def _shape_in(weights: Mapping[str, Tensor], name: str) -> Shape | None:
    """Return the shape of a tensor in a file, where it may stand behind a prefix."""
    if name in weights:
        return tuple(weights[name].shape)
    behind = {tuple(value.shape) for key, value in weights.items() if key.endswith(f".{name}")}
    return behind.pop() if len(behind) == 1 else None
