"""How much attention each node receives, averaged over those who attend: what a mean readout needs.

With softmax attention ``A [queries, keys]`` and a share ``s`` of each query, the result is ``s A``.
Its gradient with respect to all rows of ``A`` is the same row, which saves half of the products of
differentiating step by step. Where ``A`` is large it is made for a block of queries at a time, and
once more in the backward pass: memory is linear in the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

#: Attention weights that are held at a time (32 MB in single precision).
BLOCK_ENTRIES = 1 << 23

#: Queries of a block at least, however many keys there are.
BLOCK_QUERIES = 16


def received_attention(
    query: Tensor, key: Tensor, mask: Tensor | None, share: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Return the attention each key receives: ``[graphs, heads, keys]``.

    Args:
        query: ``[graphs, heads, queries, d]``.
        key: ``[graphs, heads, keys, d]``.
        mask: Keys that may be attended to, ``[graphs, keys]``; ``None`` for all of them.
        share: Weight of each query of a graph, ``[graphs, queries]``.
        dropout: Probability of dropping an attention weight.
    """
    bias = None
    if mask is not None:
        bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -math.inf)
    # Drawn here, so that the backward pass can drop the same weights again.
    seed = int(torch.randint(2**62, ())) if dropout else 0
    received, *_ = _ReceivedAttention.apply(query, key, bias, share, dropout, seed)
    found: Tensor = received
    return found


def block_size(num_weights: int) -> int:
    """Return how many queries to handle at a time if each has so many attention weights."""
    return max(BLOCK_QUERIES, BLOCK_ENTRIES // max(1, num_weights))


def _attention(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Softmax attention, ``[groups, queries, keys]``."""
    scale = 1 / math.sqrt(query.size(-1))
    if bias is None:
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    else:
        per_group = _per_group(bias, len(query)).unsqueeze(1)  # [groups, 1, keys]
        scores = torch.baddbmm(per_group, query, key.transpose(1, 2), alpha=scale)
    return scores.softmax(-1)


def _per_group(values: Tensor, groups: int) -> Tensor:
    """Repeat what is known per graph, ``[graphs, ...]``, for its groups: ``[groups, ...]``."""
    return values.repeat_interleave(groups // len(values), dim=0)


def _query_blocks(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Yield the queries to handle at a time."""
    step = block_size(len(query) * key.size(1))
    for start in range(0, query.size(1), step):
        yield slice(start, start + step)


def _noise(like: Tensor, dropout: float, generator: torch.Generator) -> Tensor:
    """Return what each attention weight is multiplied with: zero, or the inverse of the share."""
    kept = torch.empty_like(like).bernoulli_(1 - dropout, generator=generator)
    return kept.div_(1 - dropout)


class _ReceivedAttention(Function):
    """See :func:`received_attention`; the heads of all graphs are groups, next to each other."""

    @staticmethod
    def forward(
        query: Tensor, key: Tensor, bias: Tensor | None, share: Tensor, dropout: float, seed: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        shape = (*key.shape[:2], key.size(2))  # [graphs, heads, keys]
        query, key = query.flatten(0, 1), key.flatten(0, 1)  # [groups, queries or keys, d]
        generator = torch.Generator(query.device).manual_seed(seed) if dropout else None
        weight = _per_group(share, len(query)).unsqueeze(1)  # [groups, 1, queries]
        received = key.new_zeros(len(key), 1, key.size(1))
        blocks = list(_query_blocks(query, key))
        for rows in blocks:
            attention = _attention(query[:, rows], key, bias)  # [groups, rows, keys]
            kept = attention
            if generator is not None:
                kept = attention * _noise(attention, dropout, generator)
            received.baddbmm_(weight[..., rows], kept)
        saved = attention if len(blocks) == 1 else None
        return received.view(shape), query, key, saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        _, _, bias, share, ctx.dropout, ctx.seed = inputs
        _, query, key, attention = output
        ctx.num_graphs = len(share)
        ctx.mark_non_differentiable(*(value for value in output[1:] if value is not None))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, bias, share, attention)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], query: Tensor, key: Tensor, *others: Any
    ) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
        # The copies are more heads of each graph.
        query = query.movedim(in_dims[0], 2).flatten(1, 2)  # [graphs, heads * copies, queries, d]
        key = key.movedim(in_dims[1], 2).flatten(1, 2)  # [graphs, heads * copies, keys, d]
        received, *_ = _ReceivedAttention.apply(query, key, *others)
        unfolded = received.unflatten(1, (-1, info.batch_size))
        return (unfolded, None, None, None), (2, None, None, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing depends on what came out
            return (None,) * len(ctx.needs_input_grad)
        query, key, bias, share, saved = ctx.saved_tensors
        grad = grad.flatten(0, 1).unsqueeze(1)  # [groups, 1, keys]
        generator = torch.Generator(query.device).manual_seed(ctx.seed) if ctx.dropout else None
        scale = 1 / math.sqrt(query.size(-1))
        weight = _per_group(share, len(query)).unsqueeze(-1) * scale  # [groups, queries, 1]
        grad_query, grad_key = torch.empty_like(query), torch.zeros_like(key)
        for rows in _query_blocks(query, key):
            attention = _attention(query[:, rows], key, bias) if saved is None else saved
            weighted = attention * grad  # [groups, rows, keys]
            if generator is not None:
                weighted.mul_(_noise(attention, ctx.dropout, generator))
            weighted.addcmul_(attention, weighted.sum(-1, keepdim=True), value=-1)
            torch.mul(torch.bmm(weighted, key), weight[:, rows], out=grad_query[:, rows])
            grad_key.baddbmm_(weighted.transpose(1, 2), query[:, rows] * weight[:, rows])
        per_graph = (ctx.num_graphs, -1)
        return grad_query.unflatten(0, per_graph), grad_key.unflatten(0, per_graph), *(None,) * 4
