"""Multi-head self-attention between the nodes of each graph, graphs of any size in one batch.

Graphs of similar size share a dense bucket under a padding budget; a large graph is on its own,
with fused attention whose memory is linear in its nodes. No graph is padded to the largest of its
batch, and no graph sees another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .padded_attention import padded_attention
from .ragged import Bucket, Graphs, Layout, bucket_layout, move_rows

#: Scores a bucket may waste on padding: computing them costs about as much as one more bucket.
PADDING_BUDGET = 1 << 13

#: Graphs with more nodes than this are attended to one by one, without holding their scores.
LARGE_GRAPH = 128

#: Queries handled at a time when the attention of a large graph is asked for.
QUERY_BLOCK = 256


class NodeAttention(nn.Module):
    """Exact softmax attention of every node to the nodes of its own graph.

    Same weights, same result as :class:`torch.nn.MultiheadAttention` on each graph alone.

    Args:
        dim: Width of the node embeddings.
        heads: Attention heads; must divide ``dim``.
        zero_token: Add a key and value of zeros to every graph (``add_zero_attn``).
        dropout: Drop single attention weights while training.
        key_dropout: Drop whole nodes as keys while training; never all of a graph.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        zero_token: bool = False,
        dropout: float = 0.0,
        key_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.heads = dim, heads
        self.zero_token = zero_token
        self.dropout, self.key_dropout = dropout, key_dropout
        self.padding_budget, self.large_graph = PADDING_BUDGET, LARGE_GRAPH
        self.in_projection = nn.Linear(dim, 3 * dim)  # queries, keys, values
        self.out_projection = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew, as :class:`torch.nn.MultiheadAttention` does."""
        nn.init.xavier_uniform_(self.in_projection.weight)
        nn.init.zeros_(self.in_projection.bias)
        self.out_projection.reset_parameters()
        nn.init.zeros_(self.out_projection.bias)

    def forward(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Return the attended node embeddings: ``[num_nodes, dim]``."""
        projected = self.in_projection(nodes)  # [num_nodes, 3 * dim]
        if torch.compiler.is_exporting():
            context = padded_attention(projected, graphs, self.heads, zero_token=self.zero_token)
            return self.out_projection(context)  # [num_nodes, dim]
        layout, kept = self._layout(graphs), self._kept_keys(graphs)
        contexts = []
        for bucket, rows, keys in self._parts(layout, projected, kept):
            if bucket.width > self.large_graph:
                contexts.append(self._attend_large(rows, keys))
                continue
            query, key, value = self._heads(bucket.pad(rows)).unbind(0)  # [graphs, heads, width, d]
            context = functional.scaled_dot_product_attention(
                query,
                self._with_token(key),
                self._with_token(value),
                attn_mask=self._key_mask(bucket, keys)[:, None, None],
                dropout_p=self._active(self.dropout),
            )
            contexts.append(bucket.unpad(context.transpose(1, 2).flatten(2)))
        attended: Tensor = self.out_projection(self._join(layout, contexts, nodes))
        return attended

    def pool(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Return the mean of :meth:`forward` over each graph's nodes: ``[num_graphs, dim]``.

        Averaging commutes with everything after the softmax: the mean over queries turns attention
        into one weight per head and node, values are projected per graph and not per node.
        """
        if torch.compiler.is_exporting():
            return graphs.mean(self(nodes, graphs))
        weight, bias = self.in_projection.weight, self.in_projection.bias
        split = 2 * self.dim  # queries and keys before it, values from there on
        value_map = weight[split:].unflatten(0, (self.heads, -1))  # [heads, dim / heads, dim]
        value_bias = bias[split:].unflatten(0, (self.heads, -1))  # [heads, dim / heads]
        layout, kept = self._layout(graphs), self._kept_keys(graphs)
        contexts = [nodes.new_zeros(0, self.dim)]
        for bucket, rows, keys in self._parts(layout, nodes, kept):
            if bucket.width > self.large_graph:
                context = self._attend_large(self.in_projection(rows), keys)
                contexts.append(context.mean(0, keepdim=True))  # [1, dim]
                continue
            padded = bucket.pad(rows)  # [graphs, width, dim]
            query_key = functional.linear(padded, weight[:split], bias[:split])
            received = self._received(bucket, query_key, keys)  # [graphs, heads, width]
            summary = received @ padded  # [graphs, heads, dim]
            context = torch.einsum("ghd,hed->ghe", summary, value_map)
            context = context + received.sum(-1, keepdim=True) * value_bias
            contexts.append(context.flatten(1))  # [graphs, dim]
        pooled: Tensor = self.out_projection(torch.cat(contexts))
        order = torch.cat([graphs.index[:0], *(bucket.graphs for bucket in layout.buckets)])
        return move_rows(pooled, None, order, graphs.num_graphs)

    @torch.no_grad()
    def received(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Return the attention each node gets, averaged over queries and heads: ``[num_nodes]``.

        It sums to one over each graph (to less if there is a zero token). No keys are dropped.
        """
        split = 2 * self.dim
        weight, bias = self.in_projection.weight[:split], self.in_projection.bias[:split]
        query_key = functional.linear(nodes, weight, bias)  # [num_nodes, 2 * dim]
        layout = self._layout(graphs)
        parts = []
        for bucket, rows in zip(layout.buckets, layout.split(query_key), strict=True):
            if bucket.width > self.large_graph:
                parts.append(self._received_large(rows).unsqueeze(-1))
                continue
            received = self._received(bucket, bucket.pad(rows), None)  # [graphs, heads, width]
            parts.append(bucket.unpad(received.mean(1).unsqueeze(-1)))
        return self._join(layout, parts, nodes[:, :1]).squeeze(-1)

    def _layout(self, graphs: Graphs) -> Layout:
        return bucket_layout(graphs, padding_budget=self.padding_budget, largest=self.large_graph)

    def _join(self, layout: Layout, parts: list[Tensor], nodes: Tensor) -> Tensor:
        return layout.join(parts) if parts else nodes

    def _active(self, probability: float) -> float:
        return probability if self.training else 0.0

    def _kept_keys(self, graphs: Graphs) -> Tensor | None:
        """Draw the nodes that may be attended to, at least one per graph: ``[num_nodes]``."""
        if not self._active(self.key_dropout):
            return None
        drawn = torch.rand(len(graphs.index), device=graphs.index.device)
        kept = drawn >= self.key_dropout
        return kept | graphs.spread(graphs.sum(kept.long()) == 0)

    @staticmethod
    def _parts(
        layout: Layout, rows: Tensor, kept: Tensor | None
    ) -> list[tuple[Bucket, Tensor, Tensor | None]]:
        """Pair each bucket with its rows and its kept keys."""
        buckets, parts = layout.buckets, layout.split(rows)
        flags = [None] * len(buckets) if kept is None else layout.split(kept)
        return list(zip(buckets, parts, flags, strict=True))

    def _heads(self, rows: Tensor) -> Tensor:
        """Split ``[graphs, width, parts * dim]`` into ``[parts, graphs, heads, width, d]``."""
        shape = (rows.size(-1) // self.dim, self.heads, self.dim // self.heads)
        return rows.unflatten(-1, shape).permute(2, 0, 3, 1, 4)

    def _with_token(self, rows: Tensor) -> Tensor:
        """Append the zero token to keys or values ``[..., width, d]``, if there is one."""
        return functional.pad(rows, (0, 0, 0, 1)) if self.zero_token else rows

    def _key_mask(self, bucket: Bucket, kept: Tensor | None) -> Tensor:
        """Mark what may be attended to: ``[graphs, width]``, one wider with a zero token."""
        if kept is None:
            mask = bucket.occupied()
        else:
            mask = bucket.pad(kept.unsqueeze(-1)).squeeze(-1)
        return functional.pad(mask, (0, 1), value=True) if self.zero_token else mask

    def _received(self, bucket: Bucket, query_key: Tensor, kept: Tensor | None) -> Tensor:
        """Average the attention of a bucket over its queries: ``[graphs, heads, width]``."""
        query, key = self._heads(query_key).flatten(1, 2).unbind(0)  # [graphs * heads, width, d]
        share = bucket.occupied().to(key.dtype) / bucket.sizes.unsqueeze(-1)  # [graphs, width]
        received: Tensor = _ReceivedAttention.apply(
            query,
            self._with_token(key),
            ~self._key_mask(bucket, kept),
            share.repeat_interleave(self.heads, dim=0).unsqueeze(1),
            self._active(self.dropout),
        )
        return received.unflatten(0, (-1, self.heads))[..., : bucket.width]

    def _received_large(self, query_key: Tensor) -> Tensor:
        """Average the attention of one graph over queries and heads: ``[nodes]``."""
        query, key = self._heads(query_key.unsqueeze(0)).squeeze(1).unbind(0)  # [heads, nodes, d]
        key = self._with_token(key).transpose(1, 2) / math.sqrt(query.size(-1))
        total = query.new_zeros(key.size(-1))
        for block in query.split(QUERY_BLOCK, dim=1):
            total += (block @ key).softmax(-1).mean(0).sum(0)
        return total[: len(query_key)] / len(query_key)

    def _attend_large(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        """Attend inside one graph in memory linear in its nodes: ``[nodes, dim]``."""
        query, key, value = self._heads(rows.unsqueeze(0)).unbind(0)  # [1, heads, nodes, d]
        if kept is not None:
            key, value = key[:, :, kept], value[:, :, kept]
        context = functional.scaled_dot_product_attention(
            query,
            self._with_token(key),
            self._with_token(value),
            dropout_p=self._active(self.dropout),
        )
        return context.transpose(1, 2).flatten(2).squeeze(0)

    def extra_repr(self) -> str:
        """Describe the options in one line."""
        return (
            f"dim={self.dim}, heads={self.heads}, zero_token={self.zero_token}, "
            f"dropout={self.dropout}, key_dropout={self.key_dropout}"
        )


class _ReceivedAttention(Function):
    """Softmax attention averaged over queries, with weights ``share``.

    The gradient with respect to all rows of the attention is the same row, which saves half of the
    products and most of the memory that differentiating step by step would take.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, hidden: Tensor, share: Tensor, dropout: float
    ) -> Tensor:
        """Return ``[groups, keys]``.

        Args:
            ctx: What the backward pass needs.
            query: ``[groups, queries, d]``, a group being one head of one graph.
            key: ``[groups, keys, d]``.
            hidden: Keys that are not attended to, ``[graphs, keys]``.
            share: Weight of each query, ``[groups, 1, queries]``.
            dropout: Probability of dropping an attention weight.
        """
        ctx.scale = 1 / math.sqrt(query.size(-1))
        scores = torch.bmm(query, key.transpose(1, 2)).mul_(ctx.scale)  # [groups, queries, keys]
        per_graph = scores.unflatten(0, (len(hidden), -1))  # [graphs, heads, queries, keys]
        per_graph.masked_fill_(hidden[:, None, None], -math.inf)
        attention = scores.softmax(-1)
        noise = functional.dropout(torch.ones_like(attention), dropout) if dropout else None
        ctx.save_for_backward(query, key, attention, share, noise)
        return torch.bmm(share, attention if noise is None else attention * noise).squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Softmax and scores, backwards."""
        query, key, attention, share, noise = ctx.saved_tensors
        weighted = attention * grad.unsqueeze(1)  # [groups, queries, keys]
        if noise is not None:
            weighted.mul_(noise)
        weighted.addcmul_(attention, weighted.sum(-1, keepdim=True), value=-1)
        share = share.transpose(1, 2) * ctx.scale  # [groups, queries, 1]
        grad_query = torch.bmm(weighted, key).mul_(share)
        grad_key = torch.bmm(weighted.transpose(1, 2), query * share)
        return grad_query, grad_key, None, None, None
