"""Attention along edges: every node attends to the nodes with an edge to it, and to itself.

Time and memory are linear in the edges, and of many edges those of some nodes are handled at a time
and made again for the gradient. Edges to a node itself do not count beside its own place; one that
is there twice counts twice.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

#: Edges that are handled at a time: 128 MB of keys and values of 64 channels.
EDGES_AT_ONCE = 1 << 18


def attend_along_edges(
    projected: Tensor,
    edge_index: Tensor,
    zero_token: bool,
    dropout: float = 0.0,
    kept: Tensor | None = None,
) -> Tensor:
    """Return what every node finds: ``[num_nodes, heads * d]``.

    Args:
        projected: Queries, keys and values, ``[num_nodes, 3, heads, d]``.
        edge_index: ``[2, num_edges]``, from the node that is attended to.
        zero_token: Whether there is a key and value of zeros as well.
        dropout: Of single attention weights.
        kept: Nodes that others may attend to; all by default: ``[num_nodes]``.
    """
    source, target = _with_loops(edge_index, len(projected), kept)  # [num_edges] each
    query, key, value = projected.unbind(1)  # [num_nodes, heads, d] each
    if len(source) <= EDGES_AT_ONCE:
        return _contexts(query, key, value, source, target, zero_token, dropout).flatten(1)
    target, order = target.sort(stable=True)
    source = source[order]
    parts, first = [], 0
    for stop in _bounds(target, len(query)):
        start, end = torch.searchsorted(target, torch.tensor([first, stop], device=target.device))
        edges = slice(int(start), int(end))
        parts.append(
            checkpoint(
                _contexts,
                *(query[first:stop], key, value, source[edges], target[edges] - first),
                *(zero_token, dropout),
                use_reentrant=False,
            )
        )
        first = stop
    return torch.cat(parts).flatten(1)


def received_along_edges(
    projected: Tensor, edge_index: Tensor, zero_token: bool, share: Tensor
) -> Tensor:
    """Return the attention each node gets: ``[num_nodes]``.

    Args:
        projected: Queries, keys and values, ``[num_nodes, 3, heads, d]``.
        edge_index: ``[2, num_edges]``.
        zero_token: Whether there is a key of zeros as well.
        share: What each node that attends counts, ``[num_nodes]``.
    """
    source, target = _with_loops(edge_index, len(projected), None)
    query, key, _ = projected.unbind(1)
    given = _weights(query, key, source, target, zero_token).mean(1) * share[target]  # [num_edges]
    return torch.zeros_like(share).index_add(0, source, given)


def _contexts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    target: Tensor,
    zero_token: bool,
    dropout: float,
) -> Tensor:
    """Sum the values of all edges into the queried nodes: ``[queries, heads, d]``."""
    weights = _weights(query, key, source, target, zero_token)  # [num_edges, heads]
    weights = functional.dropout(weights, dropout)
    found = weights.unsqueeze(-1) * value.index_select(0, source)  # [num_edges, heads, d]
    zeros = query.new_zeros(len(query), found[0].numel())  # flat: else it is slow on a CPU
    return zeros.index_add(0, target, found.flatten(1)).view_as(query)


def _weights(
    query: Tensor, key: Tensor, source: Tensor, target: Tensor, zero_token: bool
) -> Tensor:
    """Return softmax weights over the edges into each node: ``[num_edges, heads]``."""
    products = query.index_select(0, target) * key.index_select(0, source)  # [num_edges, heads, d]
    scores = products.sum(-1) / math.sqrt(query.size(-1))  # [num_edges, heads]
    shape = (len(query), scores.size(1))
    # A token has the score 0, at every node.
    top = scores.new_full(shape, 0.0 if zero_token else -math.inf)
    slots = target.unsqueeze(-1).expand_as(scores)
    top = top.scatter_reduce(0, slots, scores.detach(), "amax")  # [queries, heads]
    weights = (scores - top.index_select(0, target)).exp()
    total = scores.new_zeros(shape).index_add(0, target, weights)  # [queries, heads]
    if zero_token:
        total = total + (-top).exp()
    return weights / total.index_select(0, target)


def _with_loops(edge_index: Tensor, num_nodes: int, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return where edges begin and end, with one from every node to itself."""
    source, target = edge_index  # [num_edges] each
    inside = source != target
    if kept is not None:
        inside = inside & kept[source]
    loops = torch.arange(num_nodes, device=source.device)
    return torch.cat([source[inside], loops]), torch.cat([target[inside], loops])


def _bounds(target: Tensor, num_nodes: int) -> list[int]:
    """Return where ranges of nodes end that have about as many edges as are handled at a time."""
    ends = target[EDGES_AT_ONCE - 1 :: EDGES_AT_ONCE].unique() + 1  # sorted already
    found: list[int] = ends.tolist()
    return found if found and found[-1] == num_nodes else [*found, num_nodes]
