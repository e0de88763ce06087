"""How much attention the nodes of one graph receive, and what that makes of them.

With softmax attention ``A`` of the nodes to each other, a mean readout needs for every head only
the mean over queries, ``r_j = mean_i A_ij``, and the sum ``sum_j r_j x_j``. A few rows of ``A`` are
made at a time, and once more for the gradient: memory is linear in the nodes.

Rows of ``A`` are a little longer than there are keys, so that a processor's vectors fill them; what
is past the last key is zero.
"""

from __future__ import annotations

import numpy as np

from .exponential import exponential
from .loops import ONE, ZERO, Floats, loop
from .products import add_product, add_row_products

#: Values of the longest vector of a processor.
VECTOR = 16

#: Rows of attention that are made at a time.
BLOCK = 32


@loop
def attend(nodes: Floats, query_key: Floats, scale: np.float32, summaries: Floats) -> None:
    """Sum the nodes of a graph by the attention they receive.

    Args:
        nodes: ``[n, dim]``, at least one.
        query_key: Queries and keys of all heads, side by side, ``[n, 2 * dim]``.
        scale: Multiplied with all products of queries and keys.
        summaries: Filled in, ``[heads, dim]``.
    """
    (count, dim), heads = nodes.shape, len(summaries)
    width, length = dim // heads, vectors_of(count)
    keys = np.empty((width, length), np.float32)
    rows = np.empty((BLOCK, length), np.float32)
    received = np.zeros((heads, length), np.float32)
    for head in range(heads):
        take_keys(query_key, head, scale, keys)
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            block = rows[: stop - first]
            queries = query_key[first:stop, head * width : (head + 1) * width]
            attention_rows(queries, keys, count, block)
            for row in range(len(block)):
                given, got = block[row], received[head]
                for key in range(length):
                    got[key] += given[key]
    summaries[:] = ZERO
    add_product(received[:, :count], nodes, summaries)
    summaries /= np.float32(count)


@loop
def attend_back(
    nodes: Floats,
    query_key: Floats,
    scale: np.float32,
    grad_summaries: Floats,
    grad_nodes: Floats,
    grad_query_key: Floats,
) -> None:
    """Give the gradients of :func:`attend`.

    Args:
        nodes: ``[n, dim]``, at least one.
        query_key: Queries and keys of all heads, side by side, ``[n, 2 * dim]``.
        scale: Multiplied with all products of queries and keys.
        grad_summaries: ``[heads, dim]``.
        grad_nodes: Added to, ``[n, dim]``.
        grad_query_key: Filled in, ``[n, 2 * dim]``.
    """
    (count, dim), heads = nodes.shape, len(grad_summaries)
    width, length = dim // heads, vectors_of(count)
    keys = np.empty((width, length), np.float32)
    grad_keys = np.empty((width, length), np.float32)
    rows = np.empty((BLOCK, length), np.float32)
    received = np.zeros((heads, length), np.float32)
    grad_received = np.zeros((heads, length), np.float32)
    grad_shared = grad_summaries / np.float32(count)  # of every query, [heads, dim]
    add_row_products(grad_shared, nodes, grad_received)
    grad_query_key[:] = ZERO
    for head in range(heads):
        take_keys(query_key, head, scale, keys)
        grad_keys[:] = ZERO
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            block = rows[: stop - first]
            queries = query_key[first:stop, head * width : (head + 1) * width]
            attention_rows(queries, keys, count, block)
            for row in range(len(block)):
                softmax_back(block[row], received[head], grad_received[head])
            grad_queries = grad_query_key[first:stop, head * width : (head + 1) * width]
            add_row_products(block, keys, grad_queries)
            add_product(queries.T, block, grad_keys)
        for channel in range(width):
            for key in range(count):
                grad_query_key[key, dim + head * width + channel] = grad_keys[channel, key] * scale
    add_product(received[:, :count].T, grad_shared, grad_nodes)


@loop
def vectors_of(count: int) -> int:
    """Return the values of as many vectors as hold ``count``."""
    return (count + VECTOR - 1) // VECTOR * VECTOR


@loop
def take_keys(query_key: Floats, head: int, scale: np.float32, keys: Floats) -> None:
    """Write the keys of a head, scaled, a row per channel: ``[d, length]``."""
    dim, width = query_key.shape[1] // 2, len(keys)
    for channel in range(width):
        row = keys[channel]
        for node in range(len(query_key)):
            row[node] = query_key[node, dim + head * width + channel] * scale
        row[len(query_key) :] = ZERO


@loop
def attention_rows(queries: Floats, keys: Floats, count: int, rows: Floats) -> None:
    """Write the attention that nodes give.

    Args:
        queries: ``[m, d]``.
        keys: Scaled, ``[d, length]``.
        count: How many keys there are.
        rows: Filled in, ``[m, length]``.
    """
    rows[:] = ZERO
    add_product(queries, keys, rows)
    for index in range(len(rows)):
        row = rows[index]
        largest, total = row[0], ZERO
        for key in range(count):
            largest = max(largest, row[key])
        for key in range(len(row)):
            row[key] = exponential(row[key] - largest)
        row[count:] = ZERO
        for key in range(len(row)):
            total += row[key]
        inverse = ONE / total
        for key in range(len(row)):
            row[key] *= inverse


@loop
def softmax_back(row: Floats, received: Floats, grad: Floats) -> None:
    """Turn the attention a node gives into the gradient of its scores, all ``[length]``.

    Args:
        row: Attention, and then the gradient.
        received: The attention is added to it.
        grad: Of the attention.
    """
    mean = ZERO
    for key in range(len(row)):
        mean += row[key] * grad[key]
    for key in range(len(row)):
        received[key] += row[key]
        row[key] *= grad[key] - mean
