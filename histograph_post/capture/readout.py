"""What a model's readout consumes: the activation after the last message-passing layer.

From the output of the last layer the activation goes on through norms, activation functions,
residuals and feed-forward blocks. It ends

* at a readout module: an aggregation, a pooling, JumpingKnowledge;
* where layers are concatenated or stacked by hand (jumping knowledge without the module), unless
  the layers before are fed that way too. Layers that are summed cannot be told from residuals, so a
  sum belongs to the layer;
* in a model with one output row per graph (or per link), where the rows of nodes are reduced for
  good: norms that look at whole graphs come back to node rows. Attention weights a readout computes
  and multiplies with are the readout's, not the layer's;
* in a model with one output row per node, at the first linear map that has no counterpart between
  the layers before, and before softmax or sigmoid.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from torch_geometric.nn import JumpingKnowledge

from ..errors import CaptureError
from .layers import Layers, is_pooling
from .trace import FunctionCall, Source, Trace

_JOINING = frozenset({"cat", "concat", "concatenate", "hstack", "column_stack", "dstack", "stack"})
_LINEAR = frozenset(
    {"linear", "matmul", "__matmul__", "__rmatmul__", "mm", "addmm", "bmm", "baddbmm"}
    | {"einsum", "bilinear", "tensordot"}
)
_MULTIPLYING = frozenset({"mul", "mul_", "__mul__", "__rmul__", "multiply"})
_SQUASHING = frozenset({"softmax", "log_softmax", "sigmoid", "sigmoid_", "logsigmoid"})
_GATING = _SQUASHING | {"exp", "exp_", "tanh"}
_RESHAPING = frozenset({"squeeze", "squeeze_", "view", "reshape", "flatten", "__getitem__"})

_END = sys.maxsize


@dataclass(frozen=True)
class LastActivation:
    """The value a readout consumes."""

    value: int
    cut: int  #: when it is consumed
    consumer: str  #: by what


def find_last_activation(layers: Layers) -> LastActivation:
    """Find what the readout consumes in the pass that was traced."""
    return _Readout(layers).find()


class _Readout:
    """The search for the last activation."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace: Trace = layers.trace
        self.depth = layers.deepest
        #: Function calls outside the layers.
        self.steps = [call for call in self.trace.functions if not layers.inside(call.time)]

    def find(self) -> LastActivation:
        """Follow the last layer's output to its end, or to the first stop on the way."""
        outputs = [
            value
            for value in self.trace.outputs
            if self.layers.depths[value] == self.depth and self.trace.values[value].floating
        ]
        nodes = [value for value in outputs if self.trace.has_node_rows(value, dims=1)]
        graphs = [value for value in outputs if self._has_graph_rows(value) and value not in nodes]
        by_node = bool(nodes) and not graphs
        end = self._end_by_node(nodes[0]) if by_node else self._end_by_reduction(graphs or outputs)
        stops = [*self._readout_modules(end.value), *self._joined_layers(end.value)]
        if by_node:
            stops += self._linear_head(end.value)
        if stops:
            return min(stops, key=lambda stop: stop.cut)
        return end if by_node else self._without_gate(end)

    def _has_graph_rows(self, value: int) -> bool:
        """Whether the value has a row per graph; of a single graph, [1] may be a loss."""
        shape, num_graphs = self.trace.values[value].shape, self.trace.num_graphs
        return shape[:1] == (num_graphs,) and (num_graphs > 1 or len(shape) > 1)

    def _is_last(self, value: int) -> bool:
        return self.layers.is_activation(value, self.depth)

    def _describe(self, call: FunctionCall) -> str:
        """Name a function call by the module it is in, if that is not the model itself."""
        around = [module for module in self.trace.modules if module.contains(call.time)]
        if not around or around[-1].parent is None:
            # A pooling function starts by making the zeros it will add the nodes to.
            pools = call.name.startswith(("new_", "scatter", "index_add", "segment"))
            return "pooling over the nodes" if pools else f"{call.name}()"
        return f"{around[-1].label} ({type(around[-1].module).__name__})"

    def _end_by_node(self, output: int) -> LastActivation:
        """Return the model's output without its final softmax and the shape it is given."""
        end = LastActivation(output, _END, "the model's output")
        while (call := self.trace.producer.get(end.value)) is not None:
            flat = not self.trace.has_node_rows(end.value)
            final = call.name in _SQUASHING or (flat and call.name in _RESHAPING)
            before = call.inputs[0] if call.inputs else -1
            if not final or self.layers.inside(call.time) or not self._deep_rows(before):
                break
            end = LastActivation(before, call.time, self._describe(call))
        return end

    def _deep_rows(self, value: int) -> bool:
        return (
            value >= 0
            and self.layers.depths[value] == self.depth
            and self.trace.has_node_rows(value, dims=1)
        )

    def _end_by_reduction(self, outputs: list[int]) -> LastActivation:
        """Return the value whose rows are reduced for good on the way to the outputs."""
        wanted = 0
        for output in outputs:
            wanted |= self.trace.ancestors[output]
        reductions: dict[int, FunctionCall] = {}
        for call in self.steps:
            for value in filter(self._is_last, call.inputs):
                reaches_output = any(
                    wanted >> made & 1 and self.trace.values[made].floating for made in call.outputs
                )
                if reaches_output and not any(map(self._stays_by_node, call.outputs)):
                    reductions.setdefault(value, call)
        if not reductions:
            return self._newest()
        value = max(reductions, key=self._rank)
        call = reductions[value]
        return LastActivation(value, call.time, self._describe(call))

    def _newest(self) -> LastActivation:
        """Return the newest activation, where the way to the output cannot be seen."""
        made = [value for call in self.steps for value in call.outputs]
        made += [value for layer in self.layers.layers for value in layer.call.outputs]
        value = max(filter(self._is_last, made), key=self._rank, default=None)
        if value is None:
            raise CaptureError(
                f"nothing comes of layer {self.layers.layers[-1].label!r}, the last one; "
                "name the layers to capture with --layers"
            )
        return LastActivation(value, _END, "the model's output")

    def _rank(self, value: int) -> tuple[bool, int]:
        """Prefer the newest; a score per node is no activation if there is anything else."""
        return self.trace.values[value].width > 1, value

    def _stays_by_node(self, value: int) -> bool:
        return self.layers.has_node_rows(value) or self._comes_back[value]

    @cached_property
    def _comes_back(self) -> list[bool]:
        """For each value whether something with node rows is computed from it."""
        found = [False] * len(self.trace.values)
        for value in reversed(self.trace.values):
            if found[value.index] or self.layers.has_node_rows(value.index):
                for parent in value.parents:
                    found[parent] = True
        return found

    def _readout_modules(self, end: int) -> Iterator[LastActivation]:
        """Yield the inputs of readout modules on the way to ``end``."""
        for call in self.trace.modules:
            jumping = isinstance(call.module, JumpingKnowledge)
            readout = jumping or is_pooling(call.module) or call in self.layers.readouts
            if not readout or self.layers.inside(call.start):
                continue
            if not jumping and any(self._comes_back[output] for output in call.outputs):
                continue
            consumed = [value for value in call.inputs if self._is_last(value)]
            if consumed and self.trace.derives(end, consumed[0]):
                consumer = f"{call.label} ({type(call.module).__name__})"
                yield LastActivation(consumed[-1 if jumping else 0], call.start, consumer)

    def _joined_layers(self, end: int) -> Iterator[LastActivation]:
        """Yield the deepest of the layers that are concatenated on the way to ``end``."""
        for call in self.steps:
            if call.name not in _JOINING or not self._leads_to(call, end):
                continue
            depths = self._joined_depths(call)
            if self.depth in depths and len(depths - {0}) > 1 and not self._is_habit(depths):
                last = [value for value in call.inputs if self._is_last(value)][-1]
                yield LastActivation(last, call.time, f"{call.name}() over layers")

    def _leads_to(self, call: FunctionCall, value: int) -> bool:
        return any(self.trace.derives(value, output) for output in call.outputs)

    def _joined_depths(self, call: FunctionCall) -> set[int]:
        return {
            self.layers.depths[value]
            for value in call.inputs
            if self.layers.has_node_rows(value) and Source.NODE in self.trace.values[value].sources
        }

    def _is_habit(self, depths: set[int]) -> bool:
        """Whether the last layer was fed by joining the same layers, one step earlier."""
        one_step_earlier = (depths - {self.depth}, {depth - 1 for depth in depths})
        return any(
            self._joined_depths(call) in one_step_earlier
            for layer in self.layers.layers
            for call in self.steps
            if layer.depth == self.depth and layer.input is not None
            if call.name in _JOINING and self._leads_to(call, layer.input)
        )

    def _linear_maps(self, end: int, depth: int) -> list[FunctionCall]:
        """Return the linear maps with weights from the layers of that depth to ``end``."""
        return [
            call
            for call in self.steps
            if call.name in _LINEAR
            and any(self.layers.is_activation(value, depth) for value in call.inputs)
            and any(self.trace.values[value].sources == Source.WEIGHT for value in call.inputs)
            and self._leads_to(call, end)
        ]

    def _linear_head(self, end: int) -> Iterator[LastActivation]:
        """Yield the input of the first linear map that no layer before has a counterpart of."""
        per_layer = min(
            (
                len(self._linear_maps(layer.input, layer.depth - 1))
                for layer in self.layers.layers
                if layer.depth > 1 and layer.input is not None
            ),
            default=0,
        )
        for call in self._linear_maps(end, self.depth)[per_layer:][:1]:
            value = next(value for value in call.inputs if self._is_last(value))
            yield LastActivation(value, call.time, self._describe(call))

    def _without_gate(self, end: LastActivation) -> LastActivation:
        """Return what a readout weighs, if ``end`` is that times a weight per node."""
        fed = [layer.input for layer in self.layers.layers if layer.depth == self.depth]
        if any(value is not None and self._gated(value) is not None for value in fed):
            return end  # gates between the layers belong to the layers
        gated = self._gated(end.value)
        if gated is None:
            return end
        call = self.trace.producer[end.value]
        return LastActivation(gated, call.time, f"{end.consumer}, weighted per node")

    def _gated(self, value: int) -> int | None:
        """Return ``x`` if the value is ``gate * x`` with a computed gate of width 1."""
        call = self.trace.producer.get(value)
        if call is None or call.name not in _MULTIPLYING or len(call.inputs) != 2:
            return None
        shape, depth = self.trace.values[value].shape, self.layers.depths[value]
        for gate, gated in (call.inputs, call.inputs[::-1]):
            if (
                self.trace.values[gated].shape == shape
                and self.trace.values[gate].shape == (*shape[:-1], 1)
                and shape[-1] > 1
                and self.layers.depths[gate] == self.layers.depths[gated] == depth
                and self._is_computed(gate, beside=gated)
            ):
                return gated
        return None

    def _is_computed(self, gate: int, *, beside: int) -> bool:
        """Whether weights or a squashing function went into the gate: a norm has neither."""
        return any(
            (call.name in _GATING or call.name in _LINEAR)
            and self._leads_to(call, gate)
            and not self._leads_to(call, beside)
            for call in self.steps
        )
