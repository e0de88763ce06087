"""A head up to what it makes of a graph, graph by graph: layer weights, node embeddings, attention.

The history of a graph is rows of a table that may hold other graphs as well: node ``i`` of graph
``g`` is ``table[(starts[g] + i) * stride:]``, ``L * D`` values. What the head makes of it stands in
the order of the batch: node ``i`` is row ``ptr[g] + i``.

There may be several copies of a head with other weights, which all read a graph in turn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .attention_loops import attend, attend_back
from .loops import ONE, ZERO, Floats, Integers, loop
from .products import add_product, add_row_products, dot
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


@loop
def take_values(summaries: Floats, values: Floats, bias: Floats, context: Floats) -> None:
    """Map what each head of node attention has summed up.

    Args:
        summaries: ``[heads, dim]``.
        values: ``[dim, dim]``, the rows of each head next to each other.
        bias: ``[dim]``.
        context: Filled in, ``[dim]``.
    """
    width = len(context) // len(summaries)
    for place in range(len(context)):
        context[place] = bias[place] + dot(values[place], summaries[place // width])


@loop
def take_values_back(
    summaries: Floats,
    values: Floats,
    grad: Floats,
    grad_summaries: Floats,
    grad_values: Floats,
    grad_bias: Floats,
) -> None:
    """Give the gradients of :func:`take_values`.

    Args:
        summaries: ``[heads, dim]``.
        values: ``[dim, dim]``, the rows of each head next to each other.
        grad: Of the context, ``[dim]``.
        grad_summaries: Filled in, ``[heads, dim]``.
        grad_values: Added to, ``[dim, dim]``.
        grad_bias: Added to, ``[dim]``.
    """
    width = len(grad) // len(summaries)
    clear(grad_summaries)
    for place in range(len(grad)):
        summary, grad_summary = summaries[place // width], grad_summaries[place // width]
        value, grad_value, factor = values[place], grad_values[place], grad[place]
        grad_bias[place] += factor
        for channel in range(len(grad)):
            grad_value[channel] += factor * summary[channel]
            grad_summary[channel] += factor * value[channel]


@loop
def score_layers(
    history: Floats,
    filters: Floats,
    queries: Floats,
    fixed_keys: Floats,
    factor: np.float32,
    scores: Floats,
) -> None:
    """Write the mean scores of the layers of a graph.

    Args:
        history: ``[n, L * D]``.
        filters: What each node looks for, ``[n, heads * D]``.
        queries: What each node asks, ``[n, dim]``.
        fixed_keys: What answers from every node alike, ``[heads, dim / heads, L]``.
        factor: Multiplied with all scores.
        scores: Filled in, ``[heads, L]``.
    """
    heads, width, num_layers = fixed_keys.shape
    total = np.zeros(heads * width, np.float32)
    add_rows(queries, total)
    clear(scores)
    for head in range(heads):
        for channel in range(width):
            query = total[head * width + channel]
            for layer in range(num_layers):
                scores[head, layer] += query * fixed_keys[head, channel, layer]
    add_scores(history, filters, scores)
    scale(scores, factor / np.float32(len(history)))


@loop
def score_layers_back(
    queries: Floats,
    fixed_keys: Floats,
    grad_scores: Floats,
    grad_queries: Floats,
    grad_fixed_keys: Floats,
) -> None:
    """Add what the fixed keys give to the gradients of :func:`score_layers`.

    Args:
        queries: What each node asks, ``[n, dim]``.
        fixed_keys: What answers from every node alike, ``[heads, dim / heads, L]``.
        grad_scores: Of the score of a layer in each node, ``[heads, L]``.
        grad_queries: Added to, ``[n, dim]``.
        grad_fixed_keys: Added to, ``[heads, dim / heads, L]``.
    """
    heads, width, num_layers = fixed_keys.shape
    total = np.zeros(heads * width, np.float32)
    add_rows(queries, total)
    for head in range(heads):
        grad = grad_scores[head]  # [L]
        for channel in range(width):
            place = head * width + channel
            shared = dot(grad, fixed_keys[head, channel])
            for node in range(len(queries)):
                grad_queries[node, place] += shared
            for layer in range(num_layers):
                grad_fixed_keys[head, channel, layer] += total[place] * grad[layer]


@loop
def add_scores(history: Floats, filters: Floats, scores: Floats) -> None:
    """Add ``filters [n, heads * D] . history [n, L * D]`` of all nodes to ``scores [heads, L]``."""
    heads, num_layers = scores.shape
    channels = history.shape[1] // num_layers
    for node in range(len(history)):
        own, layers = filters[node].reshape(heads, -1), history[node].reshape(num_layers, -1)
        add_row_products(own, 0, layers, scores, channels)


@loop
def sum_layers(history: Floats, weights: Floats, combined: Floats) -> None:
    """Write ``weights [heads, L] @ history [n, L * D]`` of each node: ``[n, heads * D]``."""
    heads, num_layers = weights.shape
    channels = history.shape[1] // num_layers
    for node in range(len(history)):
        own, layers = combined[node].reshape(heads, -1), history[node].reshape(num_layers, -1)
        clear(own)
        add_product(weights, layers, 0, own, 0, channels)


@loop
def embed(
    combined: Floats, weights: Floats, embedding: Floats, offset: Floats, nodes: Floats
) -> None:
    """Write the node embeddings of a graph.

    Args:
        combined: Sums of the layers of each node, ``[n, heads * D]``.
        weights: Layer weights, ``[heads, L]``.
        embedding: ``[dim, D]``.
        offset: What every layer has in all nodes, ``[L, dim]``.
        nodes: Filled in, ``[n, dim]``.
    """
    heads, num_layers = weights.shape
    width = nodes.shape[1] // heads
    constant = np.zeros(nodes.shape[1], np.float32)
    for head in range(heads):
        for layer in range(num_layers):
            for place in range(head * width, (head + 1) * width):
                constant[place] += weights[head, layer] * offset[layer, place]
    repeat_row(constant, ONE, nodes)
    for head in range(heads):
        own = embedding[head * width : (head + 1) * width]  # [dim / heads, D]
        result = nodes[:, head * width : (head + 1) * width]  # [n, dim / heads]
        add_row_products(combined, head * own.shape[1], own, result, own.shape[1])


@loop
def embed_back(
    weights: Floats, offset: Floats, grad_nodes: Floats, grad_weights: Floats, grad_offset: Floats
) -> None:
    """Give the gradients of :func:`embed` that the offset is part of.

    Args:
        weights: Layer weights, ``[heads, L]``.
        offset: What every layer has in all nodes, ``[L, dim]``.
        grad_nodes: Of the node embeddings, ``[n, dim]``.
        grad_weights: Filled in, ``[heads, L]``.
        grad_offset: Added to, ``[L, dim]``.
    """
    heads, num_layers = weights.shape
    width = grad_nodes.shape[1] // heads
    constant = np.zeros(grad_nodes.shape[1], np.float32)
    add_rows(grad_nodes, constant)
    for head in range(heads):
        for layer in range(num_layers):
            total = ZERO
            for place in range(head * width, (head + 1) * width):
                total += constant[place] * offset[layer, place]
                grad_offset[layer, place] += weights[head, layer] * constant[place]
            grad_weights[head, layer] = total
