"""The gradients of :mod:`.graph_loops`, graph by graph, added up over each part of a batch."""

from __future__ import annotations

import numpy as np

from ..folded_maps import LayerMaps, Maps
from .ahead import fetch_rest, look_ahead
from .attention_loops import attend_back, take_values_back
from .graph_records import Kept, Results, Table, Weighing, end_of_block, graph_history
from .layer_loops import embed_back, score_layers_back
from .loops import ONE, Floats, Integers, Parts, loop, part_of_loop, take_number
from .products import add_dots, add_product, add_product_ahead, sum_pieces, write_product
from .row_loops import add_rows, clear_row, new_rows, repeat_row, scale
from .teams import TeamLoop
from .weight_loops import normalize_all, normalize_all_back


@loop
def read_graphs_back(
    parts: Parts,
    table: Table,
    maps: Maps[Floats],
    turned_key: Floats,
    weighing: Weighing,
    kept: Kept,
    grad_results: Results,
    gradients: Floats,
) -> None:
    """Give the gradients of :func:`.graph_loops.read_graphs`, one of every part of the batch.

    Args:
        parts: The parts.
        table: The history.
        maps: The weights.
        turned_key: ``maps.layers.key`` with inputs as rows, ``[copies, D, dim]``.
        weighing: How scores became weights.
        kept: What :func:`.graph_loops.read_graphs` has left.
        grad_results: Of what it has found.
        gradients: Filled in: all that ``maps`` has, one after the other, ``[parts, numel]``.
    """
    ahead, (copies, _, channels) = np.zeros(2, np.int64), maps.layers.query.shape
    while True:
        part = take_number(parts.next)
        if part + 1 >= len(parts.bounds):
            return
        clear_row(gradients[part])
        grad_maps = view_as_maps(gradients[part], maps)
        stop = parts.bounds[part]
        while stop < parts.bounds[part + 1]:
            first, stop = stop, end_of_block(table, stop, parts.bounds[part + 1], copies)
            for graph in range(first, stop):
                fetch_rest(graph_history(table, graph, channels), ahead)
            for copy in range(copies):
                for graph in range(first, stop):
                    if copy == copies - 1:  # the weights of others would push it out of the cache
                        look_ahead(table, parts, part, graph, channels, ahead)
                    history, begin = graph_history(table, graph, channels), table.ptr[graph]
                    if len(history):
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
                            ahead,
                        )


READ_GRAPHS_BACK = TeamLoop(read_graphs_back)


@part_of_loop
def read_graph_back(
    history: Floats,
    graph: int,
    begin: int,
    copy: int,
    maps: Maps[Floats],
    turned_key: Floats,
    weighing: Weighing,
    kept: Kept,
    grad_results: Results,
    grad_maps: Maps[Floats],
    ahead: Integers,
) -> None:
    """Add the gradients of :func:`.graph_loops.read_graph`.

    Args:
        history: ``[n, L * D]``, of one node at least.
        graph: Which graph of the batch it is.
        begin: Its first row of the batch.
        copy: Which copy of the head.
        maps: The weights.
        turned_key: ``maps.layers.key`` with inputs as rows, ``[copies, D, dim]``.
        weighing: How scores became weights.
        kept: What :func:`.graph_loops.read_graph` has left.
        grad_results: Of what it has found.
        grad_maps: Added to.
        ahead: What is fetched meanwhile, see :mod:`.ahead`.
    """
    layers, grad_layers = maps.layers, grad_maps.layers
    _, heads, width, channels = layers.key.shape
    dim, end, share = heads * width, begin + len(history), ONE / np.float32(len(history))
    nodes = kept.nodes[copy, begin:end]  # [n, dim]
    grad_map, grad_bias = grad_maps.nodes[copy], grad_maps.nodes_bias[copy]  # [3 * dim, ...]
    grad_summaries = new_rows(*kept.summaries.shape[2:])
    take_values_back(
        kept.summaries[copy, graph],
        maps.nodes[copy, 2 * dim :],
        grad_results.contexts[copy, graph : graph + 1],
        grad_summaries,
        grad_map[2 * dim :],
        grad_bias[2 * dim :],
    )
    grad_nodes = new_rows(len(history), dim)
    repeat_row(grad_results.means[copy, graph], share, grad_nodes)
    grad_query_key = new_rows(len(history), 2 * dim)
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
    combined = new_rows(len(history), heads * channels)
    sum_pieces(weights, history, combined)  # faster made again than kept
    grad_weights = np.empty(scores.shape, np.float32)
    embed_back(weights, layers.offset[copy], grad_nodes, grad_weights, grad_layers.offset[copy])
    grad_rows = combined  # of the sums of layers: a head's, in place of what it needs no more
    for head in range(heads):
        first, stop, place = head * width, (head + 1) * width, head * channels
        own = grad_nodes[:, first:stop]  # [n, dim / heads]
        grad = grad_layers.embedding[copy, first:stop]  # [dim / heads, D]
        add_product(own.T, combined, place, grad, 0, channels)
        write_product(own, layers.embedding[copy, first:stop], 0, grad_rows, place, channels)
    add_dots(grad_rows, history, channels, grad_weights)
    grad_scores = np.empty(scores.shape, np.float32)
    normalize_all_back(scores, grad_weights, weighing.kind, weighing.bound, grad_scores)
    scale(grad_scores, weighing.scale * share)

    sum_pieces(grad_scores, history, grad_rows)  # of the filters
    queries = kept.queries[copy, begin:end]  # [n, dim]
    grad_queries = new_rows(len(history), dim)
    for head in range(heads):
        first, stop, place = head * width, (head + 1) * width, head * channels
        grad = grad_layers.key[copy, head]  # [dim / heads, D]
        add_product_ahead(queries[:, first:stop].T, grad_rows, place, grad, 0, channels, ahead)
        grad_filters = grad_rows[:, place : place + channels]  # [n, D]
        write_product(grad_filters, turned_key[copy], first, grad_queries, first, width)
    score_layers_back(
        queries, layers.fixed_keys[copy], grad_scores, grad_queries, grad_layers.fixed_keys[copy]
    )
    last = history.shape[1] - channels  # where the last layer starts
    add_product_ahead(grad_queries.T, history, last, grad_layers.query[copy], 0, channels, ahead)
    add_rows(grad_queries, grad_layers.query_bias[copy])


@part_of_loop
def view_as_maps(values: Floats, maps: Maps[Floats]) -> Maps[Floats]:
    """View values that stand one after the other as maps of these shapes."""
    layers = maps.layers
    query, values = take_first(values, layers.query)
    query_bias, values = take_first(values, layers.query_bias)
    key, values = take_first(values, layers.key)
    fixed_keys, values = take_first(values, layers.fixed_keys)
    embedding, values = take_first(values, layers.embedding)
    offset, values = take_first(values, layers.offset)
    nodes, values = take_first(values, maps.nodes)
    nodes_bias, values = take_first(values, maps.nodes_bias)
    found = LayerMaps(query, query_bias, key, fixed_keys, embedding, offset)
    return Maps(found, nodes, nodes_bias)


@part_of_loop
def take_first(values: Floats, like: Floats) -> tuple[Floats, Floats]:
    """Return the first values in the shape of an array, and the rest."""
    return values[: like.size].reshape(like.shape), values[like.size :]
