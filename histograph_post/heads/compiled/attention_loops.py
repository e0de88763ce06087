"""How much attention the nodes of one graph receive, and what that makes of them.

With softmax attention ``A`` of the nodes to each other, a mean readout needs for every head only
the mean over queries, ``r_j = mean_i A_ij``, and the sum ``sum_j r_j x_j``. A few rows of ``A`` are
made at a time, and once more for the gradient: memory is linear in the nodes.
"""

from __future__ import annotations

import numpy as np

from .attention_columns import LOG2_E, give_attention, give_attention_back, row_length, turn_square
from .loops import ONE, Floats, loop, part_of_loop
from .products import add_dots_of_rows, add_product, write_product
from .row_loops import add_rows, clear, copy_row, new_rows, scale
from .vector_code import LANES

#: Nodes whose attention is made at a time: two vectors.
BLOCK = 2 * LANES


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
    width = dim // heads
    queries = new_rows(row_length(width), row_length(count))
    scores = new_rows(count, BLOCK)
    received = np.zeros((heads, count), np.float32)
    for head in range(heads):
        place = head * width
        turn_columns(query_key, place, width, factor * LOG2_E, queries)
        keys = query_key[:, dim + place : dim + place + width]  # [n, d]
        for first in range(0, count, BLOCK):
            score_nodes(keys, queries, first, scores)
            give_all(scores, min(BLOCK, count - first), received[head])
    write_product(received, nodes, 0, summaries, 0, dim)
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
    width = dim // heads
    queries = new_rows(row_length(width), row_length(count))
    scores = new_rows(count, BLOCK)
    received = np.zeros((heads, count), np.float32)
    grad_received = np.zeros((heads, count), np.float32)
    grad_shared = np.empty((heads, dim), np.float32)  # of every query
    for head in range(heads):
        copy_row(grad_summaries[head], grad_shared[head])
    scale(grad_shared, ONE / np.float32(count))
    add_dots_of_rows(grad_shared, nodes, grad_received)
    clear(grad_query_key)
    for head in range(heads):
        place = head * width
        turn_columns(query_key, place, width, factor * LOG2_E, queries)
        keys = query_key[:, dim + place : dim + place + width]  # [n, d]
        for first in range(0, count, BLOCK):
            stop = min(first + BLOCK, count)
            score_nodes(keys, queries, first, scores)
            give_all_back(scores, stop - first, factor, grad_received[head], received[head])
            grad_scores = scores[:, : stop - first]  # [n, m], as they are now
            asking, grad_asking = query_key[first:stop], grad_query_key[first:stop]  # [m, 2 * dim]
            add_product(grad_scores.T, query_key, dim + place, grad_asking, place, width)
            add_product(grad_scores, asking, place, grad_query_key, dim + place, width)
    add_product(received.T, grad_shared, 0, grad_nodes, 0, dim)


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
def turn_columns(rows: Floats, column: int, width: int, factor: np.float32, result: Floats) -> None:
    """Write ``width`` columns of rows ``[n, m]`` as rows, multiplied: ``[width, n]`` or larger."""
    for first in range(0, len(rows), LANES):
        for place in range(0, width, LANES):
            some = min(width - place, LANES)
            turn_square(rows, first, column + place, some, factor, result[place:], first)


@part_of_loop
def score_nodes(keys: Floats, queries: Floats, first: int, scores: Floats) -> None:
    """Write ``keys [n, d] @ queries [d, ...]`` for a block of queries: ``[n, m]``, or wider."""
    length = min(scores.shape[1], queries.shape[1] - first)
    write_product(keys, queries[: keys.shape[1]], first, scores, 0, length)


@part_of_loop
def give_all(scores: Floats, givers: int, received: Floats) -> None:
    """Do :func:`.attention_columns.give_attention` for all columns of a block of scores."""
    if givers > LANES:
        give_attention(2, scores, givers, received)
    else:
        give_attention(1, scores, givers, received)


@part_of_loop
def give_all_back(
    scores: Floats, givers: int, factor: np.float32, grad: Floats, received: Floats
) -> None:
    """Do :func:`.attention_columns.give_attention_back` for all columns of a block of scores."""
    if givers > LANES:
        give_attention_back(2, scores, givers, factor, grad, received)
    else:
        give_attention_back(1, scores, givers, factor, grad, received)
