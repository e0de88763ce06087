"""Multi-head self-attention between the nodes of each graph, graphs of any size in one batch.

Graphs of similar size share a dense bucket under a padding budget; a large graph is on its own,
with fused attention whose memory is linear in its nodes. No graph is padded to the largest of its
batch, and no graph sees another.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from .padded_attention import padded_attention
from .ragged import Bucket, Graphs, Layout, bucket_layout, move_rows
from .received_attention import block_size, received_attention

#: Scores a bucket may waste on padding: computing them costs about as much as one more bucket.
PADDING_BUDGET = 1 << 14

#: Attention weights of a bucket: as many as stay in a processor's cache (2 MB).
BUCKET_WEIGHTS = 1 << 19

#: Graphs with more nodes than this are attended to one by one, without holding their scores.
LARGE_GRAPH = 256


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
        self.capacity = BUCKET_WEIGHTS // heads
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
        if not layout.buckets:
            return nodes
        contexts = []  # one [graphs, width, dim] per bucket
        for bucket, rows, keys in self._parts(layout, projected, kept):
            if bucket.width > self.large_graph:
                contexts.append(self._attend_large(rows, keys))
                continue
            query, key, value = self._heads(rows).unbind(0)  # [graphs, heads, width, d]
            context = functional.scaled_dot_product_attention(
                query,
                self._with_token(key),
                self._with_token(value),
                attn_mask=self._key_mask(bucket, keys)[:, None, None],
                dropout_p=self._active(self.dropout),
            )
            contexts.append(context.transpose(1, 2).flatten(2))
        attended: Tensor = self.out_projection(layout.unpad(contexts))
        return attended

    def pool(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Return the mean of :meth:`forward` over each graph's nodes: ``[num_graphs, dim]``.

        Averaging commutes with everything after the softmax: the mean over queries turns attention
        into one weight per head and node, values are projected per graph and not per node.
        """
        if torch.compiler.is_exporting():
            return graphs.mean(self(nodes, graphs))
        split = 2 * self.dim  # queries and keys before it, values from there on
        value_map, value_bias = self.in_projection.weight[split:], self.in_projection.bias[split:]
        layout, kept = self._layout(graphs), self._kept_keys(graphs)
        padded = layout.pad(nodes)  # [graphs, width, dim] each
        parts = self._parts(layout, self._query_key(nodes), kept)
        contexts = []  # of the large graphs, which come first
        summaries = [nodes.new_zeros(0, self.heads, self.dim)]
        totals = [nodes.new_zeros(0, self.heads, 1)]  # less than one if there is a zero token
        for (bucket, query_key, keys), own in zip(parts, padded, strict=True):
            if bucket.width > self.large_graph:
                value = functional.linear(own, value_map, value_bias)  # [1, nodes, dim]
                rows = torch.cat([query_key, value], dim=-1)  # [1, nodes, 3 * dim]
                contexts.append(self._attend_large(rows, keys).mean(1))  # [1, dim]
                continue
            received = self._received(bucket, query_key, keys)  # [graphs, heads, width]
            summaries.append(received @ own)  # [graphs, heads, dim]
            totals.append(received.sum(-1, keepdim=True))  # [graphs, heads, 1]
        values = value_map.unflatten(0, (self.heads, -1)).transpose(1, 2)  # [heads, dim, d]
        context = torch.bmm(torch.cat(summaries).transpose(0, 1), values).transpose(0, 1)
        context = context + torch.cat(totals) * value_bias.unflatten(0, (self.heads, -1))
        context = torch.cat([*contexts, context.flatten(1)])  # [graphs, dim]
        return move_rows(self.out_projection(context), None, layout.graphs, graphs.num_graphs)

    @torch.no_grad()
    def received(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Return the attention each node gets, averaged over queries and heads: ``[num_nodes]``.

        It sums to one over each graph (to less if there is a zero token). No keys are dropped.
        """
        layout = self._layout(graphs)
        if not layout.buckets:
            return nodes.new_zeros(0)
        parts = [
            self._received(bucket, rows, None).mean(1).unsqueeze(-1)  # [graphs, width, 1]
            for bucket, rows, _ in self._parts(layout, self._query_key(nodes), None)
        ]
        return layout.unpad(parts).squeeze(-1)

    def _query_key(self, nodes: Tensor) -> Tensor:
        """Return queries and keys side by side: ``[num_nodes, 2 * dim]``."""
        split = 2 * self.dim
        weight, bias = self.in_projection.weight[:split], self.in_projection.bias[:split]
        return functional.linear(nodes, weight, bias)

    def _layout(self, graphs: Graphs) -> Layout:
        return bucket_layout(
            graphs,
            padding_budget=self.padding_budget,
            largest=self.large_graph,
            capacity=self.capacity,
        )

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
        """Pair each bucket with its padded rows and its kept keys ``[graphs, width]``."""
        buckets, parts = layout.buckets, layout.pad(rows)
        flags: list[Tensor] | list[None] = [None] * len(buckets)
        if kept is not None:
            flags = [part.squeeze(-1) for part in layout.pad(kept.unsqueeze(-1))]
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
        mask = bucket.occupied() if kept is None else kept
        return functional.pad(mask, (0, 1), value=True) if self.zero_token else mask

    def _received(self, bucket: Bucket, query_key: Tensor, kept: Tensor | None) -> Tensor:
        """Average the attention of a bucket over its queries: ``[graphs, heads, width]``."""
        query, key = self._heads(query_key).unbind(0)  # [graphs, heads, width, d]
        share = bucket.occupied().to(key.dtype) / bucket.sizes.unsqueeze(-1)  # [graphs, width]
        alone = len(bucket.sizes) == 1 and kept is None
        received = received_attention(
            query,
            self._with_token(key),
            None if alone else self._key_mask(bucket, kept),
            share,
            dropout=self._active(self.dropout),
        )
        return received[..., : bucket.width]

    def _attend_large(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        """Attend inside one graph in memory linear in its nodes: ``[1, nodes, dim]``."""
        query, key, value = self._heads(rows).unbind(0)  # [1, heads, nodes, d]
        if kept is not None:
            key, value = key[:, :, kept[0]], value[:, :, kept[0]]
        key, value = self._with_token(key), self._with_token(value)
        dropout = self._active(self.dropout)
        if not dropout or query.is_cuda:
            context = functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout
            )  # [1, heads, nodes, d]
        else:  # not fused on a CPU: a block of queries at a time, made again for the gradient
            size = block_size(self.heads * key.size(2))
            blocks = [
                checkpoint(
                    functional.scaled_dot_product_attention,
                    *(block, key, value, None, dropout),
                    use_reentrant=False,
                )
                for block in query.split(size, dim=2)
            ]
            context = torch.cat(blocks, dim=2)  # [1, heads, nodes, d]
        return context.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        """Describe the options in one line."""
        return (
            f"dim={self.dim}, heads={self.heads}, zero_token={self.zero_token}, "
            f"dropout={self.dropout}, key_dropout={self.key_dropout}"
        )
