"""A forward pass seen from outside: its tensors, its functions, its modules, and a second pass.

Tensors inside nested arguments and outputs always come in the same order.
"""

from __future__ import annotations

import functools
import os
import warnings
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
def without_advice() -> Iterator[None]:
    """Silence torch's advice on reentrant checkpoints: a capture needs no gradients.

    Where fine-tuning needs them, their absence is an error that names the layers.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        yield


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
    with torch.random.fork_rng(devices=list(devices)), without_advice():
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
    """Return the model that Python runs line by line, so that every layer is seen.

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
                "pass the Python model it was made from"
            )
        compiled = getattr(module, "_compiled_call_impl", None)
        if compiled is not None or "_orig_mod" in module._modules:
            raise CaptureError(
                f"{where} is compiled: its layers cannot be seen; "
                "pass the model as it was before torch.compile"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            raise CaptureError(
                f"parameter {name!r} has no values yet (a lazy layer); load the checkpoint first"
            )
    return model


# --- watching the calls of a module, however it is called

#: Is given the module, its arguments and its keyword arguments.
Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
#: Is given the module and what it returned.
Leave = Callable[[nn.Module, Any], None]


@contextmanager
def watch_calls(
    module: nn.Module, enter: Enter, leave: Leave, method: str = "forward"
) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around each run of a module's ``forward``, or another method.

    Not by hooks: these do not see ``module.forward(...)``, which some models write, and the encoder
    layers of torch do without their fused kernels where there are any. Whatever was assigned
    before is there again afterwards.
    """
    original = getattr(module, method)
    replaced = vars(module).get(method)

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        enter(module, args, kwargs)
        output = original(*args, **kwargs)
        leave(module, output)
        return output

    vars(module)[method] = watched
    try:
        yield
    finally:
        if replaced is None:
            vars(module).pop(method, None)
        else:
            vars(module)[method] = replaced


# --- whether a second pass gives the same numbers: bit for bit on a CPU, but for rounding elsewhere
#
# A GPU adds the messages of a node in whatever order they arrive, unless an algorithm is asked for
# that keeps to one; not every operation has such an algorithm. So passes are run with them, and
# compared up to what another order of summation explains.

#: The largest difference, relative to the largest number of a layer, that another order of
#: summation explains, and with it other devices, machines and numbers of threads.
TOLERANCES = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}

#: Without it cuBLAS has no one order of summation; it is read when CUDA is first used.
_CUBLAS = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is."""
    tensors = (*model.parameters(), *model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def is_repeatable(device: torch.device) -> bool:
    """Whether the same pass gives the same bits on a device, whatever the model."""
    return device.type == "cpu"


def repeat_note(device: torch.device) -> str | None:
    """Say how closely passes on a device can be repeated; None where the bits are the same."""
    if is_repeatable(device):
        return None
    cuda = device.type == "cuda"
    found = "deterministic algorithms where PyTorch has them, else " if cuda else ""
    return (
        f"computed on {device.type}: {found}sums in any order; compared up to rounding "
        f"({TOLERANCES[torch.float32]:.0e} of a layer's largest number in float32)"
    )


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Let sums be taken in one order on CUDA, where PyTorch has an algorithm for that."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault(*_CUBLAS)
    settings: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        settings.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False  # nobody reads it
    try:
        with warnings.catch_warnings():  # said once, by repeat_note
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = before[2]


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two passes gave the same; NaN equals NaN, since such values are reported later."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.nan_to_num(), other.nan_to_num()
    if torch.equal(one, other):
        return True
    return not is_repeatable(one.device) and apart(one, other) <= TOLERANCES.get(one.dtype, 0.0)


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference of two tensors, relative to the largest number of the first."""
    if not one.numel():
        return 0.0
    # On the host: not every device has double precision.
    before, now = one.detach().cpu().double(), other.detach().cpu().double()
    scale = float(before.abs().max())
    return float((before - now).abs().max()) / (scale or 1.0)
