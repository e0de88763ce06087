"""Message passing outside of modules, and rows of nodes that change places: seen in functions."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CaptureError
from .layers import Layers, is_pooling
from .trace import (
    EXPANDING,
    GATHERING,
    INDEXING,
    LINEAR,
    SCATTERING,
    FunctionCall,
    Source,
    Trace,
)


def messages(trace: Trace) -> list[tuple[FunctionCall, FunctionCall]]:
    """Return where nodes are looked up by an index and where, by one, that is added to nodes.

    That is message passing wherever the index is from: edges may be found by distance.
    """

    def indices(call: FunctionCall) -> set[int]:
        """The indices among the arguments, as they were before they got other dimensions."""
        found = {value for value in call.inputs if trace.values[value].integer}
        return {_unexpanded(trace, value) for value in found}

    def others(call: FunctionCall, values: Sequence[int]) -> list[int]:
        """The values that have a row, which is no node's, for every number of an index."""
        numbers = [trace.values[value] for value in call.inputs]
        lengths = {index.shape[:1] for index in numbers if index.integer} - {(trace.num_nodes,)}
        return [
            value
            for value in values
            if trace.values[value].floating and trace.values[value].shape[:1] in lengths
        ]

    sent = [
        (call, others(call, call.outputs))
        for call in trace.functions
        if call.name in GATHERING and any(trace.has_node_rows(value) for value in call.inputs)
    ]
    got = [
        (call, others(call, call.inputs))
        for call in trace.functions
        if call.name in SCATTERING and any(map(trace.has_node_rows, call.outputs))
    ]
    found = []
    for end, given in got:
        starts = [
            (start, value)
            for start, made in sent
            for value in made
            if any(trace.derives(each, value) for each in given)
        ]
        # What goes back to where it was taken from was computed of some nodes, as by experts.
        own = indices(end)
        back = [value for start, value in starts if not own.isdisjoint(indices(start))]
        found += [
            (start, end)
            for start, value in starts
            if not any(trace.derives(each, value) for each in back)
        ]
    return found


def _unexpanded(trace: Trace, index: int) -> int:
    """Return an index before its one dimension was made several, as ``scatter`` wants it."""
    while len(trace.values[index].shape) > 1:
        call = trace.producer.get(index)
        if call is None or call.name not in EXPANDING:
            break
        index = call.inputs[0]
    return index


def reads_nodes_by_edges(trace: Trace, function: FunctionCall) -> bool:
    """Whether a function is given values of nodes together with edges or an adjacency matrix.

    A number per node that comes from the edges, such as a degree, may be added or multiplied.
    """
    rows, edges = trace.num_nodes, [value for value in function.inputs if trace.edge_only(value)]
    if function.name not in INDEXING and function.name not in LINEAR:
        shapes = {value: trace.values[value].shape for value in edges}
        edges = [each for each in edges if shapes[each].count(rows) != 1 or shapes[each][0] != rows]
    return bool(edges) and any(
        trace.values[value].floating and Source.NODE in trace.values[value].sources
        for value in function.inputs
    )


def refuse_hidden_steps(layers: Layers, ends: Sequence[int]) -> None:
    """Refuse messages that are passed outside of the layers, and rows that are put in other places.

    Raises:
        CaptureError: if the history would lack a layer, or its rows would be other nodes'.
    """
    trace = layers.trace
    pooling = [call for call in trace.modules if is_pooling(call.module)]
    got = {id(end) for _, end in messages(trace)}
    outside = [
        call for call in layers.steps if not any(module.contains(call.time) for module in pooling)
    ]
    for end in ends:
        steps = [call for call in outside if layers.leads_to(call, end)]
        hidden = [
            call.name
            for call in steps
            if any(layers.made[value] for value in call.inputs)
            # What is looked up for every edge may be an argument of the next layer.
            and (call.name in LINEAR or any(map(layers.has_node_rows, call.outputs)))
            and (reads_nodes_by_edges(trace, call) or id(call) in got)
        ]
        if hidden:
            raise CaptureError(
                f"messages are passed outside of the layers that were found, by {hidden[0]}() on "
                f"{layers.names_of(end)!r}; name the modules to capture with --layers"
            )
        if _is_of_unknown_origin(trace, end):
            raise CaptureError(
                f"what {layers.names_of(end)!r} was computed from is lost on the way (NumPy or "
                "lists in between?); name the modules to capture with --layers"
            )
        moves = [call for call in steps if _moves_rows(layers, call)]
        if len(moves) % 2:  # there and back is no move
            raise CaptureError(
                f"the rows of nodes are put in another order, by {moves[0].name}(): the history "
                "would be that of other nodes; give the model graphs in the order it wants, or "
                "name tensors in the nodes' order with --layers NAME:output"
            )


#: Functions that make a tensor of numbers from outside of PyTorch.
_IMPORTING = frozenset({"tensor", "as_tensor", "asarray", "from_numpy", "lift_fresh"})


def _is_of_unknown_origin(trace: Trace, end: int) -> bool:
    """Whether rows of nodes on the way came up from nowhere, made by no function of PyTorch."""
    for value in trace.values:
        if value.parents or value.sources != Source.NONE or not trace.has_node_rows(value.index):
            continue
        call = trace.producer.get(value.index)
        imported = call is None or call.name in _IMPORTING
        if imported and trace.derives(end, value.index):
            return True
    return False


def _moves_rows(layers: Layers, call: FunctionCall) -> bool:
    """Whether a call looks rows of nodes up by an index of as many nodes, and not each its own."""
    trace = layers.trace
    indices = [
        value
        for value in call.inputs
        if not trace.values[value].floating and trace.values[value].shape == (trace.num_nodes,)
    ]
    makers = [trace.producer.get(value) for value in indices]
    return (
        call.name in ("__getitem__", "index_select", "index", "gather")
        and any(map(layers.has_node_rows, call.outputs))
        and any(map(layers.has_node_rows, call.inputs))
        and bool(indices)
        # Beside another index, arange() takes a number of each row: x[torch.arange(n), chosen].
        and not (len(indices) > 1 and makers[0] is not None and makers[0].name == "arange")
    )
