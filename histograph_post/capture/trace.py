"""What one forward pass did: which calls made which tensors from what.

Every state of a tensor is a :class:`Value`, so a tensor that is changed in place becomes a new
one. Values, function calls and module calls share one clock; a value's parents always have a
smaller index than the value itself. :func:`anchor_value` and :func:`module_point` turn a value into
a capture point, by which every later pass finds it again.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from torch import nn

from ..errors import CaptureError
from .points import CapturePoint


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
        """Whether the value was made inside this call and not handed out."""
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
        """Whether the value tells of the graphs' edges and nothing of their node features."""
        sources = self.values[value].sources
        return Source.EDGE in sources and Source.NODE not in sources


@dataclass(frozen=True)
class TimedPoint:
    """A capture point, and when in the probe pass its tensor was there."""

    time: int
    point: CapturePoint


def module_point(
    trace: Trace,
    call: ModuleCall,
    kind: Literal["input", "output"],
    value: int,
    *,
    name: str,
    consumer: str,
) -> TimedPoint:
    """Take a value where it goes into, or comes out of, a module."""
    values, time = (call.inputs, call.start) if kind == "input" else (call.outputs, call.end)
    point = CapturePoint(
        name=name,
        kind=kind,
        module=call.name,
        call=call.number,
        index=values.index(value),
        width=trace.values[value].width,
        consumer=consumer,
    )
    return TimedPoint(time, point)


def anchor_value(trace: Trace, value: int, *, cut: int, name: str, consumer: str) -> TimedPoint:
    """Take a value at the last place it passes before it is consumed at the time ``cut``.

    The last, because what leaves a tensor alone in the probe pass may not in training: dropout.
    """
    ends = [call for call in trace.modules if value in call.outputs and call.end <= cut]
    passes = [call for call in trace.functions if value in call.outputs and call.time < cut]
    last_end = max(ends, key=lambda call: call.end, default=None)
    last_pass = passes[-1] if passes else None
    if last_end is not None and (last_pass is None or last_end.end > last_pass.time):
        return module_point(trace, last_end, "output", value, name=name, consumer=consumer)
    since = last_pass.time if last_pass is not None else 0
    for call in trace.modules:
        if since < call.start <= cut and value in call.inputs:
            return module_point(trace, call, "input", value, name=name, consumer=consumer)
    for function in trace.functions:
        if since <= function.time <= cut and function.counted and value in function.slots:
            return _function_point(trace, function, value, name=name, consumer=consumer)
    raise CaptureError(
        f"what the readout consumes after {name!r} is neither a module's nor a torch function's "
        "tensor (scripted code?); name a module to capture instead with --layers"
    )


def _function_point(
    trace: Trace, function: FunctionCall, value: int, *, name: str, consumer: str
) -> TimedPoint:
    """Take a value from a function call, counted from the end of the last module before it."""
    before = [call for call in trace.modules if 0 <= call.end < function.time]
    start = max(before, key=lambda call: call.end)
    calls = [
        call.name
        for call in trace.functions
        if call.counted and start.end < call.time <= function.time
    ]
    point = CapturePoint(
        name=name,
        kind="function",
        module=start.name,
        call=start.number,
        index=function.slots.index(value),
        width=trace.values[value].width,
        consumer=consumer,
        calls=tuple(calls),
    )
    return TimedPoint(function.time, point)
