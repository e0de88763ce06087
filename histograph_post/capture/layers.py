"""The message-passing layers in a trace, and how deep every value lies in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

from ..errors import CaptureError
from .trace import ModuleCall, Source, Trace

_POOLING_PACKAGE = "torch_geometric.nn.pool"


def is_pooling(module: nn.Module) -> bool:
    """Whether the module turns the nodes of a graph into fewer rows: a readout or a pooling."""
    return isinstance(module, Aggregation) or any(
        kind.__module__.startswith(_POOLING_PACKAGE) for kind in type(module).__mro__
    )


@dataclass(frozen=True)
class Layer:
    """One call of a message-passing layer."""

    call: ModuleCall
    input: int | None  #: the value it consumes; None if that is a tensor of integers
    depth: int  #: how many layers, this one included, the longest path to its output passes

    @property
    def label(self) -> str:
        """The name of the module, with ``#2`` for its second call."""
        return self.call.label


@dataclass(frozen=True)
class Layers:
    """The message-passing layers of a trace, in execution order."""

    trace: Trace
    layers: tuple[Layer, ...]
    depths: Sequence[int]  #: of every value of the trace
    #: All calls that look like layers, also those after a problem and the readouts.
    calls: tuple[ModuleCall, ...]
    #: Message passing from nodes to something else: a readout.
    readouts: tuple[ModuleCall, ...]
    #: Why the layers are not all of the model's: a layer works on something else than the nodes.
    problem: CaptureError | None

    @cached_property
    def deepest(self) -> int:
        """The number of layers on the longest path."""
        return max(layer.depth for layer in self.layers)

    def inside(self, time: int) -> bool:
        """Whether something that happened at ``time`` happened inside a layer."""
        return any(call.contains(time) for call in self.calls)

    def has_node_rows(self, value: int) -> bool:
        """Whether the value has node rows; inside a layer, messages may be as many as nodes."""
        return self.trace.has_node_rows(value) and not any(call.hides(value) for call in self.calls)

    def is_activation(self, value: int, depth: int) -> bool:
        """Whether the value has node rows and derives from layers up to ``depth``."""
        return self.depths[value] == depth and self.has_node_rows(value)

    def names_of(self, value: int) -> str:
        """Return the labels of the layers that made the value, joined where they are parallel."""
        depth = self.depths[value]
        makers = [
            layer
            for layer in self.layers
            if layer.depth == depth
            and any(self.trace.derives(value, output) for output in layer.call.outputs)
        ]
        return "+".join(layer.label for layer in makers) if depth else "input"


def find_layers(trace: Trace) -> Layers:
    """Find the message-passing layers that ran, and the depth of every value.

    Layers are the outermost calls of PyG's ``MessagePassing``, or else the innermost modules that
    are given node rows together with the graphs' edges.

    Raises:
        CaptureError: if nothing looks like a layer, or no layer works on the nodes.
    """
    calls = _outermost(trace, lambda call: isinstance(call.module, MessagePassing))
    if not calls:
        calls = _innermost(trace, lambda call: _joins_nodes_and_edges(trace, call))
    depths = _Depths(trace)
    layers = []
    readouts = [call for call in calls if _leaves_nodes(trace, call)]
    problem = None
    for call in calls:
        if call in readouts:
            continue
        depths.extend(call.first_value)
        try:
            layer = _layer(trace, call, depths.known)
        except CaptureError as error:
            problem = error
            break
        layers.append(layer)
        depths.assign(layer)
    if not layers:
        raise problem or CaptureError(
            "no message-passing layers found: no module is a PyG MessagePassing, none is given "
            "node rows together with edges; name the modules to capture with --layers",
            details=_module_table(trace),
        )
    _refuse_edge_caches(trace, layers)
    depths.extend(len(trace.values))
    return Layers(trace, tuple(layers), depths.known, tuple(calls), tuple(readouts), problem)


def _refuse_edge_caches(trace: Trace, layers: Sequence[Layer]) -> None:
    """Refuse layers that cache the first batch's edges and use them for all others."""
    for layer in layers:
        if trace.num_graphs > 1 and getattr(layer.call.module, "cached", False) is True:
            raise CaptureError(
                f"layer {layer.label!r} has cached=True: it would use the edges of the first batch "
                "for every other; build the model with cached=False"
            )


class _Depths:
    """The depth of each value, found in the order in which the values were made."""

    def __init__(self, trace: Trace) -> None:
        self.known: list[int] = []
        self._trace = trace
        self._made_by_layer: dict[int, int] = {}

    def assign(self, layer: Layer) -> None:
        """Let the outputs of a layer have its depth."""
        for output in layer.call.outputs:
            if output >= layer.call.first_value:
                self._made_by_layer[output] = layer.depth

    def extend(self, stop: int) -> None:
        """Find the depth of all values before ``stop``."""
        for value in self._trace.values[len(self.known) : stop]:
            inherited = max((self.known[parent] for parent in value.parents), default=0)
            self.known.append(self._made_by_layer.get(value.index, inherited))


def _layer(trace: Trace, call: ModuleCall, depths: Sequence[int]) -> Layer:
    """Find what a layer consumes: the deepest of its float arguments with node rows."""
    rows = [value for value in call.inputs if trace.has_node_rows(value)]
    rows = [value for value in rows if not trace.edge_only(value)] or rows
    if rows:
        # The first of equals: (source, target) pairs start with what is passed on. The deepest,
        # because some layers are given the network's input beside their own.
        consumed = max(rows, key=lambda value: depths[value])
        return Layer(call, consumed, depths[consumed] + 1)
    if any(_tells_of_nodes(trace, value) for value in call.inputs):
        return Layer(call, None, 1 + max(depths[value] for value in call.inputs))
    given = [trace.values[value] for value in call.inputs if not trace.edge_only(value)]
    found = [value.shape[0] for value in given if value.floating and len(value.shape) > 1]
    raise CaptureError(
        f"layer {call.label!r} works on {found[0] if found else 'no'} rows where the batch has "
        f"{trace.num_nodes} nodes (pooled or edge-level input); "
        "name the layers that work on the nodes with --layers"
    )


def _outermost(trace: Trace, wanted: Callable[[ModuleCall], bool]) -> list[ModuleCall]:
    """Return the wanted calls that are not inside another one, nor inside a pooling module."""
    return [
        call
        for call in trace.modules
        if wanted(call)
        and not any(wanted(outer) or is_pooling(outer.module) for outer in call.enclosing())
    ]


def _innermost(trace: Trace, wanted: Callable[[ModuleCall], bool]) -> list[ModuleCall]:
    """Return the wanted calls that contain no other one; the model as a whole is none."""
    found = [call for call in trace.modules if call.parent is not None and wanted(call)]
    around = {id(outer) for call in found for outer in call.enclosing()}
    return [call for call in found if id(call) not in around]


def _leaves_nodes(trace: Trace, call: ModuleCall) -> bool:
    """Whether the call is given node rows, of any type, and returns none."""
    given = any(_tells_of_nodes(trace, value) for value in call.inputs)
    return given and not any(map(trace.has_node_rows, call.outputs))


def _tells_of_nodes(trace: Trace, value: int) -> bool:
    shape, sources = trace.values[value].shape, trace.values[value].sources
    return trace.has_node_rows(value) or (
        shape[:1] == (trace.num_nodes,) and Source.NODE in sources
    )


def _joins_nodes_and_edges(trace: Trace, call: ModuleCall) -> bool:
    nodes = [value for value in call.inputs if trace.has_node_rows(value)]
    edges = [value for value in call.inputs if trace.edge_only(value)]
    return any(node not in edges for node in nodes) and bool(edges)


def _module_table(trace: Trace) -> str:
    """Return the modules that ran, in order, with the shapes of their outputs."""
    rows = [
        (
            call.label,
            type(call.module).__name__,
            " ".join(str(list(trace.values[value].shape)) for value in call.outputs) or "-",
        )
        for call in trace.modules
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    return "\n".join(f"{name:{widths[0]}}  {kind:{widths[1]}}  {out}" for name, kind, out in rows)
