"""Readouts that coarsen the graph along its edges, each around PyG's own operator.

The sparse ones (:class:`TopKPool`, :class:`SAGPool`, :class:`ASAPool`, :class:`EdgePool`)
alternate a convolution and a coarsening, and sum the mean and max of the nodes left at each level,
the architecture their papers share (Cangea et al., 2018, arXiv:1811.01287).

Coarsening is a discrete choice, and graphs are full of nodes that look alike (the two sides of a
benzene ring): their scores differ by rounding only, and rounding depends on the batch. PyG sorts
them with an unstable sort over the whole batch. To coarsen a graph the same way in any batch, we
count scores that hardly differ as tied, and a tie goes to the node or edge that comes first.

The dense ones (:class:`DiffPool`, :class:`MinCutPool`) softly assign nodes to clusters, on buckets
of graphs of similar size. Their auxiliary losses are left in ``aux_loss`` as the mean over graphs
of the loss of each graph on its own, so that they do not depend on how graphs were padded.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch_geometric.nn import (
    ASAPooling,
    DenseGraphConv,
    EdgePooling,
    GraphConv,
    SAGPooling,
    TopKPooling,
    dense_diff_pool,
    dense_mincut_pool,
)
from torch_geometric.nn.pool.select import SelectOutput, SelectTopK
from torch_geometric.utils import coalesce, scatter

from .base import History, Readout, last_layer
from .ragged import Bucket, Graphs, dense_adjacency, pool_buckets, pool_nodes

#: Neighbouring scores at most this far apart are tied; they are tanh or softmax values.
TIE_TOLERANCE = 1e-5

Coarsened = tuple[Tensor, Tensor, Tensor]


class SparsePool(Readout):
    """Base of the readouts that alternate a convolution and a coarsening.

    Args:
        coarsenings: How many times the graph is coarsened.
    """

    needs_edge_index = True

    def build(self, *, coarsenings: int = 2) -> None:
        """Make the modules."""
        self.coarsenings = coarsenings
        self.require("coarsenings", coarsenings >= 1, "at least 1")
        self.projection = nn.Linear(self.in_dims[-1], self.dim)
        # The mean over neighbours: sums grow without bound in the dense ego networks of IMDB.
        self.convolutions = nn.ModuleList(
            GraphConv(self.dim, self.dim, aggr="mean") for _ in range(coarsenings)
        )
        self.finish(2 * self.dim)
        self.operators = nn.ModuleList(self.build_operator() for _ in range(coarsenings))

    def build_operator(self) -> nn.Module:
        """Return PyG's coarsening operator for nodes of width ``dim``."""
        raise NotImplementedError

    def coarsen(
        self, operator: nn.Module, rows: Tensor, edge_index: Tensor, batch: Tensor
    ) -> Coarsened:
        """Return rows, edges and batch vector of the smaller graphs."""
        rows, edge_index, _, batch, *_ = operator(rows, edge_index, batch=batch)
        return rows, edge_index, batch

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return mean and max over the nodes of each level, summed: ``[num_graphs, 2 * dim]``."""
        assert edge_index is not None  # forward has checked it
        rows = self.projection(last_layer(history)).relu()  # [num_nodes, dim]
        batch, num_graphs = graphs.index, graphs.num_graphs
        levels = []
        for convolution, operator in zip(self.convolutions, self.operators, strict=True):
            rows = convolution(rows, edge_index).relu()  # [num_nodes, dim]
            rows, edge_index, batch = self.coarsen(operator, rows, edge_index, batch)
            mean = pool_nodes(rows, batch, num_graphs, "mean")  # [num_graphs, dim]
            maximum = pool_nodes(rows, batch, num_graphs, "max")  # [num_graphs, dim]
            levels.append(torch.cat([mean, maximum], dim=1))
        return torch.stack(levels).sum(dim=0)


class NodeDroppingPool(SparsePool):
    """Base of the readouts that keep the best-scored share ``ratio`` of the nodes."""

    def build(self, *, coarsenings: int = 2, ratio: float = 0.5) -> None:
        """Make the modules."""
        self.ratio = ratio
        self.require("ratio", 0 < ratio < 1, "a share between 0 and 1")
        super().build(coarsenings=coarsenings)


class TopKPool(NodeDroppingPool):
    """Nodes scored by a learned projection.

    From "Graph U-Nets" (Gao and Ji, ICML 2019, arXiv:1905.05178).
    """

    def build_operator(self) -> nn.Module:
        """Return :class:`torch_geometric.nn.TopKPooling`."""
        operator = TopKPooling(self.dim, self.ratio)
        operator.select = StableTopK(self.dim, self.ratio)
        return operator


class SAGPool(NodeDroppingPool):
    """Nodes scored by a graph convolution.

    From "Self-Attention Graph Pooling" (Lee et al., ICML 2019, arXiv:1904.08082).
    """

    def build_operator(self) -> nn.Module:
        """Return :class:`torch_geometric.nn.SAGPooling`."""
        operator = SAGPooling(self.dim, self.ratio)
        operator.select = StableTopK(1, self.ratio)
        return operator


class ASAPool(NodeDroppingPool):
    """Every neighbourhood a candidate cluster, its nodes weighted by attention, the best kept.

    From "ASAP: Adaptive Structure Aware Pooling for Learning Hierarchical Graph Representations"
    (Ranjan et al., AAAI 2020, arXiv:1911.07979).
    """

    def build_operator(self) -> nn.Module:
        """Return :class:`torch_geometric.nn.ASAPooling`."""
        operator = ASAPooling(self.dim, self.ratio)
        operator.select = StableTopK(1, self.ratio)
        # PyG multiplies the fitness by the sign of this untrained weight, and so keeps the worst
        # clusters for every second seed. The paper keeps the best.
        nn.init.ones_(operator.select.weight).requires_grad_(False)
        return operator

    def coarsen(
        self, operator: nn.Module, rows: Tensor, edge_index: Tensor, batch: Tensor
    ) -> Coarsened:
        """Return rows, edges and batch vector of the smaller graphs."""
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants(False):
            # PyG's operator multiplies CSR matrices, about which torch warns once per process.
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            return super().coarsen(operator, rows, edge_index, batch)


class EdgePool(SparsePool):
    """Edges contracted from the best-scored on, each node at most once.

    From "Edge Contraction Pooling for Graph Neural Networks" (Diehl, 2019, arXiv:1905.10990).
    """

    def build_operator(self) -> nn.Module:
        """Return :class:`torch_geometric.nn.EdgePooling` with a stable order of contraction."""
        return StableEdgePooling(self.dim)

    def coarsen(
        self, operator: nn.Module, rows: Tensor, edge_index: Tensor, batch: Tensor
    ) -> Coarsened:
        """Return rows, edges and batch vector of the smaller graphs."""
        rows, edge_index, batch = operator(rows, edge_index, batch)
        return rows, edge_index, batch


class StableTopK(SelectTopK):
    """PyG's top-k selection, with ties in the order of the nodes."""

    def forward(self, x: Tensor, batch: Tensor) -> SelectOutput:
        """Select the best-scored share of each graph's nodes."""
        x = x.view(len(x), -1)  # [num_nodes, in_channels]
        score = self.act((x * self.weight).sum(dim=-1) / self.weight.norm(p=2))  # [num_nodes]
        order = stable_order(score, batch)  # [num_nodes]
        counts = torch.bincount(batch)  # [num_graphs]
        first = (counts.cumsum(0) - counts)[batch]  # [num_nodes], the graph's first position
        rank = torch.arange(len(batch), device=batch.device) - first  # [num_nodes]
        kept = order[rank < (self.ratio * counts).ceil()[batch]]  # [num_kept]
        return SelectOutput(
            node_index=kept,
            num_nodes=len(batch),
            cluster_index=torch.arange(len(kept), device=batch.device),
            num_clusters=len(kept),
            weight=score[kept],
        )


class StableEdgePooling(EdgePooling):
    """PyG's edge contraction, with ties in the order of the edges."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Coarsened:
        """Contract a maximal matching of the edges; returns rows, edges and batch vector."""
        source, target = edge_index
        score = self.lin(torch.cat([x[source], x[target]], dim=-1)).view(-1)  # [num_edges]
        score = self.compute_edge_score(score, edge_index, x.size(0)) + self.add_to_edge_score
        cluster = [-1] * x.size(0)
        contracted: list[int] = []
        ends = edge_index.t().tolist()
        for edge in stable_order(score, batch[source]).tolist():
            first, second = ends[edge]
            if cluster[first] < 0 and cluster[second] < 0:
                cluster[first] = cluster[second] = len(contracted)
                contracted.append(edge)
        size = len(contracted)
        for node, of in enumerate(cluster):
            if of < 0:
                cluster[node] = size
                size += 1
        clusters = torch.tensor(cluster, device=x.device)  # [num_nodes]
        kept = torch.tensor(contracted, dtype=torch.long, device=x.device)
        weight = torch.cat([score[kept], score.new_ones(size - len(kept))])  # [size]
        rows = scatter(x, clusters, dim=0, dim_size=size, reduce="sum")  # [size, dim]
        new_batch = batch.new_empty(size).scatter_(0, clusters, batch)  # [size]
        return rows * weight.view(-1, 1), coalesce(clusters[edge_index], num_nodes=size), new_batch


def stable_order(score: Tensor, batch: Tensor) -> Tensor:
    """Return the order of falling scores, graph by graph, in which ties keep their order.

    Args:
        score: What to sort by, ``[num_scores]``.
        batch: Graph of each score, ``[num_scores]``.
    """
    order = score.argsort(descending=True)  # [num_scores]
    order = order[batch[order].argsort(stable=True)]  # [num_scores]
    falling, graph = score.detach()[order], batch[order]  # [num_scores] each
    rank_starts = torch.ones_like(graph)  # [num_scores], 0 where tied with the one before
    rank_starts[1:] = (falling[:-1] - falling[1:] > TIE_TOLERANCE) | (graph[:-1] != graph[1:])
    rank = torch.empty_like(order).index_copy_(0, order, rank_starts.cumsum(0))  # [num_scores]
    return rank.argsort(stable=True)


class ClusterPool(Readout):
    """Base: convolution, assignment to clusters, convolution, mean over clusters.

    Args:
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
