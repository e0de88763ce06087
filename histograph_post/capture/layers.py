"""The message-passing layers in a trace: which of them made a value, and what each consumes.

A layer may be given several node tensors: features and positions, scalars and vectors, a state and
a memory, or the network's input beside its own. The state is the one the readout descends from:
layers are looked at from the last to the first, each with what is wanted of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch_geometric.nn.aggr import Aggregation

from ..errors import CaptureError
from .trace import CONCATENATING, LINEAR, SLICING, FunctionCall, ModuleCall, Source, Trace

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
        return self.trace.has_node_rows(value) and not any(
            call.first_value <= value < call.end_value and value not in call.outputs
            for call in self.calls
        )

    def frontier(self, value: int) -> list[Layer]:
        """Return the layers that made the value: those no other layer of the value builds on."""
        makers = list(self._of(self.made[value]))
        below = self.trace.union(self.made[each] for layer in makers for each in layer.call.inputs)
        return [layer for layer in makers if not below >> layer.number & 1]

    def _of(self, bits: int) -> Iterator[Layer]:
        return (layer for layer in self.layers if bits >> layer.number & 1)

    def names_of(self, value: int) -> str:
        """Return the labels of the layers that made the value, joined where they are parallel."""
        return "+".join(layer.call.label for layer in self.frontier(value)) or "input"

    @cached_property
    def lines(self) -> list[int]:
        """For every value the outputs of layers it was computed from with no layer between."""
        ends = {value: 1 << value for layer in self.layers for value in made_by(layer.call)}
        return self.trace.inherited(ends, afresh=True)

    def is_full(self, value: int, end: int) -> bool:
        """Whether the value has node rows, leads to ``end`` and is made of all its layers."""
        return (
            self.made[value] == self.made[end]
            and self.has_node_rows(value)
            and self.trace.derives(end, value)
        )

    def is_alone(self, value: int, end: int) -> bool:
        """Whether every path from the last layers to ``end`` goes through the value."""
        last = sum(1 << layer.number for layer in self.frontier(end))
        open_values, seen = [end], {value}
        while open_values:
            each = open_values.pop()
            if each in seen or not self.made[each] & last:
                continue
            seen.add(each)
            if self.lines[each] == 1 << each:  # what a layer returned
                return False
            open_values += self.trace.values[each].parents
        return True

    def same_rows(self, before: int, value: int) -> bool:
        """Whether a value has node rows made by the same layers as another."""
        same = before >= 0 and self.made[before] == self.made[value]
        return same and self.trace.has_node_rows(before)

    def cut_from(self, value: int) -> int:
        """Return the rows of which a value is a part; else the value."""
        call = self.trace.producer.get(value)
        if call is None or call.name not in SLICING or self.inside(call.time):
            return value
        return call.inputs[0] if self.same_rows(call.inputs[0], value) else value

    def given_before(self, end: int) -> list[int]:
        """Return what layers were given by others on the way to ``end``."""
        return [
            value
            for layer in self._of(self.made[end])
            for value in layer.candidates
            if self.made[value]
        ]

    def is_held(self, value: int, held: Collection[int]) -> bool:
        """Whether a value is among those held, or merely puts such side by side.

        Maybe one after another, or into a tensor that was empty.
        """
        if value in held:
            return True
        call = self.trace.producer.get(value)
        if call is None or call.name not in CONCATENATING or self.inside(call.time):
            return False
        numbers = [each for each in call.inputs if self.trace.values[each].floating]
        return all(
            self.has_node_rows(each)
            and (self.trace.values[each].sources == Source.NONE or self.is_held(each, held))
            for each in numbers
        )

    def width(self, value: int) -> int:
        """Numbers per row of a value."""
        return self.trace.values[value].width

    def leads_to(self, call: FunctionCall | ModuleCall, value: int) -> bool:
        """Whether the value was computed from what a call returned."""
        return any(self.trace.derives(value, output) for output in call.outputs)


def made_by(call: ModuleCall) -> list[int]:
    """The outputs of a call that it made itself; what it handed through is not among them."""
    return [output for output in call.outputs if output >= call.first_value]


# --- which of its arguments a layer consumes as its state


def choose_inputs(layers: Layers, ends: Sequence[int]) -> dict[int, int | None]:
    """Return what each layer that leads to the ``ends`` consumes, by the layer's number.

    None stands for a layer that is given integers. Layers that no end descends from are left out.

    Raises:
        CaptureError: if a layer is given several node tensors, and nothing decides between them.
    """
    return _Choice(layers, ends).choose()


class _Choice:
    """The walk from the last layer to the first."""

    def __init__(self, layers: Layers, ends: Sequence[int]) -> None:
        self.layers = layers
        self.trace = layers.trace
        self.wanted = list(ends)
        #: For each type of layer the place among the arguments that was chosen.
        self.places: dict[type, int] = {}

    def choose(self) -> dict[int, int | None]:
        """Choose for one layer after another."""
        chosen: dict[int, int | None] = {}
        for layer in reversed(self.layers.layers):
            outputs = [value for value in layer.call.outputs if self._descend_from(value)]
            if not outputs:
                continue
            value = self._chosen(layer, outputs)
            chosen[layer.number] = value
            if value is not None:
                self.wanted.append(value)
            else:  # an integer has no state before it, but layers may have made it
                self.wanted += layer.call.inputs
        return chosen

    def _descend_from(self, output: int) -> list[int]:
        """Return the wanted values that come from an output with no layer between."""
        return [value for value in self.wanted if self.layers.lines[value] >> output & 1]

    def _chosen(self, layer: Layer, outputs: Sequence[int]) -> int | None:
        left = list(layer.candidates)
        if not left:
            return None
        tests: list[Callable[[list[int]], list[int]]] = [
            self._newest,
            lambda values: self._in_line(values, layer, outputs),
            lambda values: self._of_the_width(values, outputs),
            lambda values: self._at_the_place(values, layer),
            self._whole,
        ]
        for test in tests:
            if len(left) > 1:
                left = test(left) or left
        if len(left) > 1:
            raise self._undecided(layer, left)
        self.places.setdefault(type(layer.call.module), layer.call.inputs.index(left[0]))
        return self._before_weights(layer, left[0])

    def _newest(self, values: list[int]) -> list[int]:
        """Return those that more layers went into than into any other."""
        most = max(self.layers.made[value].bit_count() for value in values)
        return [value for value in values if self.layers.made[value].bit_count() == most]

    def _in_line(self, values: list[int], layer: Layer, outputs: Sequence[int]) -> list[int]:
        """Return those that come from the same output of the layer before as is wanted of this."""
        places = {layer.call.outputs.index(output) for output in outputs}
        if len(places) != 1:
            return []
        before = [
            other.call.outputs[place]
            for other in self.layers.layers
            for place in places
            if other.call.start < layer.call.start
            and type(other.call.module) is type(layer.call.module)
            and place < len(other.call.outputs)
        ]
        return [
            value
            for value in values
            if any(self.layers.lines[value] >> output & 1 for output in before)
        ]

    def _of_the_width(self, values: list[int], outputs: Sequence[int]) -> list[int]:
        """Return those as wide as what is wanted of the layer."""
        wanted = {value for output in outputs for value in self._descend_from(output)}
        widths = {self.trace.values[value].width for value in wanted}
        return [value for value in values if self.trace.values[value].width in widths]

    def _at_the_place(self, values: list[int], layer: Layer) -> list[int]:
        """Return the one at the place that was chosen for a later layer of the same type."""
        place = self.places.get(type(layer.call.module), len(layer.call.inputs))
        return [value for value in values if value in layer.call.inputs[place : place + 1]]

    def _whole(self, values: list[int]) -> list[int]:
        """Return the one that the others are cut from: the targets of (source, target) pairs."""
        wholes = {self.layers.cut_from(value) for value in values}
        return [value for value in values if wholes == {value}]

    def _undecided(self, layer: Layer, values: Sequence[int]) -> CaptureError:
        places = [layer.call.inputs.index(value) for value in values]
        described = ", ".join(
            f"{layer.call.label}:input:{place} {list(self.trace.values[value].shape)}"
            for place, value in zip(places, values, strict=True)
        )
        return CaptureError(
            f"layer {layer.call.label!r} is given {len(values)} node tensors, and the readout does "
            f"not decide which is the state: {described}; name the tensors to capture with --layers"
        )

    def _before_weights(self, layer: Layer, value: int) -> int:
        """Return the state of a step inside a layer: what it maps by weights before it sends it."""
        if layer.call not in self.trace.steps:
            return value
        call = self.trace.producer.get(value)
        if call is None or call.name not in LINEAR or layer.call.parent is None:
            return value
        weights = [each for each in call.inputs if self.trace.values[each].sources == Source.WEIGHT]
        states = [each for each in call.inputs if self.trace.has_node_rows(each)]
        inside = layer.call.parent.contains(call.time)
        return states[0] if weights and states and inside else value
