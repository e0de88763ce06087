"""What the HistoGraph head does with every node of a graph, compiled by numba.

Four kernels, two forward and two backward, go through the graphs of a batch where their history
lies in a table of many graphs; a graph fits a processor's cache. :mod:`.accelerate` calls them, and
between :func:`score_layers` and :func:`read_nodes` PyTorch turns scores of layers into weights.

Shapes: the ``G`` graphs of a batch have ``N`` nodes, one of them ``n``; ``L`` layers of ``D``
channels; ``dim`` channels are ``heads`` layer heads of ``width`` each, or ``node_heads`` attention
heads of ``size`` each. Heads come first, so that each has matrices of its own.

Graphs are grouped into *parts* of consecutive graphs, because larger products are faster. A kernel
runs parts ``first`` to ``stop``. Gradients of maps are kept by part, ``[parts, ...]``, and summed
in order by the caller: results do not depend on the thread that runs a part. Kernels release
Python's lock, and expect the BLAS to use one thread.
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
    """The maps of :func:`score_layers`, or their gradients."""

    #: From the last layer to queries, ``[heads, D, width]`` and ``[heads, width]``.
    query: Floats
    bias: Floats
    #: From queries to filters of layers, ``[heads, width, D]``.
    key: Floats


class NodeMaps(NamedTuple):
    """The maps of :func:`read_nodes`, or their gradients."""

    #: From a sum of layers to a node, ``[heads, D, width]``.
    embedding: Floats
    #: From nodes to queries, then to keys, ``[2 * node_heads, dim, size]``.
    projection: Floats
    #: ``[2 * node_heads, size]``.
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
    batch: Batch, first: int, stop: int, maps: ScoreMaps, last: Floats, queries: Floats,
    scores: Floats, means: Floats
) -> None:  # fmt: skip
    """Score the layers of every graph, and average each layer over the nodes.

    The last layer of a node asks: its query, mapped by the keys, is a filter of layers. The score
    of a layer is the mean over nodes of ``filter . layer``.

    Args:
        last: The last layer, saved for backward, ``[N, D]``.
        queries: Saved for backward, ``[heads, N, width]``.
        scores: A result, ``[G, heads, L]``.
        means: A result, ``[G, L, D]``.
    """
    (table, starts, ptr, parts), heads = batch, len(queries)
    channels, skipped = table.shape[2], table.shape[1] - scores.shape[2]
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        filters = np.empty((heads, end - begin, channels), F)
        for g in range(parts[p], parts[p + 1]):
            last[ptr[g] : ptr[g + 1]] = table[starts[g] : starts[g] + ptr[g + 1] - ptr[g], -1]
        for h in range(heads):
            own = queries[h, begin:end]
            np.dot(last[begin:end], maps.query[h], own)
            own += maps.bias[h]
            np.dot(own, maps.key[h], filters[h])
        for g in range(parts[p], parts[p + 1]):
            scores[g], means[g] = 0, 0
            for i in range(ptr[g], ptr[g + 1]):
                node = table[starts[g] + i - ptr[g], skipped:]  # [L, D]
                add_dots(scores[g], filters, i - begin, node)
                means[g] += node
            scores[g] *= F(1 / (ptr[g + 1] - ptr[g]))
            means[g] *= F(1 / (ptr[g + 1] - ptr[g]))


@compiled
def score_layers_backward(
    batch: Batch, first: int, stop: int, maps: ScoreMaps, last: Floats, queries: Floats,
    grad_scores: Floats, grads: ScoreMaps
) -> None:  # fmt: skip
    """Set the gradients of the maps of :func:`score_layers`."""
    (table, starts, ptr, parts), heads = batch, len(queries)
    channels, skipped = table.shape[2], table.shape[1] - grad_scores.shape[2]
    product = np.empty((heads, channels), F)
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        grad_filters = np.empty((heads, end - begin, channels), F)
        for g in range(parts[p], parts[p + 1]):
            grad = grad_scores[g] * F(1 / (ptr[g + 1] - ptr[g]))  # [heads, L]
            for i in range(ptr[g], ptr[g + 1]):
                np.dot(grad, table[starts[g] + i - ptr[g], skipped:], product)
                for h in range(heads):
                    grad_filters[h, i - begin] = product[h]
        for h in range(heads):
            grad_queries = np.dot(grad_filters[h], maps.key[h].T)  # [nodes of the part, width]
            np.dot(queries[h, begin:end].T, grad_filters[h], grads.key[p, h])
            np.dot(last[begin:end].T, grad_queries, grads.query[p, h])
            grads.bias[p, h] = grad_queries.sum(axis=0)


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
        through = np.dot(rows.T, queries[i : i + QUERIES])  # [n, size]
        grad_keys += through


@compiled
def read_nodes(
    batch: Batch, first: int, stop: int, weights: Floats, constant: Floats, maps: NodeMaps,
    saved: SavedNodes, means: Floats, summaries: Floats
) -> None:  # fmt: skip
    """Sum the layers of every node, and let the nodes of each graph attend to each other.

    The mean over nodes commutes with all that follows the softmax: a head sums the nodes by the
    attention they receive, and only this sum has to be projected to values.

    Args:
        weights: Of the layers of each graph, ``[G, heads, L]``.
        constant: What is added to the nodes of each graph, ``[G, dim]``.
        means: A result, the mean of the nodes, ``[G, dim]``.
        summaries: A result, the nodes summed by the attention, ``[G, node_heads, dim]``.
    """
    (table, starts, ptr, parts), (sums, nodes, projected, received) = batch, saved
    (heads, channels, width), node_heads = maps.embedding.shape, len(received)
    skipped, product = table.shape[1] - weights.shape[2], np.empty((heads, channels), F)
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        for g in range(parts[p], parts[p + 1]):
            for i in range(ptr[g], ptr[g + 1]):
                np.dot(weights[g], table[starts[g] + i - ptr[g], skipped:], product)
                for h in range(heads):
                    sums[h, i] = product[h]
        for h in range(heads):
            embedded = np.dot(sums[h, begin:end], maps.embedding[h])  # [nodes of the part, width]
            nodes[begin:end, h * width : (h + 1) * width] = embedded
        for g in range(parts[p], parts[p + 1]):
            nodes[ptr[g] : ptr[g + 1]] += constant[g]
        for k in range(2 * node_heads):
            np.dot(nodes[begin:end], maps.projection[k], projected[k, begin:end])
            projected[k, begin:end] += maps.bias[k]
        for g in range(parts[p], parts[p + 1]):
            a, b = ptr[g], ptr[g + 1]
            for h in range(node_heads):
                attend(projected[h, a:b], projected[node_heads + h, a:b], received[h, a:b])
            np.dot(np.ascontiguousarray(received[:, a:b]), nodes[a:b], summaries[g])
            means[g] = nodes[a:b].sum(axis=0) * F(1 / (b - a))


@compiled
def read_nodes_backward(
    batch: Batch, first: int, stop: int, weights: Floats, maps: NodeMaps, saved: SavedNodes,
    grad_means: Floats, grad_summaries: Floats, grad_weights: Floats, grad_constant: Floats,
    grads: NodeMaps
) -> None:  # fmt: skip
    """Set the gradients of the inputs of :func:`read_nodes`."""
    (table, starts, ptr, parts), (sums, nodes, projected, received) = batch, saved
    (heads, channels, width), node_heads = maps.embedding.shape, len(received)
    skipped, (dim, size) = table.shape[1] - weights.shape[2], maps.projection.shape[1:]
    for p in range(first, stop):
        begin, end = ptr[parts[p]], ptr[parts[p + 1]]
        grad_projected = np.empty((2 * node_heads, end - begin, size), F)
        grad_nodes = np.empty((end - begin, dim), F)
        for g in range(parts[p], parts[p + 1]):
            a, b, own = ptr[g], ptr[g + 1], slice(ptr[g] - begin, ptr[g + 1] - begin)
            grad_received = np.dot(grad_summaries[g], nodes[a:b].T)  # [node_heads, n]
            for h in range(node_heads):
                attend_backward(
                    projected[h, a:b], projected[node_heads + h, a:b], grad_received[h],
                    grad_projected[h, own], grad_projected[node_heads + h, own]
                )  # fmt: skip
            np.dot(np.ascontiguousarray(received[:, a:b].T), grad_summaries[g], grad_nodes[own])
            grad_nodes[own] += grad_means[g] * F(1 / (b - a))
        for k in range(2 * node_heads):
            np.dot(nodes[begin:end].T, grad_projected[k], grads.projection[p, k])
            grads.bias[p, k] = grad_projected[k].sum(axis=0)
            grad_nodes += np.dot(grad_projected[k], maps.projection[k].T)
        grad_sums = np.empty((heads, end - begin, channels), F)
        for h in range(heads):
            own_nodes = np.ascontiguousarray(grad_nodes[:, h * width : (h + 1) * width])
            np.dot(own_nodes, maps.embedding[h].T, grad_sums[h])
            np.dot(sums[h, begin:end].T, own_nodes, grads.embedding[p, h])
        for g in range(parts[p], parts[p + 1]):
            grad_constant[g] = grad_nodes[ptr[g] - begin : ptr[g + 1] - begin].sum(axis=0)
            grad_weights[g] = 0
            for i in range(ptr[g], ptr[g + 1]):
                add_dots(
                    grad_weights[g], grad_sums, i - begin, table[starts[g] + i - ptr[g], skipped:]
                )
