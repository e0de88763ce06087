"""A head up to what it makes of a graph, graph by graph: layer weights, node embeddings, attention.

The history of a graph is rows of a table that may hold other graphs as well: node ``i`` of graph
``g`` is ``table[(starts[g] + i) * stride:]``, ``L * D`` values. What the head makes of it stands in
the order of the batch: node ``i`` is row ``ptr[g] + i``.

There may be several copies of a head with other weights, which all read a graph in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention_loops import attend, attend_back, take_values, take_values_back
from .layer_loops import embed, embed_back, score_layers, score_layers_back
from .loops import ONE, Floats, Integers, Parts, loop, part_of_loop, take_number
from .products import add_dots, add_product, fetch_rows, sum_pieces
from .row_loops import add_rows, clear_row, copy_row, repeat_row, scale, take_mean
from .weight_loops import normalize_all, normalize_all_back


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


class Maps(NamedTuple):
    """The weights of a head, or their gradients, for a number of copies.

    The letters are those of :mod:`histograph_post.heads.layer_weights`.
    """

    #: ``Wq^T E``, from the last layer to queries, ``[copies, dim, D]``.
    query: Floats
    #: ``(b + P_last) Wq``, ``[copies, dim]``.
    query_bias: Floats
    #: ``Wk^T E``, from queries to channels of the history, ``[copies, heads, dim / heads, D]``.
    key: Floats
    #: ``(b + P_l) Wk``, ``[copies, heads, dim / heads, L]``.
    fixed_keys: Floats
    #: ``E``, ``[copies, dim, D]``.
    embedding: Floats
    #: ``b + P_l``, ``[copies, L, dim]``.
    offset: Floats
    #: From node embeddings to queries, keys and values of node attention,
    #: ``[copies, 3 * dim, dim]``.
    nodes: Floats
    #: ``[copies, 3 * dim]``.
    nodes_bias: Floats


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

    #: Place in :data:`~histograph_post.heads.layer_weights.NORMALIZATIONS`.
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
def read_graphs(
    parts: Parts,
    table: Table,
    maps: Maps,
    turned: TurnedMaps,
    weighing: Weighing,
    kept: Kept,
    results: Results,
    layer_means: Floats,
) -> None:
    """Run copies of a head on graphs, as long as there are parts of the batch to be taken.

    Args:
        parts: The parts.
        table: The history.
        maps: The weights.
        turned: The same.
        weighing: How scores become weights.
        kept: Filled in.
        results: Filled in.
        layer_means: Filled in: means over the nodes of every layer, ``[num_graphs, L * D]``; empty
            if they are not asked for.
    """
    while True:
        part = take_number(parts.next)
        if part + 1 >= len(parts.bounds):
            return
        for graph in range(parts.bounds[part], parts.bounds[part + 1]):
            history = graph_history(table, graph, maps.query.shape[2])  # [n, L * D]
            if len(layer_means):
                take_mean(history, layer_means[graph])
            else:
                fetch_rows(history)
            begin = table.ptr[graph]
            for copy in range(len(maps.query)):
                if len(history):
                    read_graph(history, graph, begin, copy, maps, turned, weighing, kept, results)
                else:
                    clear_row(results.contexts[copy, graph])
                    clear_row(results.means[copy, graph])


@part_of_loop
def read_graph(
    history: Floats,
    graph: int,
    begin: int,
    copy: int,
    maps: Maps,
    turned: TurnedMaps,
    weighing: Weighing,
    kept: Kept,
    results: Results,
) -> None:
    """Run one copy of a head on one graph.

    Args:
        history: ``[n, L * D]``, of one node at least.
        graph: Which graph of the batch it is.
        begin: Its first row of the batch.
        copy: Which copy of the head.
        maps: The weights.
        turned: The same.
        weighing: How scores become weights.
        kept: Filled in.
        results: Filled in.
    """
    _, heads, width, channels = maps.key.shape
    dim, end = heads * width, begin + len(history)
    queries = kept.queries[copy, begin:end]  # [n, dim]
    repeat_row(maps.query_bias[copy], ONE, queries)
    add_product(history[:, -channels:], turned.query[copy], 0, queries, 0, dim)
    filters = np.zeros((len(history), heads * channels), np.float32)
    for head in range(heads):
        own = queries[:, head * width : (head + 1) * width]  # [n, dim / heads]
        add_product(own, maps.key[copy, head], 0, filters, head * channels, channels)
    scores = kept.scores[copy, graph]  # [heads, L]
    score_layers(history, filters, queries, maps.fixed_keys[copy], weighing.scale, scores)
    weights = np.empty(scores.shape, np.float32)
    normalize_all(scores, weighing.kind, weighing.bound, weights)
    combined = filters  # which are not needed any more
    sum_pieces(weights, history, combined)
    nodes = kept.nodes[copy, begin:end]  # [n, dim]
    embed(combined, weights, turned.embedding[copy], maps.offset[copy], nodes)
    query_key = kept.query_key[copy, begin:end]  # [n, 2 * dim]
    repeat_row(maps.nodes_bias[copy, : 2 * dim], ONE, query_key)
    add_product(nodes, turned.nodes[copy], 0, query_key, 0, 2 * dim)
    summaries = kept.summaries[copy, graph]  # [attention heads, dim]
    attend(nodes, query_key, weighing.node_scale, summaries)
    values, bias = turned.nodes[copy], maps.nodes_bias[copy, 2 * dim :]
    take_values(summaries, values, bias, results.contexts[copy, graph : graph + 1])
    take_mean(nodes, results.means[copy, graph])


@loop
def read_graphs_back(
    parts: Parts,
    table: Table,
    maps: Maps,
    turned_key: Floats,
    weighing: Weighing,
    kept: Kept,
    grad_results: Results,
    gradients: Floats,
) -> None:
    """Give the gradients of :func:`read_graphs`, one of every part of the batch.

    Args:
        parts: The parts.
        table: The history.
        maps: The weights.
        turned_key: ``maps.key`` with inputs as rows, ``[copies, D, dim]``.
        weighing: How scores became weights.
        kept: What :func:`read_graphs` has left.
        grad_results: Of what it has found.
        gradients: Filled in: all that ``maps`` has, one after the other, ``[parts, numel]``.
    """
    while True:
        part = take_number(parts.next)
        if part + 1 >= len(parts.bounds):
            return
        clear_row(gradients[part])
        grad_maps = view_as_maps(gradients[part], maps)
        for graph in range(parts.bounds[part], parts.bounds[part + 1]):
            history = graph_history(table, graph, maps.query.shape[2])  # [n, L * D]
            fetch_rows(history)
            begin = table.ptr[graph]
            if len(history):
                for copy in range(len(maps.query)):
                    read_graph_back(
                        history,
                        graph,
                        begin,
                        copy,
                        maps,
                        turned_key,
                        weighing,
                        kept,
                        grad_results,
                        grad_maps,
                    )


@part_of_loop
def read_graph_back(
    history: Floats,
    graph: int,
    begin: int,
    copy: int,
    maps: Maps,
    turned_key: Floats,
    weighing: Weighing,
    kept: Kept,
    grad_results: Results,
    grad_maps: Maps,
) -> None:
    """Add the gradients of :func:`read_graph`.

    Args:
        history: ``[n, L * D]``, of one node at least.
        graph: Which graph of the batch it is.
        begin: Its first row of the batch.
        copy: Which copy of the head.
        maps: The weights.
        turned_key: ``maps.key`` with inputs as rows, ``[copies, D, dim]``.
        weighing: How scores became weights.
        kept: What :func:`read_graph` has left.
        grad_results: Of what it has found.
        grad_maps: Added to.
    """
    _, heads, width, channels = maps.key.shape
    dim, end, share = heads * width, begin + len(history), ONE / np.float32(len(history))
    nodes = kept.nodes[copy, begin:end]  # [n, dim]
    grad_map, grad_bias = grad_maps.nodes[copy], grad_maps.nodes_bias[copy]  # [3 * dim, ...]
    grad_summaries = np.empty(kept.summaries.shape[2:], np.float32)
    take_values_back(
        kept.summaries[copy, graph],
        maps.nodes[copy, 2 * dim :],
        grad_results.contexts[copy, graph : graph + 1],
        grad_summaries,
        grad_map[2 * dim :],
        grad_bias[2 * dim :],
    )
    grad_nodes = np.empty((len(history), dim), np.float32)
    repeat_row(grad_results.means[copy, graph], share, grad_nodes)
    grad_query_key = np.empty((len(history), 2 * dim), np.float32)
    attend_back(
        nodes,
        kept.query_key[copy, begin:end],
        weighing.node_scale,
        grad_summaries,
        grad_nodes,
        grad_query_key,
    )
    add_product(grad_query_key, maps.nodes[copy, : 2 * dim], 0, grad_nodes, 0, dim)
    add_product(grad_query_key.T, nodes, 0, grad_map, 0, dim)
    add_rows(grad_query_key, grad_bias)

    scores = kept.scores[copy, graph]  # [heads, L]
    weights = np.empty(scores.shape, np.float32)
    normalize_all(scores, weighing.kind, weighing.bound, weights)
    combined = np.empty((len(history), heads * channels), np.float32)
    sum_pieces(weights, history, combined)  # faster made again than kept
    grad_weights = np.empty(scores.shape, np.float32)
    embed_back(weights, maps.offset[copy], grad_nodes, grad_weights, grad_maps.offset[copy])
    grad_rows = np.zeros((len(history), heads * channels), np.float32)  # of the sums of layers
    for head in range(heads):
        first, stop, place = head * width, (head + 1) * width, head * channels
        own = grad_nodes[:, first:stop]  # [n, dim / heads]
        grad = grad_maps.embedding[copy, first:stop]  # [dim / heads, D]
        add_product(own.T, combined, place, grad, 0, channels)
        add_product(own, maps.embedding[copy, first:stop], 0, grad_rows, place, channels)
    add_dots(grad_rows, history, channels, grad_weights)
    grad_scores = np.empty(scores.shape, np.float32)
    normalize_all_back(scores, grad_weights, weighing.kind, weighing.bound, grad_scores)
    scale(grad_scores, weighing.scale * share)

    sum_pieces(grad_scores, history, grad_rows)  # of the filters
    queries = kept.queries[copy, begin:end]  # [n, dim]
    grad_queries = np.zeros((len(history), dim), np.float32)
    for head in range(heads):
        first, stop, place = head * width, (head + 1) * width, head * channels
        grad = grad_maps.key[copy, head]  # [dim / heads, D]
        add_product(queries[:, first:stop].T, grad_rows, place, grad, 0, channels)
        grad_filters = grad_rows[:, place : place + channels]  # [n, D]
        add_product(grad_filters, turned_key[copy], first, grad_queries, first, width)
    score_layers_back(
        queries, maps.fixed_keys[copy], grad_scores, grad_queries, grad_maps.fixed_keys[copy]
    )
    last = history.shape[1] - channels  # where the last layer starts
    add_product(grad_queries.T, history, last, grad_maps.query[copy], 0, channels)
    add_rows(grad_queries, grad_maps.query_bias[copy])


@part_of_loop
def view_as_maps(values: Floats, maps: Maps) -> Maps:
    """View values that stand one after the other as maps of these shapes."""
    query, values = take_first(values, maps.query.size)
    query_bias, values = take_first(values, maps.query_bias.size)
    key, values = take_first(values, maps.key.size)
    fixed_keys, values = take_first(values, maps.fixed_keys.size)
    embedding, values = take_first(values, maps.embedding.size)
    offset, values = take_first(values, maps.offset.size)
    nodes, values = take_first(values, maps.nodes.size)
    nodes_bias, values = take_first(values, maps.nodes_bias.size)
    return Maps(
        query.reshape(maps.query.shape),
        query_bias.reshape(maps.query_bias.shape),
        key.reshape(maps.key.shape),
        fixed_keys.reshape(maps.fixed_keys.shape),
        embedding.reshape(maps.embedding.shape),
        offset.reshape(maps.offset.shape),
        nodes.reshape(maps.nodes.shape),
        nodes_bias.reshape(maps.nodes_bias.shape),
    )


@part_of_loop
def take_first(values: Floats, count: int) -> tuple[Floats, Floats]:
    """Return the first values and the rest."""
    return values[:count], values[count:]


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
