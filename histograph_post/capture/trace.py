"""The trace of a probe pass: a model is run once, and all it does is recorded.

Every state of a tensor is a :class:`Value`, so a tensor that is changed in place becomes a new
one. Values, function calls and module calls share one clock; a value's parents always have a
smaller index than the value itself.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing

from ..models import call_model
from .tensors import function_name, is_counted, tensors_in, version_of
from .watching import Enter, Leave, watch_calls, watch_propagation

#: Functions that read the shape and type of their argument, never its numbers.
_SHAPE_ONLY = frozenset(
    f"{name}_like" for name in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")
) | {f"new_{name}" for name in ("zeros", "ones", "full", "empty", "tensor")}

#: Functions that do so with all arguments but the first.
_SHAPE_OF_OTHERS = frozenset({"expand_as", "view_as", "reshape_as", "type_as"})


class Source(enum.Flag):
    """What a value was computed from."""

    NONE = 0
    NODE = enum.auto()  #: the graphs' nodes: features, positions
    EDGE = enum.auto()  #: the graphs' edges: index, weights, features, adjacency
    WEIGHT = enum.auto()  #: the model's parameters and buffers


@dataclass(frozen=True)
class Value:
    """One state of one tensor."""

    index: int
    shape: tuple[int, ...]
    floating: bool
    sources: Source
    parents: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Numbers per row."""
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class FunctionCall:
    """A call of a torch function that returned or changed a tensor."""

    time: int
    name: str
    counted: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]  #: what it returned, then what it changed in place
    #: The tensors it returned, then those among its arguments, each as it was after the call.
    slots: tuple[int, ...]


@dataclass(eq=False)
class ModuleCall:
    """A call of a module, with the values in its arguments and outputs."""

    name: str
    module: nn.Module
    number: int  #: 1 for the first call of this module in the pass
    start: int
    inputs: tuple[int, ...]
    parent: ModuleCall | None
    first_value: int  #: values from this index on were made during or after the call
    end_value: int = -1  #: values from this index on were made after it
    end: int = -1
    outputs: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """The module's name, with ``#2`` for its second call."""
        name = self.name or "model"
        return name if self.number == 1 else f"{name}#{self.number}"

    def contains(self, time: int) -> bool:
        """Whether something that happened at ``time`` happened inside this call."""
        return self.start < time < self.end

    def hides(self, value: int) -> bool:
        """Whether the value was made inside this call and not returned by it."""
        return self.first_value <= value < self.end_value and value not in self.outputs

    def enclosing(self) -> list[ModuleCall]:
        """Return the calls this one is nested in, innermost first."""
        calls = []
        call = self.parent
        while call is not None:
            calls.append(call)
            call = call.parent
        return calls


@dataclass(frozen=True)
class Trace:
    """All that a probe pass saw."""

    num_nodes: int
    num_graphs: int
    values: Sequence[Value]
    functions: Sequence[FunctionCall]
    modules: Sequence[ModuleCall]  #: by start
    #: Each time a PyG layer passed messages, as a call of ``LAYER.propagate``.
    steps: Sequence[ModuleCall]
    outputs: tuple[int, ...]  #: of the whole model

    @cached_property
    def ancestors(self) -> list[int]:
        """For each value the set of values it was computed from, itself included, as bits."""
        sets: list[int] = []
        for value in self.values:
            bits = 1 << value.index
            for parent in value.parents:
                bits |= sets[parent]
            sets.append(bits)
        return sets

    @cached_property
    def producer(self) -> dict[int, FunctionCall]:
        """The function call that made each value."""
        made: dict[int, FunctionCall] = {}
        for call in self.functions:
            for output in call.outputs:
                made.setdefault(output, call)
        return made

    def derives(self, value: int, source: int) -> bool:
        """Whether ``value`` is ``source`` or was computed from it."""
        return bool(self.ancestors[value] >> source & 1)

    def has_node_rows(self, value: int, *, dims: int = 2) -> bool:
        """Whether the value is floating point, with a row per node and at least ``dims`` dims."""
        shape = self.values[value].shape
        return self.values[value].floating and len(shape) >= dims and shape[:1] == (self.num_nodes,)

    def edge_only(self, value: int) -> bool:
        """Whether the value derives from the graphs' edges and not from their node features."""
        sources = self.values[value].sources
        return Source.EDGE in sources and Source.NODE not in sources


# --- the probe pass


def run_trace(model: nn.Module, batch: Batch) -> Trace:
    """Run the model once, recording every call; hooks are removed whatever happens."""
    recorder = _Recorder(model, batch)
    with ExitStack() as watched:
        for name, module in model.named_modules():
            watched.enter_context(watch_calls(module, *recorder.hooks(name)))
            if isinstance(module, MessagePassing):
                watched.enter_context(watch_propagation(module, *recorder.hooks(name, "propagate")))
        with _ScriptedOperators(), recorder:
            output = call_model(model, batch)
        outputs = tuple(recorder.value_of(tensor) for tensor in tensors_in(output))
    return Trace(
        num_nodes=int(batch.num_nodes),
        num_graphs=int(getattr(batch, "num_graphs", 1)),
        values=recorder.values,
        functions=recorder.functions,
        modules=recorder.modules,
        steps=recorder.steps,
        outputs=outputs,
    )


class _ScriptedOperators(TorchDispatchMode):
    """Calls operators from Python, so that those of scripted functions are seen like others."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass
class _Known:
    """A tensor that was seen; holding it keeps its id and its storage from being used again."""

    tensor: Tensor
    version: int
    value: int


class _Recorder(TorchFunctionMode):
    """Numbers the values and records the calls."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()
        self.values: list[Value] = []
        self.functions: list[FunctionCall] = []
        self.modules: list[ModuleCall] = []
        self.steps: list[ModuleCall] = []
        self._open: list[ModuleCall] = []
        self._counts: Counter[str] = Counter()
        self._tick = itertools.count(1).__next__
        self._known: dict[int, _Known] = {}
        self._latest_on_storage: dict[int, int] = {}
        for weight in (*model.parameters(), *model.buffers()):
            self._add(weight, version_of(weight), sources=Source.WEIGHT)
        for key, attribute in batch.to_dict().items():
            for tensor in tensors_in(attribute):
                self._add(tensor, version_of(tensor), sources=_source_of(key, tensor))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the function and record it if it returned or changed a tensor."""
        kwargs = kwargs or {}
        arguments = tensors_in(args, kwargs)
        versions = [version_of(tensor) for tensor in arguments]
        result = func(*args, **kwargs)
        returned = tensors_in(result)
        changed = [
            tensor
            for tensor, version in zip(arguments, versions, strict=True)
            if version_of(tensor) != version
        ]
        if returned or changed:
            name = function_name(func)
            values = tuple(map(self._value_at, arguments, versions))
            inputs = values[: 0 if name in _SHAPE_ONLY else 1 if name in _SHAPE_OF_OTHERS else None]
            if isinstance(func, OpOverload) and name.endswith("_") and not changed:
                # Inside a scripted function the version is counted after the operator has run.
                self._add(arguments[0], versions[0], inputs)
            outputs = [self.value_of(tensor, inputs) for tensor in (*returned, *changed)]
            slots = [self.value_of(tensor) for tensor in (*returned, *arguments)]
            self.functions.append(
                FunctionCall(
                    time=self._tick(),
                    name=name,
                    counted=is_counted(func, returned),
                    inputs=inputs,
                    outputs=tuple(dict.fromkeys(outputs)),
                    slots=tuple(slots),
                )
            )
        return result

    def hooks(self, name: str, method: str = "") -> tuple[Enter, Leave]:
        """Return what records the calls of the module called ``name``, or of a method of it."""
        if method:
            name = f"{name}.{method}" if name else method
        calls = self.steps if method else self.modules

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._counts[name] += 1
            with torch._C.DisableTorchFunction():
                call = ModuleCall(
                    name=name,
                    module=module,
                    number=self._counts[name],
                    start=self._tick(),
                    inputs=tuple(map(self.value_of, tensors_in(args, kwargs))),
                    parent=self._open[-1] if self._open else None,
                    first_value=len(self.values),
                )
            calls.append(call)
            self._open.append(call)

        def leave(module: nn.Module, output: Any) -> None:
            with torch._C.DisableTorchFunction():
                call = self._open.pop()
                while call.name != name:  # a call that raised, and the model went on
                    call = self._open.pop()
                # Where an operation was not seen, a module's output comes from its input.
                outputs = [self.value_of(tensor, call.inputs) for tensor in tensors_in(output)]
                call.outputs = tuple(outputs)
                call.end_value = len(self.values)
                call.end = self._tick()

        return enter, leave

    def value_of(self, tensor: Tensor, parents: Iterable[int] = ()) -> int:
        """Return the value of the tensor as it is now; a new one is made of ``parents``."""
        return self._value_at(tensor, version_of(tensor), tuple(parents))

    def _value_at(self, tensor: Tensor, version: int, parents: tuple[int, ...] = ()) -> int:
        known = self._known.get(id(tensor))
        if known is not None and known.version == version:
            return known.value
        if not parents:
            # Seen for the first time, or changed behind our back: through a view of the same
            # memory, if anything.
            latest = self._latest_on_storage.get(_storage(tensor))
            parents = () if latest is None else (latest,)
            parents += () if known is None else (known.value,)
        return self._add(tensor, version, parents)

    def _add(
        self,
        tensor: Tensor,
        version: int,
        parents: tuple[int, ...] = (),
        sources: Source = Source.NONE,
    ) -> int:
        for parent in parents:
            sources |= self.values[parent].sources
        value = Value(
            index=len(self.values),
            shape=_shape(tensor),
            floating=tensor.is_floating_point(),
            sources=sources,
            parents=tuple(dict.fromkeys(parents)),
        )
        self.values.append(value)
        self._known[id(tensor)] = _Known(tensor, version, value.index)
        if (storage := _storage(tensor)) != 0:
            self._latest_on_storage[storage] = value.index
        return value.index


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; of a nested one the number of tensors in it."""
    return (tensor.size(0),) if tensor.is_nested else tuple(tensor.shape)


def _storage(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; 0 if it has none, or not one piece of it."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, tensors that wrap others
        return 0


def _source_of(key: str, tensor: Tensor) -> Source:
    if key == "y" or key.startswith("edge_label"):
        return Source.NONE
    if key.startswith(("edge", "adj")) or tensor.layout != torch.strided:
        return Source.EDGE
    # The batch vector holds which rows belong together, nothing of the nodes themselves.
    return Source.NONE if key in ("batch", "ptr") else Source.NODE
