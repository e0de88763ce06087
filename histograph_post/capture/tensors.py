"""Tensors inside nested arguments and outputs, always in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch_geometric.data.data import BaseData


def tensors_in(*values: Any) -> list[Tensor]:
    """Return every tensor in nested tuples, lists, mappings, dataclasses and graphs, in order.

    The position of a tensor in this list is how a capture point names it.
    """
    return list(_walk(values))


def _walk(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _walk(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _walk(item)
    elif isinstance(value, BaseData):
        attributes = value.to_dict()
        # The features come first, so that "the first float tensor" of a graph is its features.
        yield from _walk(attributes.pop("x", None))
        yield from _walk(attributes)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _walk(getattr(value, field.name, None))


def function_name(function: Callable[..., Any]) -> str:
    """Return the short name of a torch function: ``relu``, ``cat``, ``T``."""
    if isinstance(function, OpOverload):
        return function.overloadpacket.__name__
    name = getattr(function, "__name__", None)
    if name == "__get__":  # a property of Tensor
        name = getattr(getattr(function, "__self__", None), "__name__", None)
    return str(name or function)


def is_counted(function: Callable[..., Any], tensors_out: list[Tensor]) -> bool:
    """Whether a function call is a step of the forward pass that a capture point may count.

    Questions about a tensor (its size, its device) are no steps. Operators called by their raw
    name are left out because those inside scripted functions are visible in the probe pass only.
    """
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return False
    return bool(tensors_out) or function_name(function) == "__setitem__"


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor was changed in place; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
