"""Weights that a readout gives to the nodes, and powers it takes of them: the pool's own."""

from __future__ import annotations

from .layers import Layers
from .trace import DIVIDING, GATING, LINEAR, MULTIPLYING, RAISING, RESHAPING, SQUASHING, SUMMING


class Gates:
    """Finds the states behind what is weighed or raised for a pool."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace = layers.trace
        self.made = layers.made
        #: Layers that only weigh the nodes for the readout, as bits: a graph convolution may score.
        self.scoring = 0
        #: What was found to weigh the nodes by several numbers each, as values.
        self.weights: set[int] = set()

    def without(self, end: int) -> tuple[int, bool]:
        """Return what a readout weighs, or takes powers of, before it reduces the rows.

        And whether it weighs it.
        """
        given = [value for layer in self.layers.frontier(end) for value in layer.candidates]
        if not any(self._raised(value) is not None for value in given):
            raised = end
            while (value := self._raised(raised)) is not None:
                raised = value
            if raised != end:
                end = self.unweighted(raised)  # by a temperature
        if any(self._behind(value) is not None for value in given):
            return end, False  # gates between the layers belong to the layers
        gated = self._behind(end)
        if gated is None:
            return end, False
        self.scoring |= self.made[end] & ~self.made[gated]
        return gated, True

    def unweighted(self, value: int) -> int:
        """Return what is multiplied before it is joined to others: a weight of the layer."""
        given = [each for layer in self.layers.frontier(value) for each in layer.candidates]
        if any(self._gated(each, numbers=True) is not None for each in given):
            return value
        while (gated := self._gated(value, numbers=True)) is not None:
            value = gated
        return value

    def _raised(self, value: int) -> int | None:
        """Return ``x`` if the value is a power, exp() or the products of ``x``, without weights."""
        call = self.trace.producer.get(value)
        if call is None or self.layers.inside(call.time):
            return None
        given = [each for each in call.inputs if self.layers.same_rows(each, value)]
        squares = call.name in MULTIPLYING and len({*map(self.unshaped, call.inputs)}) == 1
        if given and (call.name in RAISING or squares):
            return self.unshaped(given[0])
        before = self.unshaped(value)
        return None if before == value or self._raised(before) is None else before

    def unshaped(self, value: int) -> int:
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

    def _behind(self, value: int) -> int | None:
        """Return what is weighed, by one number per node or by several."""
        for product in (value, self.unshaped(value)):
            if self.layers.width(product) != self.layers.width(value):
                continue  # a part was cut out
            found = (self._gated(product), self._outer(product), self._by_channel(product))
            gated = next((value for value in found if value is not None), None)
            if gated is not None:
                return self._same_width(gated) if product != value else gated
        return None

    def _same_width(self, value: int) -> int:
        """Return a value before its shape was changed, if it has all of it."""
        state = self.unshaped(value)
        return state if self.layers.width(state) == self.layers.width(value) else value

    def _gated(self, value: int, *, numbers: bool = False) -> int | None:
        """Return ``x`` if the value is ``gate * x``, or ``x / gate``, with a gate of width 1.

        With ``numbers``, a gate may be one number for all nodes: sums start with zero, too.
        """
        call = self.trace.producer.get(value)
        kinds = DIVIDING | MULTIPLYING
        if call is None or call.name not in (kinds | SUMMING if numbers else kinds):
            return None
        shape = self.trace.values[value].shape
        wholes = [each for each in call.inputs if self.trace.values[each].shape == shape]
        gates = [each for each in call.inputs if each not in wholes]
        narrow = {(*shape[:-1], 1)} | ({(), (1,)} if numbers else set())
        if len(wholes) != 1 or shape[-1] < 2 or not (gates or numbers):
            return None
        gated = all(
            self.trace.values[gate].shape in narrow and self._is_gate(gate, beside=wholes[0])
            for gate in gates
        )
        return wholes[0] if gated else None

    def _outer(self, product: int) -> int | None:
        """Return ``x`` if the rows are outer products of ``x`` and several weights per node.

        Such as of soft clusters, or of the heads of an attention.
        """
        call = self.trace.producer.get(product)
        if (
            call is None
            or call.name not in MULTIPLYING | LINEAR
            or len(call.inputs) != 2
            or self.layers.inside(call.time)
            or not all(self.layers.same_rows(each, product) for each in call.inputs)
        ):
            return None
        for gate, gated in (call.inputs, call.inputs[::-1]):
            if (
                self.layers.width(gated) > 1
                and self.layers.width(gate) * self.layers.width(gated) == self.layers.width(product)
                and self._squashed(gate, beside=gated)
                and not self._squashed(gated, beside=gate)
                and self._is_gate(gate, beside=gated)
            ):
                self.weights.add(self.unshaped(gate))
                return self._same_width(gated)
        return None

    def _by_channel(self, product: int) -> int | None:
        """Return ``x`` if the rows are ``x`` times a softmax over the nodes, channel by channel."""
        call = self.trace.producer.get(product)
        if call is None or call.name not in MULTIPLYING or len(call.inputs) != 2:
            return None
        for gate, gated in (call.inputs, call.inputs[::-1]):
            wide = self.layers.width(gate) == self.layers.width(gated) > 1
            # The sum by which a softmax divides: of what was squashed in the rows of the nodes.
            if wide and any(
                self.layers.leads_to(step, gate)
                and not any(map(self.layers.has_node_rows, step.outputs))
                and any(
                    self.layers.same_rows(each, product) and self._squashed(each, beside=gated)
                    for each in step.inputs
                )
                for step in self.layers.steps
            ):
                return gated
        return None

    def _squashed(self, gate: int, *, beside: int) -> bool:
        """Whether a softmax or sigmoid, maybe by hand, went into a value and not into another."""
        return any(
            call.name in SQUASHING | {"exp", "exp_"}
            and self.layers.leads_to(call, gate)
            and not self.layers.leads_to(call, beside)
            for call in self.layers.steps
        )

    def _is_gate(self, gate: int, *, beside: int) -> bool:
        """Whether a number per node weighs the nodes: a norm computes one of the states alone."""
        if self.made[gate] != self.made[beside]:
            # From fewer layers, or none, such as a mass; or by layers of its own.
            fewer = not self.made[gate] & ~self.made[beside]
            derived = fewer or self.trace.derives(gate, beside)
            return derived or self._squashed(gate, beside=beside)
        # Weights or a squashing function went into it: a norm has neither.
        return any(
            (call.name in GATING or call.name in LINEAR)
            and self.layers.leads_to(call, gate)
            and not self.layers.leads_to(call, beside)
            for call in self.layers.steps
        )
