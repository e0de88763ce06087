"""What the HistoGraph head does with every node of a graph, compiled by numba.

A graph is small: its nodes fit a processor's cache, and the hundreds of PyTorch operations on it
cost more than what they compute. Four kernels do the same for all graphs of a batch, forward and
backward, where their history lies in a table of many graphs. :mod:`.accelerate` calls them; between
:func:`score_layers` and :func:`read_nodes` PyTorch turns the scores of layers into weights.

Shapes: the ``G`` graphs of a batch have ``N`` nodes, one of them ``n``; ``L`` layers of ``D``
channels; ``dim`` channels are ``heads`` layer heads of ``width`` each, or ``node_heads`` attention
heads of ``size`` each. Heads come first, so that each has matrices of its own.

Graphs are grouped into *parts* of consecutive graphs, because larger products are faster. Every
part has gradients of its own, which are summed in order: results do not depend on the thread that
runs a part. Kernels release Python's lock, and expect the BLAS to use one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
F = np.float32

#: Queries whose attention is made at a time, so that memory is linear in the nodes of a graph.
QUERIES = 128

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile a function when it is first called, and keep the code on disk.

    Sums may be made in any order and fused with products. NaN and infinity stay what they are.
    """
    fastmath = {"contract", "reassoc", "nsz"}
    make = numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fastmath)
    return cast(_Function, make(function))


class Batch(NamedTuple):
    """The graphs of a batch in a table of many graphs."""

    #: ``[rows, L or more, D]``, of which the last ``L`` layers are used.
    table: Floats
    #: First row of each graph in the table, ``[G]``.
    starts: Integers
    #: First node of each graph in the batch, and the number of nodes, ``[G + 1]``.
    ptr: Integers
    #: First graph of each part, and the number of graphs, ``[parts + 1]``.
    parts: Integers


class ScoreMaps(NamedTuple):
    """The maps of :func:`score_layers`, or their gradients in each part, ``[parts, ...]``."""

    #: From a layer to queries, then to keys, ``[2 * dim, D]``.
    layers: Floats
    #: What each layer adds to its queries and keys, ``[L, 2 * dim]``.
    offsets: Floats


class NodeMaps(NamedTuple):
    """The maps of :func:`read_nodes`, or their gradients in each part, ``[parts, ...]``."""

    #: From a layer to a node, ``[dim, D]``.
    layers: Floats
    #: What each layer adds to that, ``[L, dim]``.
    offsets: Floats
    #: From nodes to queries, keys and values, ``[3 * dim, dim]`` and ``[3 * dim]``.
    projection: Floats
    bias: Floats


class SavedNodes(NamedTuple):
    """What :func:`read_nodes` saves for backward."""

    #: Sums of layers, ``[heads, N, D]``.
    sums: Floats
    #: ``[N, dim]``.
    nodes: Floats
    #: Queries, then keys, ``[2 * node_heads, N, size]``.
    projected: Floats
    #: The attention that each node receives, averaged over its graph, ``[node_heads, N]``.
    received: Floats
    #: The nodes of each graph summed by that attention, ``[G, node_heads, dim]``.
    summaries: Floats


@compiled
def add(total: Floats, values: Floats) -> None:
    """Add a vector to another."""
    for c in range(len(total)):
        total[c] += values[c]


@compiled
def add_to_rows(rows: Floats, row: Floats) -> None:
    """Add a vector to every row of a matrix."""
    for i in range(len(rows)):
        add(rows[i], row)


@compiled
def sum_rows(rows: Floats) -> Floats:
    """Return the sum of the rows of a matrix."""
    total = np.zeros(rows.shape[1], F)
    for i in range(len(rows)):
        add(total, rows[i])
    return total


@compiled
def copy(target: Floats, values: Floats) -> None:
    """Copy a vector to the beginning of another."""
    for c in range(len(values)):
        target[c] = values[c]


@compiled
def columns(rows: Floats, first: int, stop: int) -> Floats:
    """Copy some columns of a matrix."""
    own = np.empty((len(rows), stop - first), F)
    for i in range(len(rows)):
        copy(own[i], rows[i, first:stop])
    return own


@compiled
def transpose_heads(maps: Floats, heads: int) -> Floats:
    """Copy the rows of each head, transposed: ``[heads * width, D]`` to ``[heads, D, width]``."""
    width, channels = len(maps) // heads, maps.shape[1]
    result = np.empty((heads, channels, width), F)
    for h in range(heads):
        for c in range(channels):
            for k in range(width):
                result[h, c, k] = maps[h * width + k, c]
    return result


@compiled
def split_heads(row: Floats, heads: int) -> Floats:
    """Return a row for each head, zero but for its part: ``[dim]`` to ``[heads, dim]``."""
    result, width = np.zeros((heads, len(row)), F), len(row) // heads
    for h in range(heads):
        copy(result[h, h * width :], row[h * width : (h + 1) * width])
    return result


@compiled
def join_heads(rows: Floats) -> Floats:
    """Return the part of each head in its row: ``[heads, dim]`` to ``[dim]``."""
    heads, dim = rows.shape
    result, width = np.empty(dim, F), dim // heads
    for h in range(heads):
        copy(result[h * width :], rows[h, h * width : (h + 1) * width])
    return result


@compiled
def add_dots(scores: Floats, filters: Floats, i: int, layers: Floats) -> None:
    """Add ``filters[:, i] @ layers.T`` to scores ``[heads, L]``; filters ``[heads, nodes, D]``."""
    (heads, _, channels), whole = filters.shape, len(filters) // 4 * 4
    for layer in range(len(layers)):
        row = layers[layer]
        for h in range(0, whole, 4):  # four heads at a time read a row once
            f0, f1, f2, f3 = filters[h, i], filters[h + 1, i], filters[h + 2, i], filters[h + 3, i]
            s0, s1, s2, s3 = F(0), F(0), F(0), F(0)
            for c in range(channels):
                s0 += f0[c] * row[c]
                s1 += f1[c] * row[c]
                s2 += f2[c] * row[c]
                s3 += f3[c] * row[c]
            scores[h, layer] += s0
            scores[h + 1, layer] += s1
            scores[h + 2, layer] += s2
            scores[h + 3, layer] += s3
        for h in range(whole, heads):
            f0, total = filters[h, i], F(0)
            for c in range(channels):
                total += f0[c] * row[c]
            scores[h, layer] += total


@compiled
def score_layers(
    batch: Batch,
    first: int,
    stop: int,
    maps: ScoreMaps,
    last: Floats,
    queries: Floats,
    scores: Floats,
    means: Floats,
) -> None:
    """Score the layers of every graph in parts ``first`` to ``stop``, and average each over nodes.

    The last layer of a node asks. A head's query, mapped by its keys, is a filter of layers, and a
    score is the mean over nodes of ``filter . layer + query . offset``, scaled.

    Args:
        last: Set to the last layer, saved for backward, ``[N, D]``.
        queries: Saved for backward, ``[heads, N, width]``.
        scores: The result, ``[G, heads, L]``.
        means: The mean of every layer over the nodes, ``[G, L, D]``.
    """
    (table, starts, ptr, parts), (heads, _, width) = batch, queries.shape
    dim, channels, skipped = heads * width, table.shape[2], table.shape[1] - scores.shape[2]
    query, key = transpose_heads(maps.layers[:dim], heads), maps.layers[dim:]
    query_bias, key_offsets = maps.offsets[-1, :dim], columns(maps.offsets, dim, 2 * dim)
    total = np.empty(dim, F)
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        filters = np.empty((heads, end - begin, channels), F)
        for g in range(parts[p], parts[p + 1]):
            for i in range(ptr[g + 1] - ptr[g]):
                copy(last[ptr[g] + i], table[starts[g] + i, -1])
        for h in range(heads):
            own, of_head = queries[h, begin:end], slice(h * width, (h + 1) * width)
            np.dot(last[begin:end], query[h], own)
            add_to_rows(own, query_bias[of_head])
            np.dot(own, key[of_head], filters[h])
        for g in range(parts[p], parts[p + 1]):
            n = ptr[g + 1] - ptr[g]
            for h in range(heads):
                copy(total[h * width :], sum_rows(queries[h, ptr[g] : ptr[g + 1]]))
            np.dot(split_heads(total, heads), key_offsets.T, scores[g])
            means[g] = 0
            for i in range(n):
                node = table[starts[g] + i, skipped:]  # [L, D]
                add_dots(scores[g], filters, ptr[g] - begin + i, node)
                add(means[g].reshape(node.size), node.reshape(node.size))
            scores[g] *= F(1 / (n * np.sqrt(width)))
            means[g] *= F(1 / n)


@compiled
def score_layers_backward(
    batch: Batch,
    first: int,
    stop: int,
    maps: ScoreMaps,
    last: Floats,
    queries: Floats,
    grad_scores: Floats,
    grads: ScoreMaps,
) -> None:
    """Set the gradients of the maps of :func:`score_layers` in parts ``first`` to ``stop``."""
    (table, starts, ptr, parts), (heads, _, width) = batch, queries.shape
    dim, channels, skipped = heads * width, table.shape[2], table.shape[1] - grad_scores.shape[2]
    key = transpose_heads(maps.layers[dim:], heads)  # [heads, D, width]
    key_offsets = columns(maps.offsets, dim, 2 * dim)  # [L, dim]
    product, total = np.empty((heads, channels), F), np.empty(dim, F)
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        grad_filters = np.empty((heads, end - begin, channels), F)
        grad_queries = np.empty((heads, end - begin, width), F)
        for g in range(parts[p], parts[p + 1]):
            n = ptr[g + 1] - ptr[g]
            grad_scores[g] *= F(1 / (n * np.sqrt(width)))
            for i in range(n):
                np.dot(grad_scores[g], table[starts[g] + i, skipped:], product)
                for h in range(heads):
                    copy(grad_filters[h, ptr[g] - begin + i], product[h])
        for h in range(heads):
            of_head = slice(h * width, (h + 1) * width)
            np.dot(grad_filters[h], key[h], grad_queries[h])
            np.dot(queries[h, begin:end].T, grad_filters[h], grads.layers[p, dim:][of_head])
        grads.offsets[p] = 0
        for g in range(parts[p], parts[p + 1]):
            through = join_heads(np.dot(grad_scores[g], key_offsets))  # [dim]
            for h in range(heads):
                own = grad_queries[h, ptr[g] - begin : ptr[g + 1] - begin]
                add_to_rows(own, through[h * width : (h + 1) * width])
                copy(total[h * width :], sum_rows(queries[h, ptr[g] : ptr[g + 1]]))
            offsets = np.dot(grad_scores[g].T, split_heads(total, heads))  # [L, dim]
            for layer in range(len(offsets)):
                add(grads.offsets[p, layer, dim:], offsets[layer])
        for h in range(heads):
            of_head = slice(h * width, (h + 1) * width)
            np.dot(grad_queries[h].T, last[begin:end], grads.layers[p, of_head])
            copy(grads.offsets[p, -1, of_head], sum_rows(grad_queries[h]))


@compiled
def exponentials(values: Floats) -> None:
    """Replace values of at most zero by ``e ** value``, in code that runs on whole vectors."""
    for i in range(len(values)):
        x = values[i]
        x = F(-87) if x < F(-87) else x  # NaN stays
        power = np.floor(x * F(1.4426950408889634) + F(0.5))
        z = x - power * F(0.6931471805599453)  # at most log(2) / 2 from zero
        e = F(1 / 720)
        e = e * z + F(1 / 120)
        e = e * z + F(1 / 24)
        e = e * z + F(1 / 6)
        e = e * z + F(1 / 2)
        e = e * z + F(1)
        e = e * z + F(1)
        values[i] = e * np.int32((np.int32(power) + np.int32(127)) << np.int32(23)).view(np.float32)


@compiled
def softmax(queries: Floats, keys: Floats, shares: Floats) -> Floats:
    """Return the attention of ``queries [m, size]`` to ``keys [n, size]``, ``[m, n]``.

    Each row is still to be multiplied by its entry of ``shares``, one over its sum.
    """
    rows, scale = np.dot(queries, keys.T), F(1 / np.sqrt(keys.shape[1]))
    for i in range(len(rows)):
        row, top = rows[i], rows[i, 0]
        for j in range(len(row)):
            top = max(top, row[j])
        for j in range(len(row)):
            row[j] = (row[j] - top) * scale
    exponentials(rows.reshape(rows.size))  # of all rows, because one is short
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
        add(received, np.dot(shares[: len(rows)], rows))
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
        through = np.dot(rows.T, queries[i : i + QUERIES])  # [n, size]
        add(grad_keys.reshape(keys.size), through.reshape(keys.size))


@compiled
def read_nodes(
    batch: Batch,
    first: int,
    stop: int,
    weights: Floats,
    maps: NodeMaps,
    saved: SavedNodes,
    means: Floats,
    contexts: Floats,
) -> None:
    """Sum the layers of every node, and let the nodes of each graph attend to each other.

    The mean over nodes commutes with all that follows the softmax: a head sums the nodes by the
    attention they receive, and only this sum is projected to values.

    Args:
        weights: Of the layers, ``[G, heads, L]``.
        means: A result, the mean of the nodes, ``[G, dim]``.
        contexts: A result, the mean of what the nodes find, ``[G, dim]``.
    """
    (table, starts, ptr, parts), (sums, nodes, projected, received, summaries) = batch, saved
    (heads, _, channels), node_heads, dim = sums.shape, len(received), nodes.shape[1]
    skipped, width, size = table.shape[1] - weights.shape[2], dim // heads, dim // node_heads
    embedding = transpose_heads(maps.layers, heads)  # [heads, D, width]
    projection = transpose_heads(maps.projection[: 2 * dim], 2 * node_heads)
    values, product = maps.projection[2 * dim :], np.empty((heads, channels), F)
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        for g in range(parts[p], parts[p + 1]):
            for i in range(ptr[g + 1] - ptr[g]):
                np.dot(weights[g], table[starts[g] + i, skipped:], product)
                for h in range(heads):
                    copy(sums[h, ptr[g] + i], product[h])
        for h in range(heads):
            embedded = np.dot(sums[h, begin:end], embedding[h])  # [nodes of the part, width]
            for i in range(end - begin):
                copy(nodes[begin + i, h * width :], embedded[i])
        for g in range(parts[p], parts[p + 1]):
            constant = join_heads(np.dot(weights[g], maps.offsets))  # [dim]
            add_to_rows(nodes[ptr[g] : ptr[g + 1]], constant)
        for k in range(2 * node_heads):
            np.dot(nodes[begin:end], projection[k], projected[k, begin:end])
            add_to_rows(projected[k, begin:end], maps.bias[k * size : (k + 1) * size])
        for g in range(parts[p], parts[p + 1]):
            a, b = ptr[g], ptr[g + 1]
            for h in range(node_heads):
                attend(projected[h, a:b], projected[node_heads + h, a:b], received[h, a:b])
            np.dot(columns(received, a, b), nodes[a:b], summaries[g])
            copy(means[g], sum_rows(nodes[a:b]) * F(1 / (b - a)))
            copy(contexts[g], maps.bias[2 * dim :])
            add(contexts[g], join_heads(np.dot(summaries[g], values.T)))


@compiled
def read_nodes_backward(
    batch: Batch,
    first: int,
    stop: int,
    weights: Floats,
    maps: NodeMaps,
    saved: SavedNodes,
    grad_means: Floats,
    grad_contexts: Floats,
    grad_weights: Floats,
    grads: NodeMaps,
) -> None:
    """Set the gradients of :func:`read_nodes` in parts ``first`` to ``stop``."""
    (table, starts, ptr, parts), (sums, nodes, projected, received, summaries) = batch, saved
    (heads, _, channels), node_heads, dim = sums.shape, len(received), nodes.shape[1]
    skipped, width, size = table.shape[1] - weights.shape[2], dim // heads, dim // node_heads
    values = maps.projection[2 * dim :]
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        grad_projected = np.empty((2 * node_heads, end - begin, size), F)
        grad_nodes = np.empty((end - begin, dim), F)
        grads.projection[p, 2 * dim :] = 0
        for g in range(parts[p], parts[p + 1]):
            a, b, own = ptr[g], ptr[g + 1], slice(ptr[g] - begin, ptr[g + 1] - begin)
            grad_context = split_heads(grad_contexts[g], node_heads)  # [node_heads, dim]
            grad_values = np.dot(grad_context.T, summaries[g])  # [dim, dim]
            add(grads.projection[p, 2 * dim :].reshape(dim * dim), grad_values.reshape(dim * dim))
            grad_summaries = np.dot(grad_context, values)  # [node_heads, dim]
            grad_received = np.dot(grad_summaries, nodes[a:b].T)  # [node_heads, n]
            for h in range(node_heads):
                attend_backward(
                    projected[h, a:b],
                    projected[node_heads + h, a:b],
                    grad_received[h],
                    grad_projected[h, own],
                    grad_projected[node_heads + h, own],
                )
            np.dot(columns(received, a, b).T, grad_summaries, grad_nodes[own])
            add_to_rows(grad_nodes[own], grad_means[g] * F(1 / (b - a)))
        copy(grads.bias[p, 2 * dim :], sum_rows(grad_contexts[parts[p] : parts[p + 1]]))
        for k in range(2 * node_heads):
            of_head = slice(k * size, (k + 1) * size)
            np.dot(grad_projected[k].T, nodes[begin:end], grads.projection[p, of_head])
            copy(grads.bias[p, of_head], sum_rows(grad_projected[k]))
            through = np.dot(grad_projected[k], maps.projection[of_head])
            add(grad_nodes.reshape(grad_nodes.size), through.reshape(grad_nodes.size))
        grad_sums = np.empty((heads, end - begin, channels), F)
        for h in range(heads):
            of_head = slice(h * width, (h + 1) * width)
            own_nodes = columns(grad_nodes, h * width, (h + 1) * width)
            np.dot(own_nodes, maps.layers[of_head], grad_sums[h])
            np.dot(own_nodes.T, sums[h, begin:end], grads.layers[p, of_head])
        grads.offsets[p] = 0
        for g in range(parts[p], parts[p + 1]):
            total = sum_rows(grad_nodes[ptr[g] - begin : ptr[g + 1] - begin])  # [dim]
            constant = split_heads(total, heads)  # [heads, dim]
            np.dot(constant, maps.offsets.T, grad_weights[g])
            offsets = np.dot(weights[g].T, constant)  # [L, dim]
            add(grads.offsets[p].reshape(offsets.size), offsets.reshape(offsets.size))
            for i in range(ptr[g + 1] - ptr[g]):
                node = table[starts[g] + i, skipped:]  # [L, D]
                add_dots(grad_weights[g], grad_sums, ptr[g] - begin + i, node)
