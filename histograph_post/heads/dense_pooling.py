"""Readouts that softly assign nodes to clusters, on padded tensors: DiffPool and MinCutPool.

Both use PyG's dense operators, on buckets of graphs of similar size. Their auxiliary losses are
left in ``aux_loss`` as the mean over graphs of the loss of each graph on its own, so that they
do not depend on how graphs were padded.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import DenseGraphConv, dense_diff_pool, dense_mincut_pool

from .base import History, Readout, last_layer
from .ragged import Bucket, Graphs, dense_adjacency, pool_buckets


class ClusterPool(Readout):
    """Base: convolution, assignment to clusters, convolution, mean over clusters.

    Args:
        in_dims: Width of each layer of the history; the last one is read.
        out_dim: Number of outputs per graph.
        dim: Width of the convolutions and of the classifier's hidden layer.
        level: ``graph``.
        dropout: Dropout inside the classifier.
        clusters: Number of clusters of each graph.
    """

    needs_edge_index = True

    def build(self, *, clusters: int = 16) -> None:
        """Make the modules."""
        self.clusters = clusters
        self.require("clusters", clusters >= 2, "at least 2")
        self.projection = nn.Linear(self.in_dims[-1], self.dim)
        self.embed = DenseGraphConv(self.dim, self.dim, aggr="mean")
        self.embed_clusters = DenseGraphConv(self.dim, self.dim, aggr="mean")
        self.finish(self.dim)

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return the mean over the embedded clusters, ``[num_graphs, dim]``."""
        assert edge_index is not None  # forward has checked it
        edges = edge_index  # [2, num_edges]
        rows = self.projection(last_layer(history)).relu()  # [num_nodes, dim]
        losses: list[Tensor] = []

        def pool(bucket: Bucket) -> Tensor:
            adjacency = dense_adjacency(
                bucket, edges, num_nodes=len(rows), dtype=rows.dtype
            )  # [size, max_nodes, max_nodes]
            padded = bucket.pad(rows[bucket.nodes])  # [size, max_nodes, dim]
            clusters, links, loss = self.assign(padded, adjacency, bucket.occupied())
            losses.append(loss * len(bucket.graphs))
            return self.embed_clusters(clusters, links).relu().mean(dim=1)  # [size, dim]

        pooled = pool_buckets(graphs, pool)  # [num_graphs, dim]
        self.aux_loss = torch.stack(losses).sum() / graphs.num_graphs
        return pooled

    def assign(
        self, rows: Tensor, adjacency: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return clusters ``[size, clusters, dim]``, their links, and the mean loss per graph."""
        raise NotImplementedError


class DiffPool(ClusterPool):
    """Clusters assigned by a second convolution, trained to join linked nodes.

    From "Hierarchical Graph Representation Learning with Differentiable Pooling" (Ying et al.,
    NeurIPS 2018, arXiv:1806.08804).
    """

    def build(self, *, clusters: int = 16) -> None:
        """Make the modules."""
        super().build(clusters=clusters)
        self.assignment = DenseGraphConv(self.dim, clusters, aggr="mean")

    def assign(
        self, rows: Tensor, adjacency: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return clusters, their links, and link-prediction plus entropy loss."""
        logits = self.assignment(rows, adjacency, mask)  # [size, max_nodes, clusters]
        embedded = self.embed(rows, adjacency, mask).relu()  # [size, max_nodes, dim]
        clusters, links, _, _ = dense_diff_pool(embedded, adjacency, logits, mask)
        # PyG takes its losses over all padded entries of a batch. The same per graph, with
        # ||A - S S^T||^2 = ||A||^2 - 2 tr(S^T A S) + ||S^T S||^2, which needs no [nodes, nodes].
        assigned = logits.softmax(dim=-1) * mask.unsqueeze(-1)  # [size, max_nodes, clusters]
        overlap = assigned.transpose(1, 2) @ assigned  # [size, clusters, clusters]
        trace = links.diagonal(dim1=1, dim2=2).sum(dim=1)  # [size]
        squared = adjacency.square().sum((1, 2)) - 2 * trace + overlap.square().sum((1, 2))
        counts = mask.sum(dim=1)  # [size]
        link_loss = squared.clamp_min(1e-12).sqrt() / counts.square()  # [size]
        entropy = -(assigned * (assigned + 1e-15).log()).sum((1, 2)) / counts  # [size]
        return clusters, links, (link_loss + entropy).mean()


class MinCutPool(ClusterPool):
    """Clusters assigned from the node's embedding, trained to cut few edges and to be balanced.

    From "Spectral Clustering with Graph Neural Networks for Graph Pooling" (Bianchi et al., ICML
    2020, arXiv:1907.00481). Nodes without an edge get a self-loop and the assignment's logits are
    bounded: the loss divides by degrees, and its gradient by the links between clusters.
    """

    #: Bound of the logits; two clusters then share at least exp(-4 * bound) of every node.
    logit_bound = 10.0

    def build(self, *, clusters: int = 16) -> None:
        """Make the modules."""
        super().build(clusters=clusters)
        self.assignment = nn.Linear(self.dim, clusters)

    def assign(
        self, rows: Tensor, adjacency: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return clusters, their links, and cut plus orthogonality loss."""
        isolated = (adjacency.sum(dim=-1) == 0) & mask  # [size, max_nodes]
        adjacency = adjacency + torch.diag_embed(isolated.to(adjacency.dtype))
        embedded = self.embed(rows, adjacency, mask).relu()  # [size, max_nodes, dim]
        bound = self.logit_bound
        logits = bound * (self.assignment(embedded) / bound).tanh()  # [size, max_nodes, clusters]
        clusters, links, cut, orthogonality = dense_mincut_pool(embedded, adjacency, logits, mask)
        return clusters, links, cut + orthogonality
