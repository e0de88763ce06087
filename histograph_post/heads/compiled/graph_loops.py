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
from .layer_loops import (
    add_scores,
    embed,
    embed_back,
    score_layers,
    score_layers_back,
    sum_layers,
)
from .loops import ONE, Floats, Integers, loop
from .products import add_product, add_row_products
from .row_loops import add_rows, clear, clear_row, copy_row, repeat_row, scale, take_mean
from .weight_loops import normalize, normalize_back


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
    #: Sums of the layers, ``[copies, num_nodes, heads * D]``; or of no node, to be made again.
    combined: Floats
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
    first: int,
    stop: int,
    table: Table,
    maps: Maps,
    weighing: Weighing,
    kept: Kept,
    results: Results,
    layer_means: Floats,
) -> None:
    """Run copies of a head on the graphs from ``first`` to ``stop``.

    Args:
        first: The first graph.
        stop: The graph after the last one.
        table: The history.
        maps: The weights.
        weighing: How scores become weights.
        kept: Filled in.
        results: Filled in.
        layer_means: Filled in: means over the nodes of every layer, ``[num_graphs, L * D]``; empty
            if they are not asked for.
    """
    copies, heads, width, channels = maps.key.shape
    dim = heads * width
    for graph in range(first, stop):
        begin, end = table.ptr[graph], table.ptr[graph + 1]
        count, row_size = end - begin, table.num_layers * channels
        history = graph_history(table, graph, row_size)  # [n, L * D]
        if len(layer_means):
            take_mean(history, layer_means[graph])
        last = row_size - channels  # where the last layer starts
        filters = np.empty((count, heads * channels), np.float32)
        weights = np.empty((heads, table.num_layers), np.float32)
        for copy in range(copies):
            if count == 0:
                clear_row(results.contexts[copy, graph])
                clear_row(results.means[copy, graph])
                continue
            queries = kept.queries[copy, begin:end]  # [n, dim]
            repeat_row(maps.query_bias[copy], ONE, queries)
            add_row_products(history, last, maps.query[copy], queries, channels)
            clear(filters)
            for head in range(heads):
                own = queries[:, head * width : (head + 1) * width]  # [n, dim / heads]
                add_product(own, maps.key[copy, head], 0, filters, head * channels, channels)
            scores = kept.scores[copy, graph]  # [heads, L]
            score_layers(history, filters, queries, maps.fixed_keys[copy], weighing.scale, scores)
            for head in range(heads):
                normalize(scores[head], weighing.kind, weighing.bound, weights[head])
            combined = filters  # which are not needed any more
            if kept.combined.shape[1]:
                combined = kept.combined[copy, begin:end]  # [n, heads * D]
            sum_layers(history, weights, combined)
            nodes = kept.nodes[copy, begin:end]  # [n, dim]
            embed(combined, weights, maps.embedding[copy], maps.offset[copy], nodes)
            query_key = kept.query_key[copy, begin:end]  # [n, 2 * dim]
            repeat_row(maps.nodes_bias[copy, : 2 * dim], ONE, query_key)
            add_row_products(nodes, 0, maps.nodes[copy, : 2 * dim], query_key, dim)
            summaries = kept.summaries[copy, graph]  # [attention heads, dim]
            attend(nodes, query_key, weighing.node_scale, summaries)
            values, bias = maps.nodes[copy, 2 * dim :], maps.nodes_bias[copy, 2 * dim :]
            take_values(summaries, values, bias, results.contexts[copy, graph])
            take_mean(nodes, results.means[copy, graph])


@loop
def read_graphs_back(
    part: int,
    first: int,
    stop: int,
    table: Table,
    maps: Maps,
    weighing: Weighing,
    kept: Kept,
    grad_results: Results,
    grad_maps: Maps,
) -> None:
    """Add what these graphs give to the gradients of :func:`read_graphs`.

    Args:
        part: Which of several gradients to add to.
        first: The first graph.
        stop: The graph after the last one.
        table: The history.
        maps: The weights.
        weighing: How scores became weights.
        kept: What :func:`read_graphs` has left.
        grad_results: Of what it has found.
        grad_maps: Added to; there is a dimension of parts in front of that of copies.
    """
    copies, heads, width, channels = maps.key.shape
    dim = heads * width
    for graph in range(first, stop):
        begin, end = table.ptr[graph], table.ptr[graph + 1]
        count, row_size = end - begin, table.num_layers * channels
        if count == 0:
            continue
        history = graph_history(table, graph, row_size)  # [n, L * D]
        last = row_size - channels  # where the last layer starts
        grad_rows = np.empty((count, heads * channels), np.float32)
        made_again = np.empty((count, heads * channels), np.float32)
        weights = np.empty((heads, table.num_layers), np.float32)
        grad_weights = np.empty((heads, table.num_layers), np.float32)
        grad_scores = np.empty((heads, table.num_layers), np.float32)
        grad_summaries = np.empty(kept.summaries.shape[2:], np.float32)
        grad_nodes = np.empty((count, dim), np.float32)
        grad_queries = np.empty((count, dim), np.float32)
        grad_query_key = np.empty((count, 2 * dim), np.float32)
        share = ONE / np.float32(count)
        for copy in range(copies):
            nodes, scores = kept.nodes[copy, begin:end], kept.scores[copy, graph]
            grad_map = grad_maps.nodes[part, copy]  # [3 * dim, dim]
            grad_bias = grad_maps.nodes_bias[part, copy]  # [3 * dim]
            take_values_back(
                kept.summaries[copy, graph],
                maps.nodes[copy, 2 * dim :],
                grad_results.contexts[copy, graph],
                grad_summaries,
                grad_map[2 * dim :],
                grad_bias[2 * dim :],
            )
            repeat_row(grad_results.means[copy, graph], share, grad_nodes)
            attend_back(
                nodes,
                kept.query_key[copy, begin:end],
                weighing.node_scale,
                grad_summaries,
                grad_nodes,
                grad_query_key,
            )
            add_product(grad_query_key, maps.nodes[copy], 0, grad_nodes, 0, dim)
            add_product(grad_query_key.T, nodes, 0, grad_map, 0, dim)
            add_rows(grad_query_key, grad_bias)

            for head in range(heads):
                normalize(scores[head], weighing.kind, weighing.bound, weights[head])
            if kept.combined.shape[1]:
                combined = kept.combined[copy, begin:end]  # [n, heads * D]
            else:
                combined = made_again
                sum_layers(history, weights, combined)
            embed_back(
                weights, maps.offset[copy], grad_nodes, grad_weights, grad_maps.offset[part, copy]
            )
            clear(grad_rows)  # of the sums of layers
            for head in range(heads):
                own = grad_nodes[:, head * width : (head + 1) * width]  # [n, dim / heads]
                grad = grad_maps.embedding[part, copy, head * width : (head + 1) * width]
                add_product(own.T, combined, head * channels, grad, 0, channels)
                embedding = maps.embedding[copy, head * width : (head + 1) * width]
                add_product(own, embedding, 0, grad_rows, head * channels, channels)
            add_scores(history, grad_rows, grad_weights)
            for head in range(heads):
                normalize_back(
                    scores[head],
                    grad_weights[head],
                    weighing.kind,
                    weighing.bound,
                    grad_scores[head],
                )
            scale(grad_scores, weighing.scale * share)

            sum_layers(history, grad_scores, grad_rows)  # of the filters
            queries = kept.queries[copy, begin:end]  # [n, dim]
            clear(grad_queries)
            for head in range(heads):
                own = queries[:, head * width : (head + 1) * width]  # [n, dim / heads]
                grad_own = grad_queries[:, head * width : (head + 1) * width]
                place, key = head * channels, maps.key[copy, head]
                add_product(own.T, grad_rows, place, grad_maps.key[part, copy, head], 0, channels)
                add_row_products(grad_rows, place, key, grad_own, channels)
            score_layers_back(
                queries,
                maps.fixed_keys[copy],
                grad_scores,
                grad_queries,
                grad_maps.fixed_keys[part, copy],
            )
            grad = grad_maps.query[part, copy]  # [dim, D]
            add_product(grad_queries.T, history, last, grad, 0, channels)
            add_rows(grad_queries, grad_maps.query_bias[part, copy])


@loop
def graph_history(table: Table, graph: int, row_size: int) -> Floats:
    """Return the history of a graph: ``[n, L * D]``, a copy if the table has more in a row."""
    count = table.ptr[graph + 1] - table.ptr[graph]
    place = table.starts[graph] * table.stride
    if table.stride == row_size:
        return table.values[place : place + count * row_size].reshape(count, row_size)
    history = np.empty((count, row_size), np.float32)
    for node in range(count):
        copy_row(table.values[place : place + row_size], history[node])
        place += table.stride
    return history
