"""The linear maps between the last layers and a value: those of the layers, and those beyond."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch_geometric.nn import JumpingKnowledge

from .functions import JOINING, LINEAR
from .layers import Layers
from .trace import FunctionCall, Source


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
            behind = [
                value.index
                for value in self.trace.values
                if self.layers.is_full(value.index, end)
                and any(self.trace.derives(given, value.index) for given in call.inputs)
            ]
            if behind:
                return behind[-1], call
        return None

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
