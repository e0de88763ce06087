"""Run somebody else's model and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import CaptureError
from .tensors import version_of


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
