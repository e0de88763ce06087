"""Finding the message-passing layers in a trace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch_geometric.nn import MessagePassing

from ..errors import CaptureError
from ..utils.text import text_table
from .hidden import messages, reads_nodes_by_edges
from .layers import Layer, Layers, is_pooling, made_by
from .trace import SLICING, ModuleCall, Source, Trace


def find_layers(trace: Trace, *, named: Sequence[ModuleCall] = (), steps: bool = False) -> Layers:
    """Find the message-passing layers that ran, and what every value is made of.

    Layers are the outermost calls of PyG's ``MessagePassing``, and the innermost other modules
    that look rows of nodes up by the graphs' edges, or multiply them with an adjacency matrix.

    ``named`` are the calls that are the layers, where the user says which; ``steps`` takes a layer
    that passes messages several times in one call apart.

    Raises:
        CaptureError: if nothing looks like a layer, or no layer works on the nodes.
    """
    calls = list(named) or _with_whole_states(trace, _message_passing(trace))
    if steps:
        calls = _taken_apart(trace, calls)
    layers: list[Layer] = []
    readouts = [call for call in calls if _leaves_nodes(trace, call)]
    problem, stopped_by = None, None
    for call in calls:
        if call in readouts:
            continue
        try:
            # The first layers may hold an embedding of each node, as RGCN's does.
            nodes = any(map(trace.has_node_rows, call.outputs)) and call is not calls[-1]
            embeds = nodes and all(map(trace.edge_only, call.inputs))
            layer = _layer(trace, call, len(layers), featureless=embeds)
        except CaptureError as error:
            problem, stopped_by = error, call
            break
        layers.append(layer)
    if not layers:
        raise problem or _no_layers(trace, readouts)
    cached = [each.call for each in layers if getattr(each.call.module, "cached", False) is True]
    if cached and trace.num_graphs > 1:
        raise CaptureError(
            f"layer {cached[0].label!r} has cached=True: it would use the edges of the first batch "
            "for every other; build the model with cached=False"
        )
    return Layers(
        trace,
        tuple(layers),
        _made_of(trace, layers),
        tuple(calls),
        tuple(readouts),
        problem,
        stopped_by,
    )


def _no_layers(trace: Trace, readouts: Sequence[ModuleCall]) -> CaptureError:
    """Say that there are no layers, and where messages are passed nevertheless."""
    seen = "no module is a PyG MessagePassing, none looks node rows up by edges"
    if readouts:
        seen = f"{readouts[0].label!r} passes messages, but returns no rows of the nodes"
    by_hand = next((call for call in trace.functions if reads_nodes_by_edges(trace, call)), None)
    if by_hand is not None:
        inside = [module.label for module in trace.modules if module.contains(by_hand.time)]
        seen = (
            f"{by_hand.name}() in {inside[-1]!r} looks nodes up by edges, but no module is given "
            "rows of nodes and edges and returns rows of nodes"
        )
    return CaptureError(
        f"no message-passing layers found: {seen}; make each layer a module of its own, or name "
        "the modules to capture with --layers",
        details=_module_table(trace),
    )


def _message_passing(trace: Trace) -> list[ModuleCall]:
    """Return the calls of layers, in execution order."""

    def is_layer(call: ModuleCall) -> bool:
        return isinstance(call.module, MessagePassing)

    found = [
        call
        for call in trace.modules
        if is_layer(call)
        and not any(is_layer(outer) or is_pooling(outer.module) for outer in call.enclosing())
    ]
    taken = {id(outer) for call in found for outer in (call, *call.enclosing())}
    read = [call.time for call in trace.functions if reads_nodes_by_edges(trace, call)]
    sent = [(start.time, end.time) for start, end in messages(trace)]
    by_hand = [
        call
        for call in trace.modules
        if call.parent is not None
        and id(call) not in taken
        and not any(is_layer(outer) or is_pooling(outer.module) for outer in call.enclosing())
        and not is_pooling(call.module)
        and _mixes_nodes_by_edges(trace, call, read, sent)
    ]
    around = {id(outer) for call in by_hand for outer in call.enclosing()}
    found += [call for call in by_hand if id(call) not in around]
    return sorted(found, key=lambda call: call.start)


def _mixes_nodes_by_edges(
    trace: Trace, call: ModuleCall, read: Sequence[int], sent: Sequence[tuple[int, int]]
) -> bool:
    """Whether the call is given nodes, and inside it they are read by edges or sent messages."""
    nodes = [value for value in call.inputs if trace.has_node_rows(value)]
    if all(map(trace.edge_only, nodes)):
        return False
    return any(map(call.contains, read)) or any(
        call.contains(start) and call.contains(end) for start, end in sent
    )


# --- layers inside a module that splits the channels


def _with_whole_states(trace: Trace, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Replace layers that work on part of the channels by the module that splits them.

    A reversible block hands half of its input to each of two layers: the state is the whole.
    """
    found: dict[int, ModuleCall] = {}
    for call in calls:
        if any(outer.contains(call.start) for outer in found.values()):
            continue
        whole = next((outer for outer in call.enclosing() if _splits(trace, outer, call)), call)
        found[id(whole)] = whole
    return list(found.values())


def _splits(trace: Trace, outer: ModuleCall, call: ModuleCall) -> bool:
    """Whether ``outer`` cuts the channels of its input apart and gives a part to ``call``."""
    if outer.parent is None or not any(map(trace.has_node_rows, outer.outputs)):
        return False
    wholes = [value for value in outer.inputs if trace.has_node_rows(value)]
    parts = [
        output
        for function in trace.functions
        if outer.contains(function.time) and function.name in SLICING
        for output in function.outputs
        if trace.has_node_rows(output)
        and any(
            trace.values[output].width < trace.values[whole].width
            and trace.derives(output, whole)
            and trace.values[whole].width in {trace.values[end].width for end in outer.outputs}
            for whole in wholes
        )
    ]
    given = [value for value in call.inputs if trace.has_node_rows(value)]
    return any(trace.derives(value, part) for value in given for part in parts)


# --- layers that pass messages several times


def repeats(trace: Trace, call: ModuleCall) -> list[ModuleCall]:
    """Return the steps inside a layer that passes messages several times, one after another."""
    steps = [step for step in trace.steps if call.contains(step.start)]
    chained = len(steps) > 1 and all(
        any(trace.derives(value, end) for value in after.inputs for end in before.outputs)
        for before, after in itertools.pairwise(steps)
    )
    return steps if chained else []


def _taken_apart(trace: Trace, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Return the steps of the layers that have several, and the other layers as they are."""
    found = [step for call in calls for step in repeats(trace, call) or [call]]
    if found == list(calls):
        raise CaptureError(
            "--layers steps: no layer passes messages several times in one call; "
            "leave it out, every layer is taken by itself"
        )
    return found


# --- what values are made of


def _made_of(trace: Trace, layers: Sequence[Layer]) -> list[int]:
    """Return for every value the layers it derives from, as bits."""
    own: dict[int, int] = {}
    for layer in layers:
        for output in made_by(layer.call):
            own[output] = own.get(output, 0) | 1 << layer.number
    return trace.inherited(own)


def _layer(trace: Trace, call: ModuleCall, number: int, *, featureless: bool) -> Layer:
    """Find the node tensors a layer is given."""
    rows = list(dict.fromkeys(value for value in call.inputs if trace.has_node_rows(value)))
    rows = [value for value in rows if not trace.edge_only(value)] or rows
    # A layer that is given a whole graph beside its state leaves most of that graph alone.
    inside = trace.values[call.first_value : call.end_value]
    used = {parent for value in inside for parent in value.parents}
    rows = [value for value in rows if value in used] or rows
    # A number per node beside rows of several is a weight, a mass, a time.
    rows = [value for value in rows if len(trace.values[value].shape) > 1] or rows
    states = [value for value in rows if not trace.is_zero(value)]
    if rows and not states:
        return Layer(call, number, ())  # a recurrent state before the first step
    if states or any(_tells_of_nodes(trace, value) for value in call.inputs):
        return Layer(call, number, tuple(states))
    if featureless:
        return Layer(call, number, ())
    given = [trace.values[value] for value in call.inputs if not trace.edge_only(value)]
    shapes = [value.shape for value in given if value.floating and len(value.shape) > 1]
    found = f"{shapes[0][0]} rows" if shapes else "no rows of features"
    for shape in shapes:
        if trace.num_nodes in shape:
            raise CaptureError(
                f"layer {call.label!r} is given {list(shape)}, with the nodes in dimension "
                f"{shape.index(trace.num_nodes)}; expected them in dimension 0: name modules that "
                "return a row per node with --layers NAME:output (transposed, if there are none)"
            )
    raise CaptureError(
        f"layer {call.label!r} is given {found} "
        f"where the batch has {trace.num_nodes} nodes (pooled or edge-level input?); "
        "name the layers that work on the nodes with --layers"
    )


def _leaves_nodes(trace: Trace, call: ModuleCall) -> bool:
    """Whether the call is given node rows, of any type, and returns none."""
    given = any(_tells_of_nodes(trace, value) for value in call.inputs)
    return given and not any(map(trace.has_node_rows, call.outputs))


def _tells_of_nodes(trace: Trace, value: int) -> bool:
    shape, sources = trace.values[value].shape, trace.values[value].sources
    return trace.has_node_rows(value) or (
        shape[:1] == (trace.num_nodes,) and Source.NODE in sources
    )


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
    return text_table(("module", "type", "returns"), rows)
