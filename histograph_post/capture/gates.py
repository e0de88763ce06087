"""What a readout does to every node before it pools: weights per node, powers, exponentials."""

from __future__ import annotations

from .layers import Layers
from .trace import DIVIDING, GATING, LINEAR, MULTIPLYING, RAISING, RESHAPING


class Gates:
    """Finds the states behind what is weighed or raised for a pool."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace = layers.trace
        self.made = layers.made
        #: Layers that only weigh the nodes for the readout, as bits: a graph convolution may score.
        self.scoring = 0

    def without(self, end: int) -> tuple[int, bool]:
        """Return what a readout weighs, or takes powers of, before it reduces the rows.

        And whether it weighs it.
        """
        given = [value for layer in self.layers.frontier(end) for value in layer.candidates]
        if not any(self._raised(value) is not None for value in given):
            while (value := self._raised(end)) is not None:
                end = value
        if any(self._gated(value) is not None for value in given):
            return end, False  # gates between the layers belong to the layers
        gated = self._gated(end)
        if gated is None:
            return end, False
        self.scoring |= self.made[end] & ~self.made[gated]
        return gated, True

    def _raised(self, value: int) -> int | None:
        """Return ``x`` if the value is a power, exp() or the products of ``x``, without weights."""
        call = self.trace.producer.get(value)
        if call is None or self.layers.inside(call.time):
            return None
        given = [each for each in call.inputs if self.layers.same_rows(each, value)]
        squares = call.name in MULTIPLYING and len({*map(self._unshaped, call.inputs)}) == 1
        if given and (call.name in RAISING or squares):
            return self._unshaped(given[0])
        before = self._unshaped(value)
        return None if before == value or self._raised(before) is None else before

    def _unshaped(self, value: int) -> int:
        """Return a value before its shape was changed, or small numbers were clamped."""
        call = self.trace.producer.get(value)
        while (
            call is not None
            and call.name in RESHAPING | {"clamp", "unsqueeze"}
            and call.inputs
            and self.layers.same_rows(call.inputs[0], value)
            and not self.layers.inside(call.time)
        ):
            value = call.inputs[0]
            call = self.trace.producer.get(value)
        return value

    def _gated(self, value: int) -> int | None:
        """Return ``x`` if the value is ``gate * x``, or ``x / gate``, with a gate of width 1."""
        call = self.trace.producer.get(value)
        if call is None or len(call.inputs) != 2:
            return None
        orders = [call.inputs[::-1]] if call.name in DIVIDING | MULTIPLYING else []
        orders += [call.inputs] if call.name in MULTIPLYING else []
        shape = self.trace.values[value].shape
        for gate, gated in orders:
            if (
                self.trace.values[gated].shape == shape
                and self.trace.values[gate].shape == (*shape[:-1], 1)
                and shape[-1] > 1
                and self._is_gate(gate, beside=gated)
            ):
                return gated
        return None

    def _is_gate(self, gate: int, *, beside: int) -> bool:
        """Whether a number per node weighs the nodes: a norm computes one of the states alone."""
        if self.made[gate] == self.made[beside]:
            return self._is_computed(gate, beside=beside)
        # From the data alone, such as a mass or a size; or by layers of its own from the states.
        return not self.made[gate] or self.trace.derives(gate, beside)

    def _is_computed(self, gate: int, *, beside: int) -> bool:
        """Whether weights or a squashing function went into the gate: a norm has neither."""
        return any(
            (call.name in GATING or call.name in LINEAR)
            and self.layers.leads_to(call, gate)
            and not self.layers.leads_to(call, beside)
            for call in self.layers.steps
        )
