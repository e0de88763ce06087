"""What probing and recording share: finding tensors, naming functions, leaving models as they were.

Tensors inside nested arguments and outputs always come in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch_geometric.data.data import BaseData

from ..errors import CaptureError


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


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Put the model into ``eval()``; afterwards restore all that a forward pass may change.

    That is each submodule's mode, its buffers and attributes (layers that cache their normalised
    edges would hand those of this pass to the next), and the state of the random number generators.
    """
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [(buffer, version_of(buffer), buffer.detach().clone()) for buffer in model.buffers()]
    devices = {
        tensor.device
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cuda"
    }
    with torch.random.fork_rng(devices=list(devices)):
        try:
            model.eval()
            yield
        finally:
            with torch.no_grad():
                for buffer, version, saved in buffers:
                    if version_of(buffer) != version:
                        buffer.copy_(saved)
            for module, saved_attributes in zip(modules, attributes, strict=True):
                vars(module).clear()
                vars(module).update(saved_attributes)


def eager_module(model: nn.Module) -> nn.Module:
    """Return the model that Python runs line by line, so that hooks see every layer.

    Raises:
        CaptureError: if there is none, because the model was scripted or compiled in parts, or has
            parameters without values.
    """
    original = model.__dict__.get("_modules", {}).get("_orig_mod")
    if isinstance(original, nn.Module):  # what torch.compile(model) wraps
        model = original
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{where} is a TorchScript {type(module).__name__}: its layers cannot be seen; "
                "give the Python model it was made from"
            )
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None or "_orig_mod" in module._modules:
            raise CaptureError(
                f"{where} is compiled: its layers cannot be seen; "
                "give the model as it was before torch.compile"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise CaptureError(
                f"parameter {name!r} has no values yet (a lazy layer); load the checkpoint first"
            )
    return model
