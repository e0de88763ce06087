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
def rows_of(batch: Batch, g: int) -> Floats:
    """Return the rows of a graph, ``[n, L or more, D]``."""
    return batch.table[batch.starts[g] : batch.starts[g] + batch.ptr[g + 1] - batch.ptr[g]]


@compiled
def weigh_layers(weights: Floats, rows: Floats, sums: Floats, first: int) -> None:
    """Sum layers of ``rows [n, L or more, D]`` by ``weights [heads, L]``.

    Results go to ``sums [heads, nodes, D]``, from node ``first`` on. Four heads are taken at once,
    so that a layer is read once for all of them; of other heads, several layers are.
    """
    (heads, layers), (n, stored, channels) = weights.shape, rows.shape
    fours, pairs, blocks = heads - heads % 4, layers - layers % 2, layers - layers % LAYERS
    sums[:, first : first + n] = 0
    for i in range(n):
        own, m = rows[i, stored - layers :], first + i  # [L, D]
        for h in range(0, fours, 4):
            t0, t1, t2, t3 = sums[h, m], sums[h + 1, m], sums[h + 2, m], sums[h + 3, m]
            w0, w1, w2, w3 = weights[h], weights[h + 1], weights[h + 2], weights[h + 3]
            for k in range(0, pairs, 2):
                a0, a1, a2, a3 = w0[k], w1[k], w2[k], w3[k]
                b0, b1, b2, b3 = w0[k + 1], w1[k + 1], w2[k + 1], w3[k + 1]
                x, y = own[k], own[k + 1]
                for j in range(channels):
                    u, v = x[j], y[j]
                    t0[j] += a0 * u + b0 * v
                    t1[j] += a1 * u + b1 * v
                    t2[j] += a2 * u + b2 * v
                    t3[j] += a3 * u + b3 * v
        for h in range(fours, heads):
            for k in range(0, blocks, LAYERS):
                total, shares, block = sums[h, m], weights[h, k:], own[k:]
                for j in range(channels):
                    value = total[j]
                    for e in range(LAYERS):
                        value += shares[e] * block[e, j]
                    total[j] = value
        for h in range(heads):
            for k in range(pairs if h < fours else blocks, layers):
                total, share = sums[h, m], weights[h, k]
                for j in range(channels):
                    total[j] += share * own[k, j]


@compiled
def add_dots(scores: Floats, filters: Floats, first: int, rows: Floats) -> None:
    """Add the dot products of filters and layers, summed over nodes, to ``scores [heads, L]``.

    Filters are ``[heads, nodes, D]``, from node ``first`` on; rows ``[n, L or more, D]``.
    """
    (heads, layers), (n, stored, channels) = scores.shape, rows.shape
    fours = heads - heads % 4
    for i in range(n):
        own, m = rows[i, stored - layers :], first + i  # [L, D]
        for h in range(0, fours, 4):
            a, b, c, d = filters[h, m], filters[h + 1, m], filters[h + 2, m], filters[h + 3, m]
            for k in range(layers):
                layer, s0, s1, s2, s3 = own[k], F(0), F(0), F(0), F(0)
                for j in range(channels):
                    s0 += a[j] * layer[j]
                    s1 += b[j] * layer[j]
                    s2 += c[j] * layer[j]
                    s3 += d[j] * layer[j]
                scores[h, k] += s0
                scores[h + 1, k] += s1
                scores[h + 2, k] += s2
                scores[h + 3, k] += s3
        for h in range(fours, heads):
            for k in range(layers):
                asked, layer, total = filters[h, m], own[k], F(0)
                for j in range(channels):
                    total += asked[j] * layer[j]
                scores[h, k] += total


@compiled
def score_layers(batch: Batch, inputs: Any, saved: Any, results: Any) -> None:
    """Sum over the nodes of every graph what scores its layers.

    The last layer of a node asks. A head's query, mapped by its keys, is a filter of layers. What
    the offsets of the keys add to a score needs no more than the sum of the queries.

    Args:
        inputs: The map from a layer to queries, then to keys, ``[2 * dim, D]``, and the offset of
            the queries, ``[dim]``.
        saved: For backward: the last layer, ``[N, D]``, and queries, ``[heads, N, width]``.
        results: Sums of ``filter . layer``, ``[G, heads, L]``, and queries, ``[G, heads, width]``.
    """
    (table, starts, ptr, parts, p), (maps, bias) = batch, inputs
    (last, queries), (products, totals) = saved, results
    (heads, _, width), channels, dim = queries.shape, table.shape[2], len(bias)
    graphs, begin, end = range(parts[p], parts[p + 1]), ptr[parts[p]], ptr[parts[p + 1]]
    filters = np.empty((heads, end - begin, channels), F)
    for g in graphs:
        for i in range(ptr[g + 1] - ptr[g]):
            copy(last[ptr[g] + i], table[starts[g] + i, -1])
    for h in range(heads):
        own, of_head = queries[h, begin:end], slice(h * width, (h + 1) * width)
        np.dot(last[begin:end], maps[of_head].T, own)
        own += bias[of_head]
        np.dot(own, maps[dim:][of_head], filters[h])
    for g in graphs:
        products[g] = 0
        add_dots(products[g], filters, ptr[g] - begin, rows_of(batch, g))
        for h in range(heads):
            copy(totals[g, h], sum_rows(queries[h, ptr[g] : ptr[g + 1]]))


@compiled
def score_layers_backward(
    batch: Batch, inputs: Any, saved: Any, grad_results: Any, grads: Any
) -> None:
    """Set the gradients of :func:`score_layers`, ``[parts, ...]`` of each input."""
    (table, _, ptr, parts, p), (maps, bias), (last, queries) = batch, inputs, saved
    (grad_products, grad_totals), (grad_maps, grad_bias) = grad_results, grads
    (heads, _, width), channels, dim = queries.shape, table.shape[2], len(bias)
    graphs, begin, end = range(parts[p], parts[p + 1]), ptr[parts[p]], ptr[parts[p + 1]]
    grad_filters = np.empty((heads, end - begin, channels), F)
    grad_queries = np.empty((end - begin, width), F)  # of a head
    for g in graphs:
        weigh_layers(grad_products[g], rows_of(batch, g), grad_filters, ptr[g] - begin)
    for h in range(heads):
        of_head = slice(h * width, (h + 1) * width)
        np.dot(queries[h, begin:end].T, grad_filters[h], grad_maps[p, dim:][of_head])
        np.dot(grad_filters[h], maps[dim:][of_head].T, grad_queries)
        for g in graphs:
            grad_queries[ptr[g] - begin : ptr[g + 1] - begin] += grad_totals[g, h]
        np.dot(grad_queries.T, last[begin:end], grad_maps[p, of_head])
        copy(grad_bias[p, of_head], sum_rows(grad_queries))


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
    attention they receive, and only this sum is projected to values, by the caller.

    Args:
        inputs: The weights of layers, ``[G, heads, L]``, and what is added to the nodes of each
            graph, ``[G, dim]``; the map from a layer to a node, ``[dim, D]``; the projection of
            nodes to queries, then to keys, ``[2 * dim, dim]``, and its bias, ``[2 * dim]``.
        saved: For backward: sums of layers, ``[heads, N, D]``; nodes, ``[N, dim]``; queries, then
            keys, ``[2 * node_heads, N, size]``; the attention received, ``[node_heads, N]``.
        results: Means of nodes, ``[G, dim]``, and nodes summed by the attention they receive,
            ``[G, node_heads, dim]``.
    """
    _, _, ptr, parts, p = batch
    (weights, constants, maps, projection, bias), (means, summaries) = inputs, results
    (sums, nodes, projected, received), dim = saved, len(maps)
    (heads, node_heads), graphs = (len(sums), len(received)), range(parts[p], parts[p + 1])
    width, size, begin, end = dim // heads, dim // node_heads, ptr[parts[p]], ptr[parts[p + 1]]
    for g in graphs:
        weigh_layers(weights[g], rows_of(batch, g), sums, ptr[g])
    for h in range(heads):
        embedded = np.dot(sums[h, begin:end], maps[h * width : (h + 1) * width].T)  # [.., width]
        for i in range(end - begin):
            copy(nodes[begin + i, h * width :], embedded[i])
    for g in graphs:
        nodes[ptr[g] : ptr[g + 1]] += constants[g]
    for k in range(2 * node_heads):
        own, of_head = projected[k, begin:end], slice(k * size, (k + 1) * size)
        np.dot(nodes[begin:end], projection[of_head].T, own)
        own += bias[of_head]
    for g in graphs:
        a, b = ptr[g], ptr[g + 1]
        for h in range(node_heads):
            attend(projected[h, a:b], projected[node_heads + h, a:b], received[h, a:b])
        np.dot(np.ascontiguousarray(received[:, a:b]), nodes[a:b], summaries[g])
        copy(means[g], sum_rows(nodes[a:b]) * F(1 / max(1, b - a)))


@compiled
def read_nodes_backward(
    batch: Batch, inputs: Any, saved: Any, grad_results: Any, grads: Any
) -> None:
    """Set the gradients of :func:`read_nodes`; those of maps and projection ``[parts, ...]``."""
    table, _, ptr, parts, p = batch
    (_, _, maps, projection, _), (grad_means, grad_summaries) = inputs, grad_results
    grad_weights, grad_constants, grad_maps, grad_projection, grad_bias = grads
    (sums, nodes, projected, received), dim, channels = saved, len(maps), table.shape[2]
    (heads, node_heads), graphs = (len(sums), len(received)), range(parts[p], parts[p + 1])
    width, size, begin, end = dim // heads, dim // node_heads, ptr[parts[p]], ptr[parts[p + 1]]
    grad_sums = np.empty((heads, end - begin, channels), F)
    grad_projected = np.empty((2 * node_heads, end - begin, size), F)
    grad_nodes = np.empty((end - begin, dim), F)
    for g in graphs:
        a, b, own = ptr[g], ptr[g + 1], slice(ptr[g] - begin, ptr[g + 1] - begin)
        grad_received = np.dot(grad_summaries[g], nodes[a:b].T)  # [node_heads, n]
        for h in range(node_heads):
            query, key = projected[h, a:b], projected[node_heads + h, a:b]
            grad_query, grad_key = grad_projected[h, own], grad_projected[node_heads + h, own]
            attend_backward(query, key, grad_received[h], grad_query, grad_key)
        np.dot(np.ascontiguousarray(received[:, a:b]).T, grad_summaries[g], grad_nodes[own])
        grad_nodes[own] += grad_means[g] * F(1 / max(1, b - a))
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
    for g in graphs:
        copy(grad_constants[g], sum_rows(grad_nodes[ptr[g] - begin : ptr[g + 1] - begin]))
        grad_weights[g] = 0
        add_dots(grad_weights[g], grad_sums, ptr[g] - begin, rows_of(batch, g))
