"""The layer stage of one graph: scores of its layers, and their sums as node embeddings."""

from __future__ import annotations

import numpy as np

from .loops import ONE, ZERO, Floats, Integers, part_of_loop
from .products import add_dots, add_product_ahead, dot
from .row_loops import add_row, add_rows, clear, repeat_row, scale


@part_of_loop
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
    add_dots(filters, history, history.shape[1] // num_layers, scores)
    scale(scores, factor / np.float32(len(history)))


@part_of_loop
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
    shared = np.empty(heads * width, np.float32)  # of every node
    for head in range(heads):
        grad = grad_scores[head]  # [L]
        for channel in range(width):
            place = head * width + channel
            shared[place] = dot(grad, fixed_keys[head, channel])
            for layer in range(num_layers):
                grad_fixed_keys[head, channel, layer] += total[place] * grad[layer]
    add_row(shared, grad_queries)


@part_of_loop
def embed(
    combined: Floats,
    weights: Floats,
    embedding: Floats,
    offset: Floats,
    nodes: Floats,
    ahead: Integers,
) -> None:
    """Write the node embeddings of a graph.

    Args:
        combined: Sums of the layers of each node, ``[n, heads * D]``.
        weights: Layer weights, ``[heads, L]``.
        embedding: ``[D, dim]``.
        offset: What every layer has in all nodes, ``[L, dim]``.
        nodes: Filled in, ``[n, dim]``.
        ahead: What is fetched meanwhile, see :mod:`.ahead`.
    """
    heads, num_layers = weights.shape
    channels, width = len(embedding), nodes.shape[1] // heads
    constant = np.zeros(nodes.shape[1], np.float32)
    for head in range(heads):
        for layer in range(num_layers):
            for place in range(head * width, (head + 1) * width):
                constant[place] += weights[head, layer] * offset[layer, place]
    repeat_row(constant, ONE, nodes)
    for head in range(heads):
        own, place = combined[:, head * channels : (head + 1) * channels], head * width
        add_product_ahead(own, embedding, place, nodes, place, width, ahead)


@part_of_loop
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
