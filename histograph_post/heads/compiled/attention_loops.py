"""How much attention the nodes of one graph receive, and what that makes of them.

With softmax attention ``A`` of the nodes to each other, a mean readout needs for every head only
the mean over queries, ``r_j = mean_i A_ij``, and the sum ``sum_j r_j x_j``. A few rows of ``A`` are
made at a time, and once more for the gradient: memory is linear in the nodes.
"""

from __future__ import annotations

import numpy as np

from .attention_rows import give_attention, give_attention_back, row_length
from .loops import ONE, Floats, loop, part_of_loop
from .products import add_dots_of_rows, add_product, write_product
from .row_loops import add_rows, clear, copy_row, new_rows, scale

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
    width, length = dim // heads, row_length(count)
    keys = new_rows(width, length)
    clear(keys)
    rows = new_rows(BLOCK, length)
    received = np.zeros((heads, length), np.float32)
    for head in range(heads):
        take_keys(query_key, head, factor, keys)
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            scores = rows[: stop - first]
            score_nodes(query_key[first:stop, head * width : (head + 1) * width], keys, scores)
            give_all(scores, count, received[head])
    write_product(received[:, :count], nodes, 0, summaries, 0, dim)
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
    width, length = dim // heads, row_length(count)
    keys = new_rows(width, length)
    clear(keys)
    rows = new_rows(BLOCK, length)
    received = np.zeros((heads, length), np.float32)
    grad_received = np.zeros((heads, length), np.float32)
    grad_shared = np.empty((heads, dim), np.float32)  # of every query
    for head in range(heads):
        copy_row(grad_summaries[head], grad_shared[head])
    scale(grad_shared, ONE / np.float32(count))
    add_dots_of_rows(grad_shared, nodes, grad_received)
    clear(grad_query_key)
    for head in range(heads):
        place = head * width
        take_keys(query_key, head, factor, keys)
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            scores = rows[: stop - first]  # [m, length]
            asking = query_key[first:stop]  # [m, 2 * dim]
            score_nodes(asking[:, place : place + width], keys, scores)
            give_all_back(scores, count, factor, grad_received[head], received[head])
            grad_scores = scores[:, :count]  # as they are now
            own = grad_query_key[first:stop]
            add_product(grad_scores, query_key, dim + place, own, place, width)
            add_product(grad_scores.T, asking, place, grad_query_key, dim + place, width)
    add_product(received[:, :count].T, grad_shared, 0, grad_nodes, 0, dim)


@part_of_loop
def take_values(summaries: Floats, values: Floats, bias: Floats, context: Floats) -> None:
    """Map what each head of node attention has summed up.

    Args:
        summaries: ``[heads, dim]``.
        values: ``[dim, 3 * dim]``, of which the last ``dim`` columns count.
        bias: ``[dim]``.
        context: Filled in, ``[1, dim]``.
    """
    heads, dim = summaries.shape
    width = dim // heads
    copy_row(bias, context[0])
    for head in range(heads):
        own, place = summaries[head : head + 1], head * width  # [1, dim]
        add_product(own, values, 2 * dim + place, context, place, width)


@part_of_loop
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
        grad: Of the context, ``[1, dim]``.
        grad_summaries: Filled in, ``[heads, dim]``.
        grad_values: Added to, ``[dim, dim]``.
        grad_bias: Added to, ``[dim]``.
    """
    heads, dim = summaries.shape
    width = dim // heads
    add_rows(grad, grad_bias)
    for head in range(heads):
        first, stop = head * width, (head + 1) * width
        own = grad[:, first:stop]  # [1, d]
        write_product(own, values[first:stop], 0, grad_summaries[head : head + 1], 0, dim)
        add_product(own.T, summaries[head : head + 1], 0, grad_values[first:stop], 0, dim)


@part_of_loop
def take_keys(query_key: Floats, head: int, factor: np.float32, keys: Floats) -> None:
    """Write the keys of a head, scaled, a row per channel: ``[d, length]``."""
    dim, width = query_key.shape[1] // 2, len(keys)
    for channel in range(width):
        row = keys[channel]
        for node in range(len(query_key)):
            row[node] = query_key[node, dim + head * width + channel] * factor


@part_of_loop
def score_nodes(queries: Floats, keys: Floats, scores: Floats) -> None:
    """Write ``queries [m, d] @ keys [d, length]``: ``[m, length]``."""
    write_product(queries, keys, 0, scores, 0, keys.shape[1])


@part_of_loop
def give_all(scores: Floats, count: int, received: Floats) -> None:
    """Do :func:`.attention_rows.give_attention` for all rows of scores."""
    row, rows = 0, len(scores)
    while row + 4 <= rows:
        give_attention(4, scores, row, count, received)
        row += 4
    while row < rows:
        give_attention(1, scores, row, count, received)
        row += 1


@part_of_loop
def give_all_back(
    scores: Floats, count: int, factor: np.float32, grad: Floats, received: Floats
) -> None:
    """Do :func:`.attention_rows.give_attention_back` for all rows of scores."""
    row, rows = 0, len(scores)
    while row + 4 <= rows:
        give_attention_back(4, scores, row, count, factor, grad, received)
        row += 4
    while row < rows:
        give_attention_back(1, scores, row, count, factor, grad, received)
        row += 1
