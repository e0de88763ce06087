"""The steps of a branch between its last layer and the readout: maps by weights, norms, means.

What every layer before went through in the same way, such as feed-forward blocks, belongs to the
layers; all other steps are the readout's.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from functools import cached_property

from torch_geometric.nn import JumpingKnowledge

from .layers import Layers
from .trace import (
    CONCATENATING,
    GATHERING,
    JOINING,
    LINEAR,
    MULTIPLYING,
    REDUCING,
    SUMMING,
    FunctionCall,
    ModuleCall,
    Source,
)


class Steps:
    """Finds what the last layers' rows go through on the way to a value, beside joins.

    Maps by weights, norms with weights, and means over inner dimensions such as time. What an
    earlier layer's rows go through as well, in the same order, belongs to the layers.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace = layers.trace

    def first_extra(self, end: int) -> tuple[int, FunctionCall | ModuleCall] | None:
        """Return the first step to ``end`` that no layer before has, and its input."""
        before = self.layers.given_before(end)
        extra: list[FunctionCall | ModuleCall] = []
        # A single layer has its norms for itself.
        others = (self._scales, self._inner_means) if before else ()
        for find in (self.maps, self._widenings, *others):
            calls = find(end)
            kinds = [self._kind(call) for call in calls]
            habits = [[self._kind(call) for call in find(given)] for given in before]
            same = (itertools.takewhile(bool, map(operator.eq, kinds, habit)) for habit in habits)
            extra += calls[max(map(sum, same), default=0) :]
        return self._first(extra, end)

    def first_map(self, end: int, after: int) -> tuple[int, FunctionCall | ModuleCall] | None:
        """Return the first map by weights after a time on the way to ``end``, and its input."""
        return self._first([call for call in self.maps(end) if call.time > after], end)

    def _first(
        self, calls: Sequence[FunctionCall | ModuleCall], end: int
    ) -> tuple[int, FunctionCall | ModuleCall] | None:
        """Return the first call with node rows behind it, and the last of these."""
        for call in sorted(calls, key=lambda call: call.time):
            behind = [
                value.index
                for value in self.trace.values
                if self.layers.is_full(value.index, end)
                and any(self.trace.derives(given, value.index) for given in call.inputs)
            ]
            if behind:
                # Values that are computed side by side, such as invariants, are each a part of it.
                alone = [value for value in behind if self.layers.is_alone(value, end)]
                return (alone or behind)[-1], call
        return None

    def maps(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the maps by weights from the last layers to ``end``, in their order."""
        jumping = [call for call in self.trace.modules if isinstance(call.module, JumpingKnowledge)]
        return [
            call
            for call in self.layers.steps
            if self._has_weights(call)
            and any(self.layers.made[value] == self.layers.made[end] for value in call.inputs)
            and self.layers.leads_to(call, end)
            and not any(module.contains(call.time) for module in jumping)
        ]

    def _scales(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the scales on the way to ``end``.

        Not one that is given what a layer returned: its own.
        """
        return [
            step
            for step in self._all_scales
            if any(self.layers.made[value] == self.layers.made[end] for value in step.inputs)
            and not any(self.layers.lines[value] == 1 << value for value in step.inputs)
            and self.layers.leads_to(step, end)
        ]

    @cached_property
    def _all_scales(self) -> Sequence[FunctionCall | ModuleCall]:
        """The norms and other steps with a weight per channel, as modules where they are."""
        found: dict[int, FunctionCall | ModuleCall] = {}
        for call in self.layers.steps:
            vectors = any(math.prod(shape) > 1 for shape in self._weights(call))
            if (
                not (vectors or self._is_scaled_by_data(call))
                or call.name in LINEAR | SUMMING | CONCATENATING
            ):
                continue
            inner = next(m for m in reversed(self.trace.modules) if m.contains(call.time))
            whole = any(inner.contains(layer.start) for layer in self.layers.calls)
            step = call if whole else inner
            found[id(step)] = step
        return list(found.values())

    def _is_scaled_by_data(self, call: FunctionCall) -> bool:
        """Whether a call multiplies by a number per node and channel that no layer made."""
        return call.name in MULTIPLYING and any(
            not self.layers.made[value]
            and self.layers.width(value) > 1
            and self.trace.values[value].sources != Source.NONE
            for value in filter(self.layers.has_node_rows, call.inputs)
        )

    def _inner_means(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the sums or means over the inner dimensions of node rows, such as time steps.

        Over the channels, where nothing but the sum leads to ``end``: a norm needs the states, too.
        """
        return [
            call
            for call in self.layers.steps
            if call.name in REDUCING
            and any(self.layers.is_full(value, end) for value in call.inputs[:1])
            and self.layers.width(end) < self.layers.width(call.inputs[0])
            and any(map(self.trace.has_node_rows, call.outputs))
            and self.layers.leads_to(call, end)
            and (
                self.layers.width(end) > 1
                if len(self.trace.values[call.inputs[0]].shape) > 2
                else any(self.layers.is_alone(value, end) for value in call.outputs)
            )
        ]

    def _widenings(self, end: int) -> Sequence[FunctionCall | ModuleCall]:
        """Return the steps without weights that widen the last layers' rows, by these alone.

        Such as a graph's mean beside its nodes, or soft bins of every channel.
        """
        line = self.layers.lines[end]
        widest = max(
            (each.width for each in self.trace.values if line >> each.index & 1), default=0
        )
        return [
            call
            for call in self.layers.steps
            if any(
                self.layers.is_full(value, end) and self.layers.width(value) > widest
                for value in call.outputs
            )
            and not self._has_weights(call)
            and any(self.layers.is_alone(value, end) for value in call.inputs)
            and all(
                self.layers.is_full(value, end) and self.layers.width(value) <= widest
                for value in call.inputs
                if self.trace.has_node_rows(value) and not self.trace.edge_only(value)
            )
        ]

    def _weights(self, call: FunctionCall | ModuleCall) -> list[tuple[int, ...]]:
        """The shapes of the weights among the arguments; of those looked up for a node, of one."""
        whole = [self.trace.values[value].shape for value in filter(self._is_weight, call.inputs)]
        rows = [
            self.trace.values[value].shape[1:]
            for value in call.inputs
            if (made := self.trace.producer.get(value)) is not None
            and made.name in GATHERING
            and self.trace.has_node_rows(value)
            and any(map(self._is_weight, made.inputs))
        ]
        return whole + rows

    def _is_weight(self, value: int) -> bool:
        return self.trace.values[value].sources == Source.WEIGHT

    def _has_weights(self, call: FunctionCall) -> bool:
        """Whether a call multiplies by a matrix of weights: attention and recurrent cells too."""
        weights = self._weights(call)
        matrices = any(len(shape) > 1 for shape in weights)
        return bool(weights) and (call.name in LINEAR or (matrices and call.name not in JOINING))

    def _kind(self, call: FunctionCall | ModuleCall) -> tuple[int, ...]:
        """What tells a map from another: the shape of its matrix; all norms are alike."""
        matrices = [shape for shape in self._weights(call) if len(shape) > 1]
        return max(matrices, key=math.prod, default=())
