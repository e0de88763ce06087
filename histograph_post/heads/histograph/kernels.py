"""What the HistoGraph head does with the nodes of a graph, forward and backward, in numba.

Four kernels, which :mod:`.accelerate` calls, go through the graphs of a batch where their history
lies; between :func:`score_layers` and :func:`read_nodes` PyTorch turns scores into weights.

Shapes: the ``G`` graphs of a batch have ``N`` nodes, one of them ``n``; ``L`` layers of ``D``
channels; ``dim`` channels are ``heads`` layer heads of ``width`` each, or ``node_heads`` attention
heads of ``size`` each.

Graphs are grouped into *parts* of consecutive graphs, because larger products are faster. Each part
has gradients of its own, which the caller sums in order: results do not depend on the thread that
runs a part. Kernels release Python's lock, and expect the BLAS to use one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt

F = np.float32
Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[np.int64]

#: Layers that are summed at a time: as many as there are registers for.
LAYERS = 8

#: Queries whose attention is made at a time, so that memory is linear in the nodes of a graph.
QUERIES = 128

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Compiles a function when it is first called, and keeps the code on disk. Sums may be made in any
#: order and fused with products. NaN and infinity stay what they are.
compiled: Callable[[_Function], _Function] = numba.njit(
    cache=True, nogil=True, error_model="numpy", fastmath={"contract", "reassoc", "nsz"}
)


class Batch(NamedTuple):
    """The graphs of a batch in a table of many graphs, and the part of it to run."""

    #: ``[rows, L or more, D]``, of which the last ``L`` layers are used.
    table: Floats
    #: First row of each graph in the table, ``[G]``.
    starts: Integers
    #: First node of each graph in the batch, and the number of nodes, ``[G + 1]``.
    ptr: Integers
    #: First graph of each part, and the number of graphs, ``[parts + 1]``.
    parts: Integers
    #: The part to run.
    part: int


@compiled
def copy(target: Floats, values: Floats) -> None:
    """Copy a vector to the beginning of another; numba's own way is slow."""
    for c in range(len(values)):
        target[c] = values[c]


@compiled
def sum_rows(rows: Floats) -> Floats:
    """Return the sum of the rows of a matrix."""
    return np.dot(np.ones(len(rows), F), rows)


@compiled
def split_heads(row: Floats, heads: int) -> Floats:
    """Return a row for each head, zero outside of its channels: ``[dim]`` to ``[heads, dim]``."""
    result, width = np.zeros((heads, len(row)), F), len(row) // heads
    for h in range(heads):
        copy(result[h, h * width :], row[h * width : (h + 1) * width])
    return result


@compiled
def join_heads(rows: Floats) -> Floats:
    """Return the channels of each head from its own row: ``[heads, dim]`` to ``[dim]``."""
    result, width = np.empty(rows.shape[1], F), rows.shape[1] // len(rows)
    for h in range(len(rows)):
        copy(result[h * width :], rows[h, h * width : (h + 1) * width])
    return result


@compiled
def weigh_layers(weights: Floats, rows: Floats, sums: Floats, first: int) -> None:
    """Sum layers of ``rows [n, L or more, D]`` by ``weights [heads, L]``.

    Results go to ``sums [heads, nodes, D]``, from node ``first`` on.
    """
    (heads, layers), (n, stored, channels) = weights.shape, rows.shape
    blocks = layers - layers % LAYERS
    sums[:, first : first + n] = 0
    for i in range(n):
        own = rows[i, stored - layers :]  # [L, D]
        for k in range(0, blocks, LAYERS):
            for h in range(heads):
                total, shares, block = sums[h, first + i], weights[h, k:], own[k:]
                for j in range(channels):
                    value = total[j]
                    for e in range(LAYERS):
                        value += shares[e] * block[e, j]
                    total[j] = value
        for k in range(blocks, layers):
            for h in range(heads):
                total, share = sums[h, first + i], weights[h, k]
                for j in range(channels):
                    total[j] += share * own[k, j]


@compiled
def add_dots(scores: Floats, filters: Floats, first: int, rows: Floats) -> None:
    """Add the dot products of filters and layers, summed over nodes, to ``scores [heads, L]``.

    Filters are ``[heads, nodes, D]``, from node ``first`` on; rows ``[n, L or more, D]``.
    """
    (heads, layers), (n, stored, channels) = scores.shape, rows.shape
    for i in range(n):
        for k in range(layers):
            layer = rows[i, stored - layers + k]
            for h in range(heads):
                own, total = filters[h, first + i], F(0)
                for j in range(channels):
                    total += own[j] * layer[j]
                scores[h, k] += total


@compiled
def sum_queries(queries: Floats, first: int, stop: int) -> Floats:
    """Sum the queries of some nodes, in the columns of the keys they ask: ``[heads, 2 * dim]``."""
    heads, _, width = queries.shape
    total = np.zeros((heads, 2 * heads * width), F)
    for h in range(heads):
        copy(total[h, (heads + h) * width :], sum_rows(queries[h, first:stop]))
    return total


@compiled
def score_layers(batch: Batch, inputs: Any, saved: Any, results: Any) -> None:
    """Score the layers of every graph.

    The last layer of a node asks. A head's query, mapped by its keys, is a filter of layers, and a
    score is the mean over nodes of ``filter . layer + query . offset of the key``, scaled.

    Args:
        inputs: The map from a layer to queries, then to keys, ``[2 * dim, D]``, and what each layer
            adds to them, ``[L, 2 * dim]``.
        saved: For backward: the last layer, ``[N, D]``, and queries, ``[heads, N, width]``.
        results: Scores, ``[G, heads, L]``.
    """
    (table, starts, ptr, parts, p), (maps, offsets) = batch, inputs
    (last, queries), (all_scores,) = saved, results
    (heads, _, width), channels = queries.shape, table.shape[2]
    dim, begin, end = heads * width, ptr[parts[p]], ptr[parts[p + 1]]
    filters = np.empty((heads, end - begin, channels), F)
    for g in range(parts[p], parts[p + 1]):
        for i in range(ptr[g + 1] - ptr[g]):
            copy(last[ptr[g] + i], table[starts[g] + i, -1])
    for h in range(heads):
        own, first = queries[h, begin:end], h * width
        np.dot(last[begin:end], maps[first : first + width].T, own)
        own += offsets[-1, first : first + width]
        np.dot(own, maps[dim + first : dim + first + width], filters[h])
    for g in range(parts[p], parts[p + 1]):
        n, scores = ptr[g + 1] - ptr[g], all_scores[g]
        np.dot(sum_queries(queries, ptr[g], ptr[g + 1]), offsets.T, scores)
        add_dots(scores, filters, ptr[g] - begin, table[starts[g] : starts[g] + n])
        scores *= F(1 / (n * np.sqrt(width)))


@compiled
def score_layers_backward(
    batch: Batch, inputs: Any, saved: Any, grad_results: Any, grads: Any
) -> None:
    """Set the gradients of :func:`score_layers`, ``[parts, ...]`` of each input."""
    (table, starts, ptr, parts, p), (maps, offsets) = batch, inputs
    (last, queries), (all_grad_scores,), (grad_maps, grad_offsets) = saved, grad_results, grads
    (heads, _, width), channels = queries.shape, table.shape[2]
    dim, begin, end = heads * width, ptr[parts[p]], ptr[parts[p + 1]]
    grad_filters = np.empty((heads, end - begin, channels), F)
    grad_queries = np.empty((heads, end - begin, width), F)
    through = np.empty((parts[p + 1] - parts[p], heads, 2 * dim), F)  # through key offsets
    of_part = grad_offsets[p]
    of_part[:] = 0
    for g in range(parts[p], parts[p + 1]):
        n = ptr[g + 1] - ptr[g]
        grad_scores = all_grad_scores[g] * F(1 / (n * np.sqrt(width)))
        rows = table[starts[g] : starts[g] + n]  # [n, L or more, D]
        weigh_layers(grad_scores, rows, grad_filters, ptr[g] - begin)
        of_part += np.dot(grad_scores.T, sum_queries(queries, ptr[g], ptr[g + 1]))
        np.dot(grad_scores, offsets, through[g - parts[p]])
    for h in range(heads):
        of_head, of_keys = slice(h * width, (h + 1) * width), dim + h * width
        np.dot(queries[h, begin:end].T, grad_filters[h], grad_maps[p, of_keys : of_keys + width])
        np.dot(grad_filters[h], maps[of_keys : of_keys + width].T, grad_queries[h])
        for g in range(parts[p], parts[p + 1]):
            own = grad_queries[h, ptr[g] - begin : ptr[g + 1] - begin]
            own += through[g - parts[p], h, of_keys : of_keys + width]
        np.dot(grad_queries[h].T, last[begin:end], grad_maps[p, of_head])
        copy(of_part[-1, of_head], sum_rows(grad_queries[h]))


@compiled
def softmax(queries: Floats, keys: Floats, shares: Floats) -> Floats:
    """Return the attention of ``queries [m, size]`` to ``keys [n, size]``, ``[m, n]``.

    Each row is still to be multiplied by its entry of ``shares``, one over its sum. Exponentials
    are of all rows at once, because one is short, and in code that runs on whole vectors.
    """
    rows, scale = np.dot(queries, keys.T), F(1 / np.sqrt(keys.shape[1]))
    for i in range(len(rows)):
        row, top = rows[i], rows[i, 0]
        for j in range(len(row)):
            top = max(top, row[j])
        for j in range(len(row)):
            row[j] = (row[j] - top) * scale
    values = rows.reshape(rows.size)  # all at most zero
    for i in range(len(values)):
        x = values[i]
        x = F(-87) if x < F(-87) else x  # NaN stays
        power = np.floor(x * F(1.4426950408889634) + F(0.5))
        z = x - power * F(0.6931471805599453)  # at most log(2) / 2 from zero
        e = ((F(1 / 720) * z + F(1 / 120)) * z + F(1 / 24)) * z + F(1 / 6)
        e = ((e * z + F(1 / 2)) * z + F(1)) * z + F(1)
        values[i] = e * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)
    for i in range(len(rows)):
        row, total = rows[i], F(0)
        for j in range(len(row)):
            total += row[j]
        shares[i] = F(1) / total
    return rows


@compiled
def attend(queries: Floats, keys: Floats, received: Floats) -> None:
    """Set the attention that each node receives, averaged over the ``n`` nodes of its graph."""
    n = len(keys)
    shares = np.empty(min(n, QUERIES), F)
    received[:] = 0
    for i in range(0, n, QUERIES):
        rows = softmax(queries[i : i + QUERIES], keys, shares)  # [m, n]
        received += np.dot(shares[: len(rows)], rows)
    received *= F(1 / n)


@compiled
def attend_backward(
    queries: Floats, keys: Floats, grad_received: Floats, grad_queries: Floats, grad_keys: Floats
) -> None:
    """Set the gradients of :func:`attend`.

    With attention ``A`` and a gradient ``r_j`` of what node j receives, that of a score is
    ``A_ij (r_j - m_i) / n``, where ``m = A r``.
    """
    n, size = keys.shape
    shares, scale = np.empty(min(n, QUERIES), F), F(1 / (n * np.sqrt(size)))
    grad_keys[:] = 0
    for i in range(0, n, QUERIES):
        rows = softmax(queries[i : i + QUERIES], keys, shares)  # [m, n]
        means = np.dot(rows, grad_received)  # [m]
        for k in range(len(rows)):
            row, mean, share = rows[k], means[k] * shares[k], shares[k] * scale
            for j in range(n):
                row[j] *= share * (grad_received[j] - mean)
        np.dot(rows, keys, grad_queries[i : i + QUERIES])
        grad_keys += np.dot(rows.T, queries[i : i + QUERIES])


@compiled
def read_nodes(batch: Batch, inputs: Any, saved: Any, results: Any) -> None:
    """Sum the layers of every node, and let the nodes of each graph attend to each other.

    The mean over nodes commutes with all that follows the softmax: a head sums the nodes by the
    attention they receive, and only this sum is projected to values.

    Args:
        inputs: The weights of layers, ``[G, heads, L]``; the map from a layer to a node,
            ``[dim, D]``, and what each layer adds to it, ``[L, dim]``; the projection of nodes to
            queries, keys and values, ``[3 * dim, dim]``, and its bias, ``[3 * dim]``.
        saved: For backward: sums of layers, ``[heads, N, D]``; nodes, ``[N, dim]``; queries, then
            keys, ``[2 * node_heads, N, size]``; the attention that nodes receive,
            ``[node_heads, N]``; the nodes of each graph summed by it, ``[G, node_heads, dim]``.
        results: Means of nodes, and of what they find in each other, ``[G, dim]`` each.
    """
    table, starts, ptr, parts, p = batch
    (weights, maps, offsets, projection, bias), (means, contexts) = inputs, results
    (sums, nodes, projected, received, summaries), dim = saved, len(maps)
    heads, node_heads, values = len(sums), len(received), projection[2 * dim :]
    width, size = dim // heads, dim // node_heads
    begin, end = ptr[parts[p]], ptr[parts[p + 1]]
    for g in range(parts[p], parts[p + 1]):
        weigh_layers(weights[g], table[starts[g] : starts[g] + ptr[g + 1] - ptr[g]], sums, ptr[g])
    for h in range(heads):
        embedded = np.dot(sums[h, begin:end], maps[h * width : (h + 1) * width].T)  # [nodes, width]
        for i in range(end - begin):
            copy(nodes[begin + i, h * width :], embedded[i])
    for g in range(parts[p], parts[p + 1]):
        own = nodes[ptr[g] : ptr[g + 1]]
        own += join_heads(np.dot(weights[g], offsets))
    for k in range(2 * node_heads):
        own, of_head = projected[k, begin:end], slice(k * size, (k + 1) * size)
        np.dot(nodes[begin:end], projection[of_head].T, own)
        own += bias[of_head]
    for g in range(parts[p], parts[p + 1]):
        a, b = ptr[g], ptr[g + 1]
        for h in range(node_heads):
            attend(projected[h, a:b], projected[node_heads + h, a:b], received[h, a:b])
        np.dot(np.ascontiguousarray(received[:, a:b]), nodes[a:b], summaries[g])
        copy(means[g], sum_rows(nodes[a:b]) * F(1 / (b - a)))
        copy(contexts[g], join_heads(np.dot(summaries[g], values.T)) + bias[2 * dim :])


@compiled
def read_nodes_backward(
    batch: Batch, inputs: Any, saved: Any, grad_results: Any, grads: Any
) -> None:
    """Set the gradients of :func:`read_nodes`, ``[parts, ...]`` of each input but the weights."""
    table, starts, ptr, parts, p = batch
    (weights, maps, offsets, projection, _), (grad_means, grad_contexts) = inputs, grad_results
    grad_weights, grad_maps, grad_offsets, grad_projection, grad_bias = grads
    (sums, nodes, projected, received, summaries), (dim, channels) = saved, maps.shape
    heads, node_heads, values = len(sums), len(received), projection[2 * dim :]
    width, size = dim // heads, dim // node_heads
    begin, end = ptr[parts[p]], ptr[parts[p + 1]]
    grad_sums = np.empty((heads, end - begin, channels), F)
    grad_projected = np.empty((2 * node_heads, end - begin, size), F)
    grad_nodes, grad_values = np.empty((end - begin, dim), F), grad_projection[p, 2 * dim :]
    grad_values[:] = 0
    for g in range(parts[p], parts[p + 1]):
        a, b, own = ptr[g], ptr[g + 1], slice(ptr[g] - begin, ptr[g + 1] - begin)
        grad_context = split_heads(grad_contexts[g], node_heads)  # [node_heads, dim]
        grad_values += np.dot(grad_context.T, summaries[g])
        grad_summary = np.dot(grad_context, values)  # [node_heads, dim]
        grad_received = np.dot(grad_summary, nodes[a:b].T)  # [node_heads, n]
        for h in range(node_heads):
            query, key = projected[h, a:b], projected[node_heads + h, a:b]
            grad_query, grad_key = grad_projected[h, own], grad_projected[node_heads + h, own]
            attend_backward(query, key, grad_received[h], grad_query, grad_key)
        of_graph = grad_nodes[own]
        np.dot(np.ascontiguousarray(received[:, a:b]).T, grad_summary, of_graph)
        of_graph += grad_means[g] * F(1 / (b - a))
    copy(grad_bias[p, 2 * dim :], sum_rows(grad_contexts[parts[p] : parts[p + 1]]))
    for k in range(2 * node_heads):
        of_head = slice(k * size, (k + 1) * size)
        np.dot(grad_projected[k].T, nodes[begin:end], grad_projection[p, of_head])
        copy(grad_bias[p, of_head], sum_rows(grad_projected[k]))
        grad_nodes += np.dot(grad_projected[k], projection[of_head])
    for h in range(heads):
        of_head = slice(h * width, (h + 1) * width)
        own_nodes = np.ascontiguousarray(grad_nodes[:, of_head])
        np.dot(own_nodes, maps[of_head], grad_sums[h])
        np.dot(own_nodes.T, sums[h, begin:end], grad_maps[p, of_head])
    grad_offsets[p] = 0
    for g in range(parts[p], parts[p + 1]):
        first, of_part = ptr[g] - begin, grad_offsets[p]
        rows = table[starts[g] : starts[g] + ptr[g + 1] - ptr[g]]  # [n, L or more, D]
        constant = split_heads(sum_rows(grad_nodes[first : first + len(rows)]), heads)
        of_part += np.dot(weights[g].T, constant)
        np.dot(constant, offsets.T, grad_weights[g])
        add_dots(grad_weights[g], grad_sums, first, rows)
