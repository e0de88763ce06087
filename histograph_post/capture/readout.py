"""What a model's readout consumes: where every branch of its layers ends.

From the output of its last layer a branch goes on through norms, activation functions, residuals
and feed-forward blocks. These belong to the layer, and what they give is its *state*. The state
ends

* where the rows of nodes are reduced for good, in a model with one output row per graph (or link):
  norms that look at whole graphs come back to node rows. Attention weights that a readout computes
  and multiplies with are the readout's;
* where layers are joined (jumping knowledge, as a module or by hand), unless the layers before
  are fed that way too: a residual is a sum with what the layer itself was given;
* at the first linear map that has no counterpart between the layers before;
* before softmax or sigmoid, in a model with one output row per node.

Where a sum or maximum over layers, or a linear map, lies between the state and the pooling, what is
pooled is another tensor than the state, and both are kept.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch_geometric.nn import JumpingKnowledge

from ..errors import CaptureError
from .layers import LINEAR, Layer, Layers, is_pooling
from .trace import FunctionCall, ModuleCall, Source, Trace

_CONCATENATING = frozenset(
    {"cat", "concat", "concatenate", "hstack", "column_stack", "dstack", "stack", "__setitem__"}
)
_SUMMING = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "lerp", "addcmul"})
_MAXIMISING = frozenset({"max", "maximum", "fmax", "min", "minimum"})
_MULTIPLYING = frozenset({"mul", "mul_", "__mul__", "__rmul__", "multiply"})
_JOINING = _CONCATENATING | _SUMMING | _MAXIMISING | _MULTIPLYING
_SQUASHING = frozenset({"softmax", "log_softmax", "sigmoid", "sigmoid_", "logsigmoid"})
_GATING = _SQUASHING | {"exp", "exp_", "tanh"}
_RESHAPING = frozenset({"squeeze", "squeeze_", "view", "reshape", "flatten", "__getitem__"})

_END = sys.maxsize


@dataclass(frozen=True)
class Consumed:
    """A value, when it is consumed, and by what."""

    value: int
    cut: int
    consumer: str


@dataclass(frozen=True)
class _Join:
    """A call that joins values which other layers have made each."""

    call: FunctionCall
    members: Sequence[int]  #: the ones that are states of their branches
    others: Sequence[int]  #: those that fewer layers went into than into what is joined
    parallel: bool  #: whether none of them was made of all layers

    @property
    def cut(self) -> int:
        """When the members are consumed."""
        return self.call.time


@dataclass(frozen=True)
class BranchEnd:
    """Where branches of layers end."""

    states: tuple[Consumed, ...]  #: one of each branch
    pooled: Consumed | None  #: what the readout consumes, where that is none of the states


def find_ends(layers: Layers) -> list[BranchEnd]:
    """Find what the readout consumes of each branch in the pass that was traced."""
    return _Readout(layers).ends()


class _Readout:
    """The search for the ends of the branches."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace: Trace = layers.trace
        self.made = layers.made

    def ends(self) -> list[BranchEnd]:
        """Follow every value the readout consumes back to the state it stands for."""
        if self.layers.stopped_by is not None:
            given = self.layers.stopped_by.inputs
            consumed = self._reductions(given, for_good=False)
            return [self._graph_end(each) for each in self._last(consumed, given)]
        outputs = [
            value
            for value in self.trace.outputs
            if self.made[value] and self.trace.values[value].floating
        ]
        if not outputs:
            raise CaptureError(
                "the model's output does not come from its layers, as far as PyTorch shows "
                "(NumPy in between? a constant?); name the modules to capture with --layers"
            )
        nodes = [value for value in outputs if self.trace.has_node_rows(value, dims=1)]
        graphs = [value for value in outputs if self._has_graph_rows(value) and value not in nodes]
        if nodes and not graphs:
            return [self._node_end(each) for each in self._last(map(self._final, nodes), nodes)]
        outputs = graphs or outputs
        consumed = self._reductions(outputs)
        return [self._graph_end(each) for each in self._last(consumed, outputs)]

    def _has_graph_rows(self, value: int) -> bool:
        """Whether the value has a row per graph; of a single graph, [1] may be a loss."""
        shape, num_graphs = self.trace.values[value].shape, self.trace.num_graphs
        return shape[:1] == (num_graphs,) and (num_graphs > 1 or len(shape) > 1)

    def _last(self, consumed: Iterable[Consumed], outputs: Sequence[int]) -> list[Consumed]:
        """Return the values of layers that no other layer takes up for the outputs, each once."""
        live = 0
        for output in outputs:
            live |= self.made[output]
        taken_up = {
            self._frontier(value)
            for layer in self.layers.layers
            if live >> layer.number & 1
            for value in layer.candidates
        }
        last = {each.value: each for each in reversed(list(consumed))}
        kept = [each for each in last.values() if self._frontier(each.value) not in taken_up]
        # A score per node is no activation if there is anything else of the same layers.
        wide = {self._frontier(each.value) for each in kept if self._width(each.value) > 1}
        kept = [
            each
            for each in kept
            if self._width(each.value) > 1 or self._frontier(each.value) not in wide
        ]
        if not kept:
            label = self.layers.layers[-1].label
            raise CaptureError(
                f"nothing comes of layer {label!r}, the last one; "
                "name the layers to capture with --layers"
            )
        return sorted(kept, key=lambda each: each.value)

    def _frontier(self, value: int) -> int:
        return sum(1 << layer.number for layer in self.layers.frontier(value))

    def _width(self, value: int) -> int:
        return self.trace.values[value].width

    def _describe(self, call: FunctionCall) -> str:
        """Name a function call by the module it is in, if that is not the model itself."""
        around = [module for module in self.trace.modules if module.contains(call.time)]
        if not around or around[-1].parent is None:
            # A pooling function starts by making the zeros it will add the nodes to.
            pools = call.name.startswith(("new_", "scatter", "index_add", "segment"))
            return "pooling over the nodes" if pools else f"{call.name}()"
        return _describe_module(around[-1])

    # --- what is consumed

    def _final(self, output: int) -> Consumed:
        """Return an output of a row per node without its final softmax and shape."""
        end = Consumed(output, _END, "the model's output")
        while (call := self.trace.producer.get(end.value)) is not None:
            flat = not self.trace.has_node_rows(end.value)
            final = call.name in _SQUASHING or (flat and call.name in _RESHAPING)
            before = call.inputs[0] if call.inputs else -1
            if not final or self.layers.inside(call.time) or not self._same_rows(before, end.value):
                break
            end = Consumed(before, call.time, self._describe(call))
        return end

    def _same_rows(self, before: int, value: int) -> bool:
        return (
            before >= 0
            and self.made[before] == self.made[value]
            and self.trace.has_node_rows(before, dims=1)
        )

    def _reductions(self, outputs: Sequence[int], for_good: bool = True) -> Iterator[Consumed]:
        """Yield the values whose rows are reduced, for good, on the way to the outputs."""
        wanted = 0
        for output in outputs:
            wanted |= self.trace.ancestors[output]

        def reaches_output(made: Sequence[int]) -> bool:
            return any(wanted >> value & 1 and self.trace.values[value].floating for value in made)

        def reduces(made: Sequence[int]) -> bool:
            numbers = [value for value in made if self.trace.values[value].floating]
            if for_good:
                return not any(map(self._stays_by_node, numbers))
            return not any(map(self.layers.has_node_rows, numbers))

        for module in self.trace.modules:
            if module not in self._pooling or not reaches_output(module.outputs):
                continue
            if reduces(module.outputs):
                for value in filter(self._is_activation, module.inputs):
                    yield Consumed(value, module.start, _describe_module(module))
        for call in self.layers.steps:
            if any(module.contains(call.time) for module in self._pooling):
                continue
            if reaches_output(call.outputs) and reduces(call.outputs):
                for value in filter(self._is_activation, call.inputs):
                    yield self._without_gate(Consumed(value, call.time, self._describe(call)))

    @cached_property
    def _pooling(self) -> list[ModuleCall]:
        """The calls of readout modules outside the layers: what is inside them is theirs."""
        return [
            call
            for call in self.trace.modules
            if (is_pooling(call.module) or call in self.layers.readouts)
            and (call in self.layers.readouts or not self.layers.inside(call.start))
        ]

    def _is_activation(self, value: int) -> bool:
        return bool(self.made[value]) and self.layers.has_node_rows(value)

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

    # --- from what is consumed back to the state

    def _graph_end(self, end: Consumed) -> BranchEnd:
        """Find the states behind what is pooled."""
        join = self._join(end.value)
        linear = self._extra_linear_map(end.value)
        if linear is not None and (join is None or linear[0].cut < join.cut):
            return self._behind(linear[0], end)
        if join is None:
            return BranchEnd((end,), None)
        aggregates = linear is not None or self._aggregates(join.call, end.value)
        return BranchEnd(self._joined(join), end if aggregates else None)

    def _node_end(self, end: Consumed) -> BranchEnd:
        """Find the states behind an output per node: its own head is no part of the history."""
        join = self._join(end.value)
        linear = self._extra_linear_map(end.value, after=join.cut if join else 0)
        consumed = linear[0] if linear is not None else end
        if join is None:
            return BranchEnd((consumed,), None)
        aggregates = self._aggregates(join.call, consumed.value)
        return BranchEnd(self._joined(join), consumed if aggregates else None)

    def _behind(self, state: Consumed, end: Consumed) -> BranchEnd:
        """Return the end of the branches behind a state, with what is pooled."""
        return BranchEnd(self._graph_end(state).states, end)

    def _joined(self, join: _Join) -> tuple[Consumed, ...]:
        """Return the states of the branches that are joined."""
        consumer = self._describe(join.call)
        if consumer.endswith("()"):
            consumer = f"{join.call.name}() over layers"
        found: list[Consumed] = []
        for value in map(self._unweighted, join.members):
            found += self._graph_end(Consumed(value, join.cut, consumer)).states
        return tuple(found)

    def _unweighted(self, value: int) -> int:
        """Return what is multiplied by a number before it is joined: a weight of the layer."""
        call = self.trace.producer.get(value)
        if call is None or call.name not in _MULTIPLYING or self.layers.inside(call.time):
            return value
        rows = [each for each in call.inputs if self.trace.has_node_rows(each)]
        numbers = all(
            each in rows or math.prod(self.trace.values[each].shape) == 1 for each in call.inputs
        )
        return rows[0] if len(rows) == 1 and numbers else value

    def _full(self, value: int, end: int) -> bool:
        """Whether the value has node rows, leads to ``end`` and is made of all its layers."""
        return (
            self.made[value] == self.made[end]
            and self.layers.has_node_rows(value)
            and self.trace.derives(end, value)
        )

    def _joins(self, end: int) -> Iterator[_Join]:
        """Yield the calls on the way to ``end`` that join values of other layers each."""
        for call in self.layers.steps:
            if call.name not in _JOINING or not self.layers.leads_to(call, end):
                continue
            members = [
                value
                for value in dict.fromkeys(map(self._by_node, call.inputs))
                if self.layers.has_node_rows(value)
                and (self.made[value] or not self.trace.edge_only(value))
            ]
            full = [value for value in members if self._full(value, end)]
            others = [value for value in members if self.made[value] != self.made[end]]
            if call.name in _MULTIPLYING and len({*map(self._width, members)}) > 1:
                continue  # a weight per node
            if full and others:
                yield _Join(call, full[-1:], others, parallel=False)
            elif len(others) > 1 and any(self._full(value, end) for value in call.outputs):
                yield _Join(call, others, others, parallel=True)

    def _by_node(self, value: int) -> int:
        """Return the node rows that were given one more dimension before they are joined."""
        call = self.trace.producer.get(value)
        shape = self.trace.values[value].shape
        if call is not None and call.inputs and shape[:2] == (1, self.trace.num_nodes):
            before = call.inputs[0]
            if self.trace.values[before].shape == shape[1:]:
                return before
        return value

    def _join(self, end: int) -> _Join | None:
        """Return where layers are joined for the readout on the way to ``end``, if they are."""
        fed = self.layers.frontier(end)
        for join in self._joins(end):
            if join.parallel and not self._loses_branches(join.call, end):
                continue
            if not (
                self._is_residual(join, fed)
                or self._is_skip(join, end)
                or self._is_habit(join, end)
            ):
                return join
        return None

    def _loses_branches(self, call: FunctionCall, end: int) -> bool:
        """Whether parallel branches are added or reduced: side by side, they are all there."""
        return call.name not in _CONCATENATING or any(
            self._width(end) < self._width(output)
            for output in call.outputs
            if self.trace.derives(end, output) and len(self.trace.values[output].shape) > 2
        )

    def _is_residual(self, join: _Join, fed: Sequence[Layer]) -> bool:
        """Whether a layer's output is added to what the layer was given, or to the input."""
        return (
            join.call.name in _SUMMING | _MULTIPLYING
            and not join.parallel
            and all(self._is_own(other, fed) or self._is_input(other, fed) for other in join.others)
        )

    def _is_skip(self, join: _Join, end: int) -> bool:
        """Whether one earlier state is added, and nothing else is joined."""
        if join.call.name not in _SUMMING or join.parallel or len(join.others) > 1:
            return False
        return len(list(self._joins(end))) == 1 and not list(self._joins(join.others[0]))

    def _is_input(self, value: int, fed: Sequence[Layer]) -> bool:
        """Whether the value is what the network started from, added to every layer."""
        value = self._unweighted(value)
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

    def _is_habit(self, join: _Join, end: int) -> bool:
        """Whether layers before were given what was joined in the same way."""
        kind = next((kind for kind in (_CONCATENATING, _SUMMING) if join.call.name in kind), ())
        for given in self._given_before(end, alike=False):
            makers = self.layers.frontier(given)
            for earlier in self._joins(given):
                if earlier.parallel != join.parallel or earlier.call.name not in kind:
                    continue
                if join.parallel or self._is_alike(earlier, given, join, end, makers):
                    return True
        return False

    def _is_alike(
        self, earlier: _Join, given: int, join: _Join, end: int, makers: Sequence[Layer]
    ) -> bool:
        """Whether an earlier layer was given what was joined as far back, and in the same way."""
        before, now = self._gaps(earlier, given), self._gaps(join, end)
        if join.call.name in _SUMMING:
            own = all(self._is_own(value, makers) for value in earlier.others)
            return before <= now and not own
        aggregates = self._aggregates(join.call, end)
        if aggregates != self._aggregates(earlier.call, given):
            return False
        return before == now if aggregates else before <= now

    def _gaps(self, join: _Join, end: int) -> set[int]:
        """Return how many layers the joined values lie back."""
        return {(self.made[end] & ~self.made[value]).bit_count() for value in join.others}

    def _aggregates(self, join: FunctionCall, end: int) -> bool:
        """Whether more than concatenation lies between the joined layers and ``end``."""
        if join.name not in _CONCATENATING:
            return True
        joined = [output for output in join.outputs if self.trace.derives(end, output)]
        if any(self._width(end) < self._width(output) for output in joined):
            return True
        return any(call.time > join.time for call in self._linear_maps(end))

    def _linear_maps(self, end: int) -> list[FunctionCall]:
        """Return the linear maps with weights from the last layers to ``end``."""
        jumping = [call for call in self.trace.modules if isinstance(call.module, JumpingKnowledge)]
        return [
            call
            for call in self.layers.steps
            if self._has_weights(call)
            and any(self.made[value] == self.made[end] for value in call.inputs)
            and self.layers.leads_to(call, end)
            and not any(module.contains(call.time) for module in jumping)
        ]

    def _weight_shape(self, call: FunctionCall) -> tuple[int, ...]:
        values = (self.trace.values[value] for value in call.inputs)
        return max(
            (value.shape for value in values if value.sources == Source.WEIGHT), key=math.prod
        )

    def _has_weights(self, call: FunctionCall) -> bool:
        """Whether a call multiplies by a matrix of weights: attention and recurrent cells too."""
        weights = [
            self.trace.values[value]
            for value in call.inputs
            if self.trace.values[value].sources == Source.WEIGHT
        ]
        matrices = any(len(weight.shape) > 1 for weight in weights)
        return bool(weights) and (call.name in LINEAR or (matrices and call.name not in _JOINING))

    def _extra_linear_map(self, end: int, after: int = 0) -> tuple[Consumed, FunctionCall] | None:
        """Return the input of the first linear map that no layer before has a counterpart of."""
        maps = self._linear_maps(end)
        if after:
            maps = [call for call in maps if call.time > after]
        else:
            shapes = [self._weight_shape(call) for call in maps]
            earlier = [
                [self._weight_shape(call) for call in self._linear_maps(given)]
                for given in self._given_before(end)
            ]
            maps = maps[max((_same_start(shapes, other) for other in earlier), default=0) :]
        for call in maps[:1]:
            behind = [
                value.index
                for value in self.trace.values
                if self._full(value.index, end)
                and any(self.trace.derives(given, value.index) for given in call.inputs)
            ]
            if behind:
                return Consumed(behind[-1], call.time, self._describe(call)), call
        return None

    def _given_before(self, end: int, alike: bool = True) -> list[int]:
        """Return what layers were given by others on the way to ``end``.

        With ``alike``, only layers of the types of the last ones, if there are such.
        """
        kinds = {type(layer.call.module) for layer in self.layers.frontier(end)}
        given = [
            (type(layer.call.module) in kinds, value)
            for layer in self.layers.layers
            if self.made[end] >> layer.number & 1
            for value in layer.candidates
            if self.made[value]
        ]
        alike = alike and any(same for same, _ in given)
        return [value for same, value in given if same or not alike]

    # --- gates

    def _without_gate(self, end: Consumed) -> Consumed:
        """Return what a readout weighs, if ``end`` is that times a weight per node."""
        given = [value for layer in self.layers.frontier(end.value) for value in layer.candidates]
        if any(self._gated(value) is not None for value in given):
            return end  # gates between the layers belong to the layers
        gated = self._gated(end.value)
        if gated is None:
            return end
        call = self.trace.producer[end.value]
        return Consumed(gated, call.time, f"{end.consumer}, weighted per node")

    def _gated(self, value: int) -> int | None:
        """Return ``x`` if the value is ``gate * x`` with a computed gate of width 1."""
        call = self.trace.producer.get(value)
        if call is None or call.name not in _MULTIPLYING or len(call.inputs) != 2:
            return None
        shape = self.trace.values[value].shape
        for gate, gated in (call.inputs, call.inputs[::-1]):
            if (
                self.trace.values[gated].shape == shape
                and self.trace.values[gate].shape == (*shape[:-1], 1)
                and shape[-1] > 1
                and self.made[gate] == self.made[gated] == self.made[value]
                and self._is_computed(gate, beside=gated)
            ):
                return gated
        return None

    def _is_computed(self, gate: int, *, beside: int) -> bool:
        """Whether weights or a squashing function went into the gate: a norm has neither."""
        return any(
            (call.name in _GATING or call.name in LINEAR)
            and self.layers.leads_to(call, gate)
            and not self.layers.leads_to(call, beside)
            for call in self.layers.steps
        )


def _same_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many entries two sequences have in common at their start."""
    differ = (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1])
    return next(differ, min(len(first), len(second)))


def _describe_module(call: ModuleCall) -> str:
    return f"{call.label} ({type(call.module).__name__})"
