"""What one forward pass did: which calls made which tensors from what.

Every state of a tensor is a :class:`Value`, so a tensor that is changed in place becomes a new
one. Values, function calls and module calls share one clock; a value's parents always have a
smaller index than the value itself.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn


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
