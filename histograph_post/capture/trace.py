"""The trace of a probe pass: all that a model did when it was run once.

Every state of a tensor is a :class:`Value`, so a tensor that is changed in place becomes a new
one. Values, function calls and module calls share one clock; a value's parents always have a
smaller index than the value itself.
"""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

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
    integer: bool  #: such as an index
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
    def time(self) -> int:
        """When it was called."""
        return self.start

    @property
    def label(self) -> str:
        """The module's name, with ``#2`` for its second call."""
        name = self.name or "model"
        return name if self.number == 1 else f"{name}#{self.number}"

    def contains(self, time: int) -> bool:
        """Whether something that happened at ``time`` happened inside this call."""
        return self.start < time < self.end

    def tensors(self, kind: str) -> tuple[int, ...]:
        """The values in its arguments, or in its outputs."""
        return self.inputs if kind == "input" else self.outputs

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
    #: Whether a pass over more or fewer nodes has shown that no row is as wide as there are nodes.
    tells_pairs: bool = False

    @functools.cached_property
    def ancestors(self) -> list[int]:
        """For each value the set of values it was computed from, itself included, as bits."""
        return self.inherited({value.index: 1 << value.index for value in self.values})

    def inherited(self, own: Mapping[int, int], *, afresh: bool = False) -> list[int]:
        """Return for each value its own bits, and those of all it was computed from.

        With ``afresh``, a value that has bits of its own has no others.
        """
        sets: list[int] = []
        for value in self.values:
            bits = own.get(value.index, 0)
            parents = () if afresh and bits else value.parents
            sets.append(bits | self.union(sets[parent] for parent in parents))
        return sets

    @staticmethod
    def union(sets: Iterable[int]) -> int:
        """Return what is in any of these sets, as bits."""
        return functools.reduce(operator.or_, sets, 0)

    @functools.cached_property
    def producer(self) -> dict[int, FunctionCall]:
        """The function call that made each value."""
        made: dict[int, FunctionCall] = {}
        for call in self.functions:
            for output in call.outputs:
                made.setdefault(output, call)
        return made

    def first_of(self, value: int) -> int:
        """Return the same tensor as the module made it before, if it was called so again.

        A readout of several steps may map the same states in each of them.
        """
        for again in self.modules:
            # Modules of others may be given numbers beside the tensors.
            if value in again.outputs and type(again.module).__module__.startswith("torch.nn."):
                for call in self.modules:
                    if (call.module, call.inputs) == (again.module, again.inputs):
                        return call.outputs[again.outputs.index(value)]
        return value

    def derives(self, value: int, source: int) -> bool:
        """Whether ``value`` is ``source`` or was computed from it."""
        return bool(self.ancestors[value] >> source & 1)

    def has_node_rows(self, value: int) -> bool:
        """Whether the value is floating point and has a row, or a number, per node.

        A number for each pair of nodes, as of attention, makes no row: its width is the batch's.
        """
        found = self.values[value]
        rows, *others = found.shape or (0,)
        pairs = self.tells_pairs and self.num_nodes in others
        return found.floating and rows == self.num_nodes and not pairs

    def is_zero(self, value: int) -> bool:
        """Whether the value was made as zeros, of nothing."""
        call = self.producer.get(value)
        zeros = call is not None and call.name in ("zeros", "zeros_like", "new_zeros", "clone")
        return zeros and all(map(self.is_zero, self.values[value].parents))

    def edge_only(self, value: int) -> bool:
        """Whether the value derives from the graphs' edges and not from their node features."""
        sources = self.values[value].sources
        return Source.EDGE in sources and Source.NODE not in sources


# --- the names of torch functions, by what they do to the rows of nodes

#: Functions that multiply matrices.
LINEAR = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm", "spmm"}
    | {"einsum", "bilinear", "tensordot", "sparse_mm"}
)

#: Functions that look rows up by an index.
GATHERING = frozenset({"index_select", "gather", "take_along_dim", "__getitem__", "embedding"})

#: Functions that add, or reduce, rows to those an index names.
SCATTERING = frozenset(
    {"index_add", "index_add_", "index_put", "index_put_", "index_reduce", "index_reduce_"}
    | {"scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_"}
    | {"scatter_mean", "scatter_max", "segment_reduce"}
)

#: Functions that read or write rows by an index.
INDEXING = GATHERING | SCATTERING | {"__setitem__", "index_copy", "index_copy_", "index"}

#: Functions that cut a tensor into parts.
SLICING = frozenset(
    {"chunk", "split", "split_with_sizes", "tensor_split", "unbind", "narrow", "hsplit"}
    | {"__getitem__", "select", "unsafe_chunk", "unsafe_split"}
)

#: Functions that put tensors side by side, or one into a part of the other.
CONCATENATING = frozenset(
    {"cat", "concat", "concatenate", "hstack", "column_stack", "dstack", "stack", "__setitem__"}
)

#: Functions that add rows up; a choice between two for each node is a sum with weights 0 and 1.
SUMMING = frozenset(
    {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "lerp", "addcmul", "where"}
)
MULTIPLYING = frozenset({"mul", "mul_", "__mul__", "__rmul__", "multiply"})
#: Functions by which a pool changes every number before it sums up: means of powers, of exp().
RAISING = frozenset({"pow", "pow_", "__pow__", "square", "exp", "exp_", "log", "log1p", "sqrt"})

#: Functions that leave fewer numbers.
REDUCING = frozenset({"sum", "mean", "max", "amax", "min", "amin", "norm", "logsumexp", "median"})

DIVIDING = frozenset({"div", "div_", "__truediv__", "divide", "true_divide"})

#: Functions that choose the larger, or the smaller, of two numbers.
CHOOSING = frozenset({"max", "maximum", "fmax", "min", "minimum", "fmin"})

#: Functions by which layers are joined.
JOINING = CONCATENATING | SUMMING | MULTIPLYING | CHOOSING

#: Functions that end a network with a row per node.
SQUASHING = frozenset({"softmax", "log_softmax", "sigmoid", "sigmoid_", "logsigmoid"})

#: Functions that make a weight per node.
GATING = SQUASHING | {"exp", "exp_", "tanh"}

#: Functions by which an index gets as many dimensions as what it is an index of.
EXPANDING = frozenset({"unsqueeze", "expand", "expand_as", "view", "repeat", "__getitem__"})

RESHAPING = frozenset({"squeeze", "squeeze_", "view", "reshape", "flatten", "__getitem__"})
