"""What a model's readout consumes: where every branch of its layers ends.

From the output of its last layer a branch leads through norms, activation functions, residuals
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

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..errors import CaptureError
from .gates import Gates
from .joins import Join, Joins
from .layers import Layers, is_coarsening, is_pooling, made_by
from .steps import Steps
from .trace import GATHERING, RESHAPING, SQUASHING, FunctionCall, ModuleCall, Trace

_END = sys.maxsize

#: What consumes rows that are given one more dimension, of graphs.
PADDING = "padding to graphs (to_dense_batch)"


@dataclass(frozen=True)
class Consumed:
    """A value, when it is consumed, and by what."""

    value: int
    cut: int
    consumer: str


@dataclass(frozen=True)
class BranchEnd:
    """Where branches of layers end."""

    states: tuple[Consumed, ...]  #: one of each branch
    pooled: Consumed | None  #: what the readout consumes, where that is none of the states
    #: What is merely concatenated in ``pooled``: where the history holds all of it, that is enough.
    parts: tuple[int, ...] = ()


def find_ends(layers: Layers) -> list[BranchEnd]:
    """Find what the readout consumes of each branch in the pass that was traced."""
    return _Readout(layers).ends()


class _Readout:
    """The search for the ends of the branches."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers
        self.trace: Trace = layers.trace
        self.made = layers.made
        self.steps = Steps(layers)
        self.gates = Gates(layers)
        self.joins = Joins(layers, self.steps, self.gates)

    def ends(self) -> list[BranchEnd]:
        """Follow every value the readout consumes back to the state it stands for."""
        if self.layers.stopped_by is not None:
            given = self.layers.stopped_by.inputs
            consumed = self._reductions(given, for_good=False)
            return [self._graph_end(each) for each in self._last(consumed, given)]
        outputs = [
            self._before_lookup(value)
            for value in self.trace.outputs
            if self.made[value] and self.trace.values[value].floating
        ]
        if not outputs:
            raise CaptureError(
                "the model's output does not come from its layers, as far as PyTorch shows "
                "(NumPy in between? a constant?); name the modules to capture with --layers"
            )
        nodes = [value for value in outputs if self.trace.has_node_rows(value)]
        graphs = [value for value in outputs if self._has_graph_rows(value) and value not in nodes]
        if nodes and not graphs:
            last = self._last(map(self._final, nodes), nodes)
            return [*map(self._node_end, last), *self._pair_ends(nodes, outputs)]
        outputs = graphs or outputs
        consumed = self._reductions(outputs)
        return [self._graph_end(each) for each in self._last(consumed, outputs)]

    def _before_lookup(self, output: int) -> int:
        """Return the rows of all nodes, where the output is just the rows of some of them."""
        value = output
        while (call := self.trace.producer.get(value)) is not None and call.inputs:
            before, *others = call.inputs
            whole, shape = self.layers.has_node_rows(before), self.trace.values[value].shape
            # By an index, or the first rows, as of a batch of seeds and their neighbours.
            rows = others or shape[1:] == self.trace.values[before].shape[1:]
            if call.name in GATHERING and whole and rows:
                return before
            if call.name not in SQUASHING | RESHAPING:
                break
            value = before
        return output

    def _pair_ends(self, nodes: Sequence[int], outputs: Sequence[int]) -> list[BranchEnd]:
        """Find the branches that lead to a number for each pair of nodes and to no node's row."""
        seen = self.trace.union(self.made[value] for value in nodes)
        count = self.trace.num_nodes
        pairs = [
            value
            for value in outputs
            if self.made[value] & ~seen and self.trace.values[value].shape == (count, count)
        ]
        last = self._last(self._reductions(pairs), pairs) if pairs else []
        return [self._graph_end(each) for each in last]

    def _has_graph_rows(self, value: int) -> bool:
        """Whether the value has a row per graph; of a single graph, [1] may be a loss."""
        shape, num_graphs = self.trace.values[value].shape, self.trace.num_graphs
        return shape[:1] == (num_graphs,) and (num_graphs > 1 or len(shape) > 1)

    def _last(self, consumed: Iterable[Consumed], outputs: Sequence[int]) -> list[Consumed]:
        """Return the values of layers that no other layer takes up for the outputs, each once."""
        last = {self.trace.first_of(each.value): each for each in reversed(list(consumed))}
        # Parts of one state that are read out each in another way: the state is the whole.
        wholes = {value: self.layers.cut_from(value) for value in last}
        parts = Counter(wholes.values())
        last = {
            whole: replace(last[value], value=whole) if parts[whole] > 1 else last[value]
            for value, whole in wholes.items()
        }
        live = self.trace.union(self.made[output] for output in outputs) & ~self.gates.scoring
        taken_up = {
            self._frontier(value)
            for layer in self.layers.layers
            if live >> layer.number & 1
            for value in layer.candidates
        }
        kept = [each for each in last.values() if self._frontier(each.value) not in taken_up]
        # Scores per node are no activation if there is anything else of the same layers.
        other = {self._frontier(each.value) for each in kept if not self._is_score(each.value)}
        kept = [
            each
            for each in kept
            if not self._is_score(each.value) or self._frontier(each.value) not in other
        ]
        if not kept:
            label = self.layers.layers[-1].call.label
            raise CaptureError(
                f"no node rows of {label!r}, the last layer that was found, reach the readout; "
                "name the layers to capture with --layers"
            )
        return sorted(kept, key=lambda each: each.value)

    def _is_score(self, value: int) -> bool:
        return self.layers.width(value) == 1 or self.gates.unshaped(value) in self.gates.weights

    def _frontier(self, value: int) -> int:
        return sum(1 << layer.number for layer in self.layers.frontier(value))

    def _describe(self, call: FunctionCall | ModuleCall) -> str:
        """Name a module, or a function by the module it is in, if that is not the model itself."""
        if isinstance(call, ModuleCall):
            return f"{call.label} ({type(call.module).__name__})"
        around = [module for module in self.trace.modules if module.contains(call.time)]
        if not around or around[-1].parent is None:
            # A pooling function starts by making the zeros it will add the nodes to.
            pools = call.name.startswith(("new_", "scatter", "index_add", "segment"))
            return "pooling over the nodes" if pools else self._words(call)
        return self._describe(around[-1])

    def _words(self, call: FunctionCall) -> str:
        """Name a function, and an operator by what it does."""
        if call.name == "__getitem__":
            return "indexing"
        if call.name == "__setitem__" and not any(map(self.trace.has_node_rows, call.outputs)):
            return PADDING
        return f"{call.name.removeprefix('__').removesuffix('__')}()"

    # --- what is consumed

    def _final(self, output: int) -> Consumed:
        """Return an output of a row per node without its final softmax and shape."""
        end = Consumed(output, _END, "the model's output")
        while (call := self.trace.producer.get(end.value)) is not None:
            flat = len(self.trace.values[end.value].shape) < 2
            final = call.name in SQUASHING or (flat and call.name in RESHAPING)
            before = call.inputs[0] if call.inputs else -1
            if (
                not final
                or self.layers.inside(call.time)
                or not self.layers.same_rows(before, end.value)
            ):
                break
            end = Consumed(before, call.time, self._describe(call))
        return end

    def _reductions(self, outputs: Sequence[int], for_good: bool = True) -> Iterator[Consumed]:
        """Yield the values whose rows are reduced, for good, on the way to the outputs."""
        wanted = self.trace.union(self.trace.ancestors[output] for output in outputs)

        def reaches_output(made: Sequence[int]) -> bool:
            return any(wanted >> value & 1 and self.trace.values[value].floating for value in made)

        def reduces(made: Sequence[int]) -> bool:
            numbers = [value for value in made if self.trace.values[value].floating]
            final = not for_good or any(self._is_final[value] for value in numbers)
            return final and not any(map(self.layers.has_node_rows, numbers))

        for module in self.trace.modules:
            if module not in self._pooling or not reaches_output(module.outputs):
                continue
            if reduces(module.outputs) or is_coarsening(module.module):
                for value in filter(self._is_activation, module.inputs):
                    yield Consumed(value, module.start, self._describe(module))
        for call in self.layers.steps:
            if any(module.contains(call.time) for module in self._pooling):
                continue
            if reaches_output(call.outputs) and reduces(call.outputs):
                for value in filter(self._is_activation, call.inputs):
                    yield self._weighed(value, call)

    def _weighed(self, value: int, call: FunctionCall) -> Consumed:
        """Return what is behind the weights and powers that a readout takes of the states."""
        state, weighs = self.gates.without(value)
        then = call if state == value else self.trace.producer[value]
        return Consumed(
            state, then.time, self._describe(call) + (", weighted per node" if weighs else "")
        )

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
        coarsened = self.trace.ancestors[value] & self._coarsened
        return bool(self.made[value]) and self.layers.has_node_rows(value) and not coarsened

    @cached_property
    def _coarsened(self) -> int:
        """What poolings return: rows of other nodes, even where none was dropped."""
        calls = [call for call in self._pooling if is_coarsening(call.module)]
        return sum({1 << value for call in calls for value in made_by(call)})

    @cached_property
    def _is_final(self) -> list[bool]:
        """For each value whether an output is computed from it without coming back to node rows."""
        final = [False] * len(self.trace.values)
        for output in self.trace.outputs:
            final[output] = True
        for value in reversed(self.trace.values):
            if final[value.index] and not self.layers.has_node_rows(value.index):
                for parent in value.parents:
                    final[parent] = True
        return final

    # --- from what is consumed back to the state

    def _graph_end(self, end: Consumed) -> BranchEnd:
        """Find the states behind what is pooled."""
        join = self.joins.for_readout(end.value)
        extra = self.steps.first_extra(end.value)
        if extra is not None and (join is None or extra[1].time < join.call.time):
            return BranchEnd(self._graph_end(self._consumed(*extra)).states, end)
        if join is not None:
            return self._joined(join, end, aggregates=extra is not None)
        return self._one_branch(end)

    def _node_end(self, end: Consumed) -> BranchEnd:
        """Find the states behind an output per node: its own head is no part of the history."""
        join = self.joins.for_readout(end.value)
        extra = self.steps.first_extra(end.value)
        if extra is not None and join is not None and extra[1].time < join.call.time:
            return BranchEnd(self._graph_end(self._consumed(*extra)).states, None)
        if join is not None:
            joined = self.joins.done(join, end.value)
            extra = self.steps.first_map(end.value, after=joined)
        consumed = end if extra is None else self._consumed(*extra)
        return self._one_branch(consumed) if join is None else self._joined(join, consumed)

    def _one_branch(self, end: Consumed) -> BranchEnd:
        """Return an end without another tensor behind it, unless branches are mapped before it."""
        makers = self.layers.frontier(end.value)
        if len(makers) < 2:
            return BranchEnd((end,), None)
        meeting = self.joins.meeting(end.value)
        if meeting is None:
            labels = ", ".join(repr(layer.call.label) for layer in makers)
            raise CaptureError(
                f"it cannot be seen where the branches {labels} meet before the readout; "
                "name the modules to capture with --layers"
            )
        if not self.joins.is_habit(meeting, end.value):
            members = [self._consumed(value, meeting.call) for value in meeting.members]
            branches = [self._graph_end(member) for member in members]
            if any(branch.pooled is not None for branch in branches):
                return BranchEnd(tuple(s for branch in branches for s in branch.states), end)
        return BranchEnd((end,), None)

    def _consumed(self, value: int, call: FunctionCall | ModuleCall) -> Consumed:
        return Consumed(value, call.time, self._describe(call))

    def _joined(self, join: Join, end: Consumed, aggregates: bool = False) -> BranchEnd:
        """Return the states of the branches that are joined, and what they are joined to."""
        consumer = self._describe(join.call)
        if consumer == self._words(join.call):
            consumer += " over layers"
        found: list[Consumed] = []
        for value in map(self.gates.unweighted, join.members):
            found += self._graph_end(Consumed(value, join.call.time, consumer)).states
        if aggregates or self.joins.aggregates(join.call, end.value):
            return BranchEnd(tuple(found), end)
        return BranchEnd(tuple(found), end, (*join.members, *join.others))
