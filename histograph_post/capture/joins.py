"""The joins of a branch with others between its last layer and the readout.

A residual, a skip connection and what every layer before was given in the same way belong to the
layers; all other joins are the readout's: jumping knowledge, and branches that meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .gates import Gates
from .layers import Layer, Layers
from .steps import Steps
from .trace import (
    CHOOSING,
    CONCATENATING,
    JOINING,
    MULTIPLYING,
    SLICING,
    SUMMING,
    FunctionCall,
)


@dataclass(frozen=True)
class Join:
    """A call that joins values which other layers have made each."""

    call: FunctionCall
    members: Sequence[int]  #: the ones that are states of their branches
    others: Sequence[int]  #: those that fewer layers went into than into what is joined
    parallel: bool  #: whether none of them was made of all layers


class Joins:
    """Finds the joins on the way from the last layers to a value."""

    def __init__(self, layers: Layers, own_steps: Steps, gates: Gates) -> None:
        self.layers = layers
        self.gates = gates
        self.trace = layers.trace
        self.made = layers.made
        self.own_steps = own_steps

    def for_readout(self, end: int) -> Join | None:
        """Return where layers are joined for the readout on the way to ``end``, if they are."""
        state, _ = self.own_steps.first_extra(end) or (end, None)
        for join in self._joins(end):
            if join.parallel and not self._loses_branches(join.call, end):
                continue
            # What the readout does of its own afterwards does not tell whether layers do the same.
            of_layers = state if self.layers.leads_to(join.call, state) else end
            if not (
                self._is_residual(join, end)
                or self._is_skip(join, end)
                or self._is_whole(join.call)
                or self.is_habit(join, of_layers)
            ):
                return join
        return None

    def meeting(self, end: int) -> Join | None:
        """Return where the branches that lead to a value meet, if it can be seen."""
        return next((join for join in self._joins(end) if join.parallel), None)

    def _joins(self, end: int) -> Iterator[Join]:
        """Yield the calls on the way to ``end`` that join values of other layers each."""
        for call in self.layers.steps:
            if call.name not in JOINING or not self.layers.leads_to(call, end):
                continue
            members = [
                value
                for value in dict.fromkeys(map(self._by_node, call.inputs))
                if self.layers.has_node_rows(value)
                and self.trace.values[value].sources  # zeros are there to be written into
                and (self.made[value] or not self.trace.edge_only(value))
            ]
            full = [value for value in members if self.layers.is_full(value, end)]
            others = [value for value in members if self.made[value] != self.made[end]]
            widths = {*map(self.layers.width, members)}
            if call.name in MULTIPLYING and (
                len(widths) > 1 or not all(self.made[value] for value in others)
            ):
                continue  # a weight, not a layer
            if full and others:
                yield Join(call, full[-1:], others, parallel=False)
            elif len(others) > 1 and any(
                self.made[value] == self.made[end] for value in call.outputs
            ):
                yield Join(call, others, others, parallel=True)

    def _by_node(self, value: int) -> int:
        """Return the node rows that were given one more dimension before they are joined."""
        call = self.trace.producer.get(value)
        shape = self.trace.values[value].shape
        if call is not None and call.inputs and shape[:2] == (1, self.trace.num_nodes):
            before = call.inputs[0]
            if self.trace.values[before].shape == shape[1:]:
                return before
        return value

    def _loses_branches(self, call: FunctionCall, end: int) -> bool:
        """Whether parallel branches are added or reduced: side by side, they are all there."""
        return call.name not in CONCATENATING or any(
            self.layers.width(end) < self.layers.width(output)
            for output in call.outputs
            if self.trace.derives(end, output) and len(self.trace.values[output].shape) > 2
        )

    def _is_residual(self, join: Join, end: int) -> bool:
        """Whether a layer's output is added to what the layer was given, or to the input."""
        if join.call.name in CONCATENATING or join.parallel:
            return False
        fed = self.layers.frontier(end)
        if not all(self._is_own(each, fed) or self._is_input(each, fed) for each in join.others):
            return False
        # A maximum may as well be one over layers, unless all layers do so.
        before = self.layers.given_before(end)
        return not self._aggregates_alike(join) or any(
            self._aggregates_alike(earlier) for given in before for earlier in self._joins(given)
        )

    def _aggregates_alike(self, join: Join) -> bool:
        """Whether a join is a maximum, or adds a state to a sum it is in: a layer among others."""
        if join.call.name not in SUMMING:
            return join.call.name in CHOOSING
        summands, seen = list(join.members), set()
        while summands:
            value = summands.pop()
            seen.add(value)
            call = self.trace.producer.get(value)
            if call is not None and call.name in SUMMING and not self.layers.inside(call.time):
                summands += call.inputs
        return not seen.isdisjoint(join.others)

    def _is_skip(self, join: Join, end: int) -> bool:
        """Whether one earlier state is added, not a mean by weights, and nothing else is joined."""
        two = not join.parallel and len(join.call.inputs) == 2
        added = two and join.call.name in SUMMING
        whole = all(self.gates.unweighted(value) == value for value in join.members)
        return added and whole and len([*self._joins(end), *self._joins(join.others[0])]) == 1

    def _is_whole(self, call: FunctionCall) -> bool:
        """Whether parts of the channels are put side by side again: a reversible layer's state."""
        parts: dict[int, list[int]] = {}
        for cut in self.layers.steps if call.name in CONCATENATING else ():
            if cut.name in SLICING and cut.time < call.time and cut.inputs:
                parts.setdefault(cut.inputs[0], []).extend(cut.outputs)
        return any(
            len(values) == len(call.inputs) > 1
            and sum(map(self.layers.width, values)) == self.layers.width(whole)
            and all(map(self.trace.derives, call.inputs, values))
            for whole, values in parts.items()
        )

    def _is_input(self, value: int, fed: Sequence[Layer]) -> bool:
        """Whether the value is what the network started from, added to every layer."""
        value = self.gates.unweighted(value)
        return not self.made[value] and any(
            self.trace.derives(given, value) for layer in fed for given in layer.candidates
        )

    def _is_own(self, value: int, fed: Sequence[Layer]) -> bool:
        """Whether the value is what one of the layers was given, as it is or mapped."""
        for given in (given for layer in fed for given in layer.candidates):
            if self.made[value] != self.made[given]:
                continue
            # Layers that were joined on the way are more than what the layer was given.
            new = self.trace.ancestors[value] & ~self.trace.ancestors[given]
            if not any(
                any(new >> output & 1 for output in join.call.outputs)
                for join in self._joins(value)
            ):
                return True
        return False

    def is_habit(self, join: Join, end: int) -> bool:
        """Whether layers before were given what was joined in the same way."""
        kinds = (CONCATENATING, SUMMING, MULTIPLYING, CHOOSING)
        kind = next((kind for kind in kinds if join.call.name in kind), ())
        for given in self.layers.given_before(end):
            makers = self.layers.frontier(given)
            for earlier in self._joins(given):
                if earlier.parallel != join.parallel or earlier.call.name not in kind:
                    continue
                if self._takes_out(earlier.call, given):
                    continue
                if join.parallel or self._is_alike(earlier, given, join, end, makers):
                    return True
        return False

    def _is_alike(
        self, earlier: Join, given: int, join: Join, end: int, makers: Sequence[Layer]
    ) -> bool:
        """Whether an earlier layer was given what was joined as far back, and in the same way."""
        states = [{*map(self.gates.unweighted, each.others)} for each in (earlier, join)]
        if states[0] == states[1] and len([*self._joins(end)]) == 1:
            return True  # the same state is all that is joined to what each layer returned
        before, now = self._gaps(earlier, given), self._gaps(join, end)
        # What comes from the data, such as a graph's context, lies back ever further.
        data = not any(self.made[value] for value in (*earlier.others, *join.others))
        if not data and not before <= now:
            return False
        if join.call.name in CONCATENATING:
            return self.aggregates(join.call, end) == self.aggregates(earlier.call, given)
        inputs = [value for layer in makers for value in layer.candidates]
        return not all(
            self._is_own(value, makers)
            # Of what no layer has made, only that is own which comes from the layer's input.
            and (self.made[value] or any(self.trace.derives(value, each) for each in inputs))
            for value in earlier.others
        )

    def _gaps(self, join: Join, end: int) -> set[int]:
        """Return how many layers the joined values lie back."""
        return {(self.made[end] & ~self.made[value]).bit_count() for value in join.others}

    def done(self, join: Join, end: int) -> int:
        """Return when layers are joined: stacked ones when attention or a network made one row."""
        stacked = [value for value in join.call.outputs if len(self.trace.values[value].shape) > 2]
        for value in self.trace.values if stacked else ():
            if (
                len(value.shape) == 2
                and self.layers.is_full(value.index, end)
                and any(self.trace.derives(value.index, each) for each in stacked)
                and self.layers.is_alone(value.index, end)
            ):
                return self.trace.producer[value.index].time
        return join.call.time

    def _takes_out(self, join: FunctionCall, end: int) -> bool:
        """Whether ``end`` is cut out of what was joined: one of the layers again."""
        last = self.trace.producer.get(end)
        return (
            last is not None
            and last.name in SLICING
            and not set(join.outputs).isdisjoint(last.inputs)
        )

    def aggregates(self, join: FunctionCall, end: int) -> bool:
        """Whether more than concatenation lies between the joined layers and ``end``."""
        if join.name not in CONCATENATING:
            return True
        joined = [output for output in join.outputs if self.trace.derives(end, output)]
        if self._takes_out(join, end):
            return False
        if any(self.layers.width(end) < self.layers.width(output) for output in joined):
            return True
        return any(call.time > join.time for call in self.own_steps.maps(end))
