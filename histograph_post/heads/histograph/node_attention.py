"""Attention between the nodes of each graph: step 6 of the paper, for graphs of any size.

Graphs of similar size share a dense bucket under a padding budget; a large graph has one of its
own, with fused attention whose memory is linear in its nodes. No graph is padded to the largest of
its batch, and no graph sees another.

In the paper's form a node attends to all nodes of its graph, in quadratic time. Two forms in
:mod:`.large_graphs` have the same weights and take less: groups of similar nodes, and edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ..ragged import Bucket, Graphs, Layout, bucket_layout
from .large_graphs import Landmarks, attend_along_edges, received_along_edges

#: What a node may attend to.
NODE_ATTENTIONS = ("auto", "exact", "landmark", "neighbors", "none")

#: Graphs of more nodes are attended to by landmarks where the choice is ``auto``.
EXACT_NODES = 1 << 14


def resolve_auto(options: dict[str, Any], smallest: int) -> dict[str, Any]:
    """Return options of a head, with ``landmark`` for ``auto`` if even the smallest graph is large.

    A head is used as it was trained: it then attends to landmarks in graphs of any size.
    """
    auto = options.get("node_attention", "auto") == "auto"
    return {**options, "node_attention": "landmark"} if auto and smallest > EXACT_NODES else options


#: Scores a bucket may waste on padding: computing them costs about as much as one more bucket.
PADDING_BUDGET = 1 << 14

#: Attention weights of a bucket: as many as fit into a processor's cache (2 MB).
BUCKET_WEIGHTS = 1 << 19

#: Graphs with more nodes than this have a bucket of their own.
LARGE_GRAPH = 256

#: The same on other devices, where launching a kernel takes longer than running it: a million
#: scores take about as long as the dozen kernels of another bucket. Estimated, not timed on a GPU.
DEVICE_PADDING = 1 << 22
DEVICE_WEIGHTS = 1 << 26
DEVICE_LARGE_GRAPH = 2048

#: Attention weights in memory at a time, where attention is not fused (32 MB).
BLOCK_WEIGHTS = 1 << 23


#: What nodes may attend to instead of all nodes of their graph: groups of nodes, in graphs that
#: have them; or along the edges of the batch, ``[2, num_edges]``; None for all nodes.
Reach: TypeAlias = Landmarks | Tensor | None


class NodeAttention(nn.Module):
    """Softmax attention of every node to nodes of its own graph.

    Same weights, and in the ``exact`` form the same result, as
    :class:`torch.nn.MultiheadAttention` on each graph alone.

    Args:
        dim: Width of the node embeddings.
        heads: Attention heads; must divide ``dim``.
        zero_token: Add a key and value of zeros to every graph (``add_zero_attn``).
        dropout: Drop single attention weights while training.
        key_dropout: Drop whole keys, nodes or groups of them, while training; never all of a graph,
            and along edges never the node itself.
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

    def forward(self, nodes: Tensor, graphs: Graphs, reach: Reach = None) -> Tensor:
        """Return the attended node embeddings: ``[num_nodes, dim]``."""
        attended: Tensor = self.out_projection(self.contexts(nodes, graphs, reach))
        return attended

    def pool(
        self, nodes: Tensor, graphs: Graphs, reach: Reach = None, *, residual: bool = False
    ) -> Tensor:
        """Return the mean of :meth:`forward` over each graph's nodes: ``[num_graphs, dim]``.

        The mean commutes with the output projection, which then runs per graph and not per node.

        Args:
            residual: Whether the mean of the nodes themselves is added.
        """
        contexts = self.contexts(nodes, graphs, reach)  # [num_nodes, dim]
        both = torch.cat([contexts, nodes], dim=1) if residual else contexts
        means = graphs.mean(both).split(self.dim, dim=1)  # one or two [num_graphs, dim]
        pooled: Tensor = graphs.empty_to_zero(self.out_projection(means[0]))  # without the bias
        return pooled + means[1] if residual else pooled

    def contexts(self, nodes: Tensor, graphs: Graphs, reach: Reach = None) -> Tensor:
        """Return the context of every node, before the output projection: ``[num_nodes, dim]``."""
        if isinstance(reach, Tensor):
            projected = self.in_projection(nodes)  # [num_nodes, 3 * dim]
            projected = projected.unflatten(-1, (3, self.heads, -1))  # [num_nodes, 3, heads, d]
            drop, kept = self.dropout if self.training else 0.0, self._kept_keys(graphs)
            return attend_along_edges(projected, reach, self.zero_token, drop, kept)
        return self._each_kind(nodes, graphs, reach, self._exact_contexts, self._landmark_contexts)

    def _each_kind(
        self,
        nodes: Tensor,
        graphs: Graphs,
        landmarks: Landmarks | None,
        exact: Callable[[Tensor, Graphs], Tensor],
        by_landmarks: Callable[[Tensor, Graphs, Landmarks], Tensor],
    ) -> Tensor:
        """Use landmarks in graphs that have them, and exact attention elsewhere: a row per node."""
        if landmarks is None:
            return exact(nodes, graphs)
        if landmarks.used.all():
            return by_landmarks(nodes, graphs, landmarks)
        large, others = np.flatnonzero(landmarks.used), np.flatnonzero(~landmarks.used)
        (far, far_nodes), (near, near_nodes) = graphs.take(large), graphs.take(others)
        found = [
            by_landmarks(nodes[far_nodes], far, landmarks.take(large, far_nodes)),
            exact(nodes[near_nodes], near),
        ]
        return torch.cat(found)[torch.cat([far_nodes, near_nodes]).argsort()]

    def _exact_contexts(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        """Attend to all nodes of a graph: ``[num_nodes, dim]``."""
        projected = self.in_projection(nodes)  # [num_nodes, 3 * dim]
        layout, kept = self._layout(graphs), self._kept_keys(graphs)
        if not layout.buckets:
            return nodes
        contexts = []  # one [graphs, width, dim] per bucket
        for bucket, rows in zip(layout.buckets, layout.pad(projected), strict=True):
            query, key, value = self._heads(rows)  # [graphs, heads, width, d] each
            key, value = self._with_token(key), self._with_token(value)
            mask = self._key_mask(bucket, kept)  # [graphs, 1, 1, keys]
            context = self._attend(query, key, value, mask)  # [graphs, heads, width, d]
            contexts.append(context.transpose(1, 2).flatten(2))
        return layout.unpad(contexts)  # [num_nodes, dim]

    def _landmark_contexts(self, nodes: Tensor, graphs: Graphs, landmarks: Landmarks) -> Tensor:
        """Attend to groups of nodes: ``[num_nodes, dim]``."""
        counts = landmarks.counts
        if self.training and self.key_dropout:
            kept = counts * (torch.rand_like(counts) >= self.key_dropout)  # [num_graphs, k]
            counts = torch.where(kept.any(1, keepdim=True), kept, counts)
        query, key, value, mask = self._by_landmarks(nodes, landmarks.rows, counts)
        layout = self._layout(graphs)
        if not layout.buckets:
            return nodes
        contexts = []  # one [graphs, width, dim] per bucket
        for bucket, rows in zip(layout.buckets, layout.pad(query), strict=True):
            own = bucket.graphs
            queries = rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [.., heads, width, d]
            context = self._attend(queries, key[own], value[own], mask[own])
            contexts.append(context.transpose(1, 2).flatten(2))
        return layout.unpad(contexts)  # [num_nodes, dim]

    def _by_landmarks(
        self, nodes: Tensor, rows: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries ``[num_nodes, dim]``, keys and values ``[num_graphs, heads, k, d]``.

        The last is added to scores: the logarithm of the number of nodes in a group,
        ``[num_graphs, 1, 1, k]``.
        """
        mask = self._with_token(counts.log().unsqueeze(-1)).squeeze(-1)  # a token counts once
        weights, biases = self.in_projection.weight, self.in_projection.bias
        query = functional.linear(nodes, weights[: self.dim], biases[: self.dim])
        both = functional.linear(rows, weights[self.dim :], biases[self.dim :])  # [.., k, 2 * dim]
        key, value = both.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return query, self._with_token(key), self._with_token(value), mask[:, None, None]

    @torch.no_grad()
    def received(self, nodes: Tensor, graphs: Graphs, reach: Reach = None) -> Tensor:
        """Return the attention each node receives, mean over queries and heads: ``[num_nodes]``.

        It sums to one over each graph (to less if there is a zero token). Nothing is dropped.
        """
        if isinstance(reach, Tensor):
            projected = self.in_projection(nodes).unflatten(-1, (3, self.heads, -1))
            share = graphs.spread(graphs.divisor_as(nodes.dtype).reciprocal())  # [num_nodes]
            return received_along_edges(projected, reach, self.zero_token, share)
        return self._each_kind(
            nodes, graphs, reach, self._exactly_received, self._received_by_landmarks
        )

    def _exactly_received(self, nodes: Tensor, graphs: Graphs) -> Tensor:
        layout = self._layout(graphs)
        if not layout.buckets:
            return nodes.new_zeros(0)
        parts = []  # one [graphs, width, 1] per bucket
        for bucket, rows in zip(layout.buckets, layout.pad(self.in_projection(nodes)), strict=True):
            query, key, _ = self._heads(rows)  # [graphs, heads, width, d] each
            key, mask = self._with_token(key), self._key_mask(bucket, None)
            share = bucket.occupied().to(query.dtype) / bucket.sizes[:, None]  # [graphs, width]
            total = query.new_zeros(len(query), key.size(2))  # [graphs, keys]
            size = self._block_size(key)
            for queries, shares in zip(query.split(size, 2), share.split(size, 1), strict=True):
                scores = queries @ key.mT / math.sqrt(query.size(-1))  # [graphs, heads, size, keys]
                if mask is not None:
                    scores = scores + mask
                total = total + torch.einsum("gq,ghqk->gk", shares, scores.softmax(-1))
            parts.append((total / self.heads)[:, : bucket.width, None])
        return layout.unpad(parts).squeeze(-1)  # [num_nodes]

    def _received_by_landmarks(self, nodes: Tensor, graphs: Graphs, landmarks: Landmarks) -> Tensor:
        """Return the attention of nodes, an equal part of their group's each: ``[num_nodes]``."""
        assert landmarks.groups is not None  # all nodes are given
        query, key, _, mask = self._by_landmarks(nodes, landmarks.rows, landmarks.counts)
        count, found = landmarks.counts.size(1), torch.zeros_like(landmarks.counts)
        for graph, rows in enumerate(query.split(graphs.sizes.tolist())):
            for block in rows.unflatten(-1, (self.heads, -1)).split(self._block_size(key[:1])):
                scores = block.transpose(0, 1) @ key[graph].mT / math.sqrt(block.size(-1))
                weights = (scores + mask[graph]).softmax(-1)  # [heads, queries, keys]
                found[graph] += weights[..., :count].sum((0, 1)) / self.heads / len(rows)
        shares = found / landmarks.counts.clamp(min=1)  # [num_graphs, k], of a node
        return shares[graphs.index, landmarks.groups]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Softmax attention in memory linear in the keys: ``[graphs, heads, queries, d]``."""
        # The one place where attention is computed. Flash attention over ragged rows (in PyTorch
        # torch.nn.attention.varlen) takes half precision only, and the head computes in single.
        dropout = self.dropout if self.training else 0.0
        if not dropout or query.is_cuda:
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, dropout_p=dropout
            )
        # Not fused on a CPU: a block of queries at a time, computed again in the backward pass.
        blocks = [
            checkpoint(
                functional.scaled_dot_product_attention,
                *(queries, key, value, mask, dropout),
                use_reentrant=False,
            )
            for queries in query.split(self._block_size(key), dim=2)
        ]
        return torch.cat(blocks, dim=2)

    def _block_size(self, key: Tensor) -> int:
        """Return how many queries to handle at a time, for keys ``[graphs, heads, keys, d]``."""
        return max(16, BLOCK_WEIGHTS // max(1, key.shape[:3].numel()))

    def _layout(self, graphs: Graphs) -> Layout:
        on_cpu = graphs.index.device.type == "cpu"
        return bucket_layout(
            graphs,
            padding_budget=self.padding_budget if on_cpu else DEVICE_PADDING,
            largest=self.large_graph if on_cpu else DEVICE_LARGE_GRAPH,
            capacity=(BUCKET_WEIGHTS if on_cpu else DEVICE_WEIGHTS) // self.heads,
        )

    def _kept_keys(self, graphs: Graphs) -> Tensor | None:
        """Draw the nodes that may be attended to, at least one per graph: ``[num_nodes]``."""
        if not (self.training and self.key_dropout):
            return None
        drawn = torch.rand(len(graphs.index), device=graphs.index.device)
        kept = drawn >= self.key_dropout
        return kept | graphs.spread(graphs.sum(kept.long()) == 0)

    def _key_mask(self, bucket: Bucket, kept: Tensor | None) -> Tensor | None:
        """Return what is added to scores, ``[graphs, 1, 1, keys]``; None if it is zero everywhere.

        It is minus infinity where there is no node, or one that was dropped, else 0.
        """
        if kept is None and bucket.full:
            return None
        dtype = self.in_projection.weight.dtype
        mask = torch.full(
            (bucket.sizes.size(0) * bucket.width,),
            -math.inf,
            dtype=dtype,
            device=bucket.slots.device,
        )
        if kept is None:
            mask.index_fill_(0, bucket.slots, 0.0)
        else:
            mask.index_copy_(0, bucket.slots, kept[bucket.nodes].to(dtype).log())
        mask = mask.view(bucket.sizes.size(0), bucket.width)
        if self.zero_token:
            mask = functional.pad(mask, (0, 1))  # [graphs, width + 1]
        return mask[:, None, None]

    def _heads(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``[graphs, width, 3 * dim]`` into three ``[graphs, heads, width, d]``."""
        query, key, value = rows.unflatten(-1, (3, self.heads, -1)).unbind(2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _with_token(self, rows: Tensor) -> Tensor:
        """Append the zero token to keys or values ``[..., width, d]``, if there is one."""
        return functional.pad(rows, (0, 0, 0, 1)) if self.zero_token else rows

    def extra_repr(self) -> str:
        """Describe the options in one line."""
        return (
            f"dim={self.dim}, heads={self.heads}, zero_token={self.zero_token}, "
            f"dropout={self.dropout}, key_dropout={self.key_dropout}"
        )
