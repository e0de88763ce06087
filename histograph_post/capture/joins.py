"""Where layers are joined for a readout: jumping knowledge, and branches that meet.

A residual, a skip connection and what every layer before was given in the same way belong to the
layers; all other joins are the readout's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .layers import Layer, Layers, LinearMaps
from .trace import CONCATENATING, JOINING, MULTIPLYING, SLICING, SUMMING, FunctionCall


@dataclass(frozen=True)
class Join:
    """A call that joins values which other layers have made each."""

    call: FunctionCall
    members: Sequence[int]  #: the ones that are states of their branches
    others: Sequence[int]  #: those that fewer layers went into than into what is joined
    parallel: bool  #: whether none of them was made of all layers


class Joins:
    """Finds the joins on the way from the last layers to a value."""

    def __init__(self, layers: Layers, maps: LinearMaps) -> None:
        self.layers = layers
        self.trace = layers.trace
        self.made = layers.made
        self.maps = maps

    def for_readout(self, end: int) -> Join | None:
        """Return where layers are joined for the readout on the way to ``end``, if they are."""
        fed = self.layers.frontier(end)
        for join in self._joins(end):
            if join.parallel and not self._loses_branches(join.call, end):
                continue
            if not (
                self._is_residual(join, fed) or self._is_skip(join, end) or self.is_habit(join, end)
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
            elif len(others) > 1 and any(self.layers.is_full(value, end) for value in call.outputs):
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

    def unweighted(self, value: int) -> int:
        """Return what is multiplied by a number before it is joined: a weight of the layer."""
        call = self.trace.producer.get(value)
        if call is None or call.name not in MULTIPLYING or self.layers.inside(call.time):
            return value
        rows = [each for each in call.inputs if self.trace.has_node_rows(each)]
        numbers = all(
            each in rows or math.prod(self.trace.values[each].shape) == 1 for each in call.inputs
        )
        return rows[0] if len(rows) == 1 and numbers else value

    def _loses_branches(self, call: FunctionCall, end: int) -> bool:
        """Whether parallel branches are added or reduced: side by side, they are all there."""
        return call.name not in CONCATENATING or any(
            self.layers.width(end) < self.layers.width(output)
            for output in call.outputs
            if self.trace.derives(end, output) and len(self.trace.values[output].shape) > 2
        )

    def _is_residual(self, join: Join, fed: Sequence[Layer]) -> bool:
        """Whether a layer's output is added to what the layer was given, or to the input."""
        return (
            join.call.name in SUMMING | MULTIPLYING
            and not join.parallel
            and all(self._is_own(other, fed) or self._is_input(other, fed) for other in join.others)
        )

    def _is_skip(self, join: Join, end: int) -> bool:
        """Whether one earlier state is added, and nothing else is joined."""
        if join.call.name not in SUMMING or join.parallel or len(join.others) > 1:
            return False
        return len(list(self._joins(end))) == 1 and not list(self._joins(join.others[0]))

    def _is_input(self, value: int, fed: Sequence[Layer]) -> bool:
        """Whether the value is what the network started from, added to every layer."""
        value = self.unweighted(value)
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
        kind = next((kind for kind in (CONCATENATING, SUMMING) if join.call.name in kind), ())
        for given in self.layers.given_before(end, alike=False):
            makers = self.layers.frontier(given)
            for earlier in self._joins(given):
                if earlier.parallel != join.parallel or earlier.call.name not in kind:
                    continue
                if join.parallel or self._is_alike(earlier, given, join, end, makers):
                    return True
        return False

    def _is_alike(
        self, earlier: Join, given: int, join: Join, end: int, makers: Sequence[Layer]
    ) -> bool:
        """Whether an earlier layer was given what was joined as far back, and in the same way."""
        before, now = self._gaps(earlier, given), self._gaps(join, end)
        if join.call.name in SUMMING:
            own = all(self._is_own(value, makers) for value in earlier.others)
            return before <= now and not own
        aggregates = self.aggregates(join.call, end)
        if aggregates != self.aggregates(earlier.call, given):
            return False
        return before == now if aggregates else before <= now

    def _gaps(self, join: Join, end: int) -> set[int]:
        """Return how many layers the joined values lie back."""
        return {(self.made[end] & ~self.made[value]).bit_count() for value in join.others}

    def aggregates(self, join: FunctionCall, end: int) -> bool:
        """Whether more than concatenation lies between the joined layers and ``end``."""
        if join.name not in CONCATENATING:
            return True
        joined = [output for output in join.outputs if self.trace.derives(end, output)]
        last = self.trace.producer.get(end)
        if last is not None and last.name in SLICING and set(joined) & set(last.inputs):
            return False  # one of the layers is taken out again
        if any(self.layers.width(end) < self.layers.width(output) for output in joined):
            return True
        return any(call.time > join.time for call in self.maps.to(end))
