"""The message-passing layers in a trace, which of them every value comes from, and what maps it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch_geometric.nn import JumpingKnowledge
from torch_geometric.nn.aggr import Aggregation

from ..errors import CaptureError
from .trace import JOINING, LINEAR, REDUCING, FunctionCall, ModuleCall, Source, Trace

_POOLING_PACKAGE = "torch_geometric.nn.pool"


def is_coarsening(module: nn.Module) -> bool:
    """Whether the module makes smaller graphs of graphs."""
    return any(kind.__module__.startswith(_POOLING_PACKAGE) for kind in type(module).__mro__)


def is_pooling(module: nn.Module) -> bool:
    """Whether the module turns the nodes of a graph into fewer rows: a readout or a pooling."""
    return isinstance(module, Aggregation) or is_coarsening(module)


@dataclass(frozen=True)
class Layer:
    """One call of a message-passing layer."""

    call: ModuleCall
    number: int  #: its bit in the sets of layers
    #: The node tensors among its arguments, in their order; none if these are integers.
    candidates: tuple[int, ...]

    @property
    def label(self) -> str:
        """The name of the module, with ``#2`` for its second call."""
        return self.call.label


@dataclass(frozen=True)
class Layers:
    """The message-passing layers of a trace, in execution order."""

    trace: Trace
    layers: tuple[Layer, ...]
    #: For every value the layers it derives from, as bits.
    made: Sequence[int]
    #: All calls that look like layers, also those after a problem and the readouts.
    calls: tuple[ModuleCall, ...]
    #: Message passing from nodes to something else: a readout.
    readouts: tuple[ModuleCall, ...]
    #: Why the layers are not all of the model's: a layer works on something else than the nodes.
    problem: CaptureError | None
    #: The call that is the problem.
    stopped_by: ModuleCall | None

    def inside(self, time: int) -> bool:
        """Whether something that happened at ``time`` happened inside a layer."""
        return any(call.contains(time) for call in self.calls)

    @cached_property
    def steps(self) -> list[FunctionCall]:
        """The function calls outside the layers."""
        return [call for call in self.trace.functions if not self.inside(call.time)]

    def has_node_rows(self, value: int) -> bool:
        """Whether the value has node rows; inside a layer, messages may be as many as nodes."""
        return self.trace.has_node_rows(value) and not any(call.hides(value) for call in self.calls)

    def frontier(self, value: int) -> list[Layer]:
        """Return the layers that made the value: those no other layer of the value builds on."""
        made = self.made[value]
        below = 0
        for layer in self._of(made):
            below |= self.before(layer)
        return list(self._of(made & ~below))

    def before(self, layer: Layer) -> int:
        """The layers this one builds on, as bits."""
        found = 0
        for value in layer.call.inputs:
            found |= self.made[value]
        return found

    def _of(self, bits: int) -> Iterator[Layer]:
        return (layer for layer in self.layers if bits >> layer.number & 1)

    def names_of(self, value: int) -> str:
        """Return the labels of the layers that made the value, joined where they are parallel."""
        return "+".join(layer.label for layer in self.frontier(value)) or "input"

    @cached_property
    def lines(self) -> list[int]:
        """For every value the outputs of layers it was computed from with no layer between."""
        ends = {value for layer in self.layers for value in made_by(layer.call)}
        lines: list[int] = []
        for value in self.trace.values:
            bits = 0
            for parent in value.parents:
                bits |= lines[parent]
            lines.append(1 << value.index if value.index in ends else bits)
        return lines

    def is_full(self, value: int, end: int) -> bool:
        """Whether the value has node rows, leads to ``end`` and is made of all its layers."""
        return (
            self.made[value] == self.made[end]
            and self.has_node_rows(value)
            and self.trace.derives(end, value)
        )

    def same_rows(self, before: int, value: int) -> bool:
        """Whether a value has node rows made by the same layers as another."""
        same = before >= 0 and self.made[before] == self.made[value]
        return same and self.trace.has_node_rows(before, dims=1)

    def given_before(self, end: int, alike: bool = True) -> list[int]:
        """Return what layers were given by others on the way to ``end``.

        With ``alike``, only layers of the types of the last ones, if there are such.
        """
        kinds = {type(layer.call.module) for layer in self.frontier(end)}
        given = [
            (type(layer.call.module) in kinds, value)
            for layer in self.layers
            if self.made[end] >> layer.number & 1
            for value in layer.candidates
            if self.made[value]
        ]
        alike = alike and any(same for same, _ in given)
        return [value for same, value in given if same or not alike]

    def width(self, value: int) -> int:
        """Numbers per row of a value."""
        return self.trace.values[value].width

    def leads_to(self, call: FunctionCall | ModuleCall, value: int) -> bool:
        """Whether the value was computed from what a call returned."""
        return any(self.trace.derives(value, output) for output in call.outputs)


def made_by(call: ModuleCall) -> list[int]:
    """The outputs of a call that it made itself; what it handed through is not among them."""
    return [output for output in call.outputs if output >= call.first_value]


# --- linear maps between the last layers and a value


class LinearMaps:
    """Finds the maps by weights on the way from the last layers to a value."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace = layers.trace

    def first_extra(self, end: int, after: int = 0) -> tuple[int, FunctionCall] | None:
        """Return the first linear map that no layer before has a counterpart of, and its input.

        Maps of the same shapes between earlier layers are counterparts: feed-forward blocks belong
        to the layers. With ``after``, the first map after that time is meant.
        """
        maps = self.to(end)
        if after:
            maps = [call for call in maps if call.time > after]
        else:
            shapes = [self._weight_shape(call) for call in maps]
            earlier = [
                [self._weight_shape(call) for call in self.to(given)]
                for given in self.layers.given_before(end)
            ]
            maps = maps[max((_same_start(shapes, other) for other in earlier), default=0) :]
        for call in maps:
            if (value := self._given(call, end)) is not None:
                return value, call
        return None

    def extra_step(self, end: int) -> tuple[int, FunctionCall | ModuleCall] | None:
        """Return the first norm or inner mean that no layer before has, and its input.

        A norm that is given what the layer returned belongs to the layer, and so does any where
        there is no layer before.
        """
        before = self.layers.given_before(end)
        for calls in (self._norms, self._reductions) if before else ():
            for call in calls(end)[max(len(calls(given)) for given in before) :]:
                value = self._given(call, end)
                if value is None:
                    continue
                if isinstance(call, FunctionCall) or self.layers.lines[value] != 1 << value:
                    return value, call
        return None

    def _reductions(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the sums or means over the inner dimensions of node rows, such as time steps."""
        return [
            call
            for call in self.layers.steps
            if call.name in REDUCING
            and any(self.layers.is_full(value, end) for value in call.inputs[:1])
            and len(self.trace.values[call.inputs[0]].shape) > 2
            and any(
                self.trace.has_node_rows(value)
                and 1 < self.layers.width(value) < self.layers.width(call.inputs[0])
                for value in call.outputs
            )
            and self.layers.leads_to(call, end)
        ]

    def _norms(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the norms with weights from the last layers to ``end``, in their order."""
        return [
            call
            for call in self.trace.modules
            if "norm" in type(call.module).__name__.lower()
            and any(True for _ in call.module.parameters())
            and not self.layers.inside(call.start)
            and any(self.layers.made[value] == self.layers.made[end] for value in call.inputs)
            and self.layers.leads_to(call, end)
        ]

    def _given(self, call: FunctionCall | ModuleCall, end: int) -> int | None:
        """Return the last node rows of all layers of ``end`` that went into a call, if any."""
        behind = [
            value.index
            for value in self.trace.values
            if self.layers.is_full(value.index, end)
            and any(self.trace.derives(given, value.index) for given in call.inputs)
        ]
        return behind[-1] if behind else None

    def to(self, end: int) -> list[FunctionCall]:
        """Return the linear maps with weights from the last layers to ``end``, in their order."""
        jumping = [call for call in self.trace.modules if isinstance(call.module, JumpingKnowledge)]
        return [
            call
            for call in self.layers.steps
            if self._has_weights(call)
            and any(self.layers.made[value] == self.layers.made[end] for value in call.inputs)
            and self.layers.leads_to(call, end)
            and not any(module.contains(call.time) for module in jumping)
        ]

    def _has_weights(self, call: FunctionCall) -> bool:
        """Whether a call multiplies by a matrix of weights: attention and recurrent cells too."""
        weights = [
            self.trace.values[value]
            for value in call.inputs
            if self.trace.values[value].sources == Source.WEIGHT
        ]
        matrices = any(len(weight.shape) > 1 for weight in weights)
        return bool(weights) and (call.name in LINEAR or (matrices and call.name not in JOINING))

    def _weight_shape(self, call: FunctionCall) -> tuple[int, ...]:
        values = (self.trace.values[value] for value in call.inputs)
        return max(
            (value.shape for value in values if value.sources == Source.WEIGHT), key=math.prod
        )


def _same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many entries two sequences have in common at their start."""
    differ = (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(first), len(second)))
