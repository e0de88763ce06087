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
from .products import add_product, add_row_products, dot
from .row_loops import clear, clear_row, copy_row, scale

#: Values of the longest vector of a processor.
VECTOR = 16

#: Rows of attention that are made at a time.
BLOCK = 32


@loop
def attend(nodes: Floats, query_key: Floats, factor: np.float32, summaries: Floats) -> None:
    """Sum the nodes of a graph by the attention they receive.

    Args:
        nodes: ``[n, dim]``, at least one.
        query_key: Queries and keys of all heads, side by side, ``[n, 2 * dim]``.
        factor: Multiplied with all products of queries and keys.
        summaries: Filled in, ``[heads, dim]``.
    """
    (count, dim), heads = nodes.shape, len(summaries)
    width, length = dim // heads, vectors_of(count)
    keys = np.empty((width, length), np.float32)
    rows = np.empty((BLOCK, length), np.float32)
    received = np.zeros((heads, length), np.float32)
    for head in range(heads):
        take_keys(query_key, head, factor, keys)
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            block = rows[: stop - first]
            queries = query_key[first:stop, head * width : (head + 1) * width]
            attention_rows(queries, keys, count, block)
            for row in range(len(block)):
                given, got = block[row], received[head]
                for key in range(length):
                    got[key] += given[key]
    clear(summaries)
    add_product(received[:, :count], nodes, 0, summaries, 0, dim)
    scale(summaries, ONE / np.float32(count))


@loop
def attend_back(
    nodes: Floats,
    query_key: Floats,
    factor: np.float32,
    grad_summaries: Floats,
    grad_nodes: Floats,
    grad_query_key: Floats,
) -> None:
    """Give the gradients of :func:`attend`.

    Args:
        nodes: ``[n, dim]``, at least one.
        query_key: Queries and keys of all heads, side by side, ``[n, 2 * dim]``.
        factor: Multiplied with all products of queries and keys.
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
    grad_shared = np.zeros((heads, dim), np.float32)  # of every query
    for head in range(heads):
        copy_row(grad_summaries[head], grad_shared[head])
    scale(grad_shared, ONE / np.float32(count))
    add_row_products(grad_shared, 0, nodes, grad_received, dim)
    clear(grad_query_key)
    for head in range(heads):
        take_keys(query_key, head, factor, keys)
        clear(grad_keys)
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            block = rows[: stop - first]
            queries = query_key[first:stop, head * width : (head + 1) * width]
            attention_rows(queries, keys, count, block)
            for row in range(len(block)):
                softmax_back(block[row], received[head], grad_received[head])
            grad_queries = grad_query_key[first:stop, head * width : (head + 1) * width]
            add_row_products(block, 0, keys, grad_queries, length)
            add_product(queries.T, block, 0, grad_keys, 0, length)
        for channel in range(width):
            for key in range(count):
                grad_query_key[key, dim + head * width + channel] = grad_keys[channel, key] * factor
    add_product(received[:, :count].T, grad_shared, 0, grad_nodes, 0, dim)


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
def vectors_of(count: int) -> int:
    """Return the values of as many vectors as hold ``count``."""
    return (count + VECTOR - 1) // VECTOR * VECTOR


@loop
def take_keys(query_key: Floats, head: int, factor: np.float32, keys: Floats) -> None:
    """Write the keys of a head, scaled, a row per channel: ``[d, length]``."""
    dim, width = query_key.shape[1] // 2, len(keys)
    for channel in range(width):
        row = keys[channel]
        for node in range(len(query_key)):
            row[node] = query_key[node, dim + head * width + channel] * factor
        clear_row(row[len(query_key) :])


@loop
def attention_rows(queries: Floats, keys: Floats, count: int, rows: Floats) -> None:
    """Write the attention that nodes give.

    Args:
        queries: ``[m, d]``.
        keys: Scaled, ``[d, length]``.
        count: How many keys there are.
        rows: Filled in, ``[m, length]``.
    """
    clear(rows)
    add_product(queries, keys, 0, rows, 0, keys.shape[1])
    for index in range(len(rows)):
        row = rows[index]
        largest, total = row[0], ZERO
        for key in range(count):
            largest = max(largest, row[key])
        for key in range(len(row)):
            row[key] = exponential(row[key] - largest)
        clear_row(row[count:])
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
