"""Which of its arguments a layer consumes as the state that the layers before hand on.

A layer may be given several node tensors: features and positions, scalars and vectors, a state and
a memory, or the network's input beside its own. The state is the one the readout descends from:
layers are looked at from the last to the first, each with what is wanted of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import CaptureError
from .layers import Layer, Layers
from .trace import LINEAR, SLICING, Source


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
        place = self.places.get(type(layer.call.module), -1)
        return [value for value in values if layer.call.inputs.index(value) == place]

    def _whole(self, values: list[int]) -> list[int]:
        """Return the one that the others are parts of: the targets of (source, target) pairs."""

        def is_part(value: int, whole: int) -> bool:
            call = self.trace.producer.get(value)
            return call is not None and call.name in SLICING and whole in call.inputs

        return [
            whole
            for whole in values
            if all(value == whole or is_part(value, whole) for value in values)
        ]

    def _undecided(self, layer: Layer, values: Sequence[int]) -> CaptureError:
        places = [layer.call.inputs.index(value) for value in values]
        described = ", ".join(
            f"{layer.label}:input:{place} {list(self.trace.values[value].shape)}"
            for place, value in zip(places, values, strict=True)
        )
        return CaptureError(
            f"layer {layer.label!r} is given {len(values)} node tensors, and the readout does not "
            f"decide which is the state: {described}; name the tensors to capture with --layers"
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
