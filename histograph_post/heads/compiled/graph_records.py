"""What the loops over graphs read and fill in, and where in it a graph is.

The history of a graph is rows of a table that may hold other graphs as well: node ``i`` of graph
``g`` is ``table[(starts[g] + i) * stride:]``, ``L * D`` values. What the head makes of it stands in
the order of the batch: node ``i`` is row ``ptr[g] + i``.

There may be several copies of a head with other weights, which all read a graph in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .loops import Floats, Integers, loop
from .row_loops import copy_row

#: Values of the histories of a block of graphs, at most: a quarter of a processor's second cache.
VALUES_OF_BLOCK = 1 << 16


class Table(NamedTuple):
    """Where the history of each graph is."""

    values: Floats
    #: Values from a row to the next.
    stride: int
    #: Layers of a row.
    num_layers: int
    #: Row of the table where each graph starts, ``[num_graphs]``.
    starts: Integers
    #: Row of the batch where each graph starts, and the number of rows, ``[num_graphs + 1]``.
    ptr: Integers


class TurnedMaps(NamedTuple):
    """Some of the maps with inputs as rows, as they are multiplied from the right."""

    #: ``[copies, D, dim]``.
    query: Floats
    #: ``[copies, D, dim]``.
    embedding: Floats
    #: ``[copies, dim, 3 * dim]``.
    nodes: Floats


class Weighing(NamedTuple):
    """How scores become weights, of layers and of nodes."""

    #: Place in :data:`~histograph_post.heads.fast_path.LOOP_NORMALIZATIONS`.
    kind: int
    #: The radius of bounded weights, the smallest divisor of signed ones.
    bound: np.float32
    #: Multiplied with the scores of layers.
    scale: np.float32
    #: Multiplied with the scores of nodes.
    node_scale: np.float32


class Kept(NamedTuple):
    """What the forward pass finds on its way and the backward pass uses again."""

    #: ``[copies, num_nodes, dim]``.
    queries: Floats
    #: Of layers, ``[copies, num_graphs, heads, L]``.
    scores: Floats
    #: Node embeddings, ``[copies, num_nodes, dim]``.
    nodes: Floats
    #: Queries and keys of node attention, ``[copies, num_nodes, 2 * dim]``.
    query_key: Floats
    #: Sum of the node embeddings by the attention they receive,
    #: ``[copies, num_graphs, attention heads, dim]``.
    summaries: Floats


class Results(NamedTuple):
    """What a head makes of the graphs, or the gradients of it."""

    #: What the heads of node attention find, averaged over nodes, ``[copies, num_graphs, dim]``.
    contexts: Floats
    #: Mean of the node embeddings, ``[copies, num_graphs, dim]``.
    means: Floats


@loop
def end_of_block(table: Table, graph: int, stop: int, copies: int) -> int:
    """Return where a block of graphs ends that all copies of a head read before the next one.

    Copies take turns where a block ends: what they read of it is in the processor's cache, and
    weights are fetched once for all of its graphs.

    Args:
        table: The history.
        graph: The first of the block.
        stop: Where it ends at the latest.
        copies: Of the head; a single one has nothing to fetch again.
    """
    end = graph + 1
    rows = VALUES_OF_BLOCK // table.stride if copies > 1 else 0
    while end < stop and table.ptr[end + 1] - table.ptr[graph] <= rows:
        end += 1
    return end


@loop
def graph_history(table: Table, graph: int, channels: int) -> Floats:
    """Return the history of a graph: ``[n, L * D]``, a copy if the table has more in a row."""
    row_size = table.num_layers * channels
    count = table.ptr[graph + 1] - table.ptr[graph]
    place = table.starts[graph] * table.stride
    if table.stride == row_size:
        return table.values[place : place + count * row_size].reshape(count, row_size)
    history = np.empty((count, row_size), np.float32)
    for node in range(count):
        copy_row(table.values[place : place + row_size], history[node])
        place += table.stride
    return history
