"""Learned readouts that see a graph as the set of its nodes.

Most wrap PyG's own aggregation, between a linear map of the last layer to width ``dim`` and the
classifier. The second-order ones, :class:`SOPool` and :class:`DKEPool`, take products of features
where the plain readouts sum features; as in their papers they read all layers at once, concatenated
node by node. What needs padded tensors runs on buckets of graphs of similar size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import aggr

from .base import History, Readout, last_layer
from .ragged import Bucket, Graphs, pool_buckets
from .readouts import concatenate


class _Sorted:
    """Leaves out a check of PyG's padding aggregations: a traced program has no values to check."""

    def assert_sorted_index(self, index: Tensor | None) -> None:
        """Do nothing: the nodes of a batch are sorted by graph."""


class _SortAggregation(_Sorted, aggr.SortAggregation):
    pass


class _SetTransformerAggregation(_Sorted, aggr.SetTransformerAggregation):
    pass


class _MultisetTransformerAggregation(_Sorted, aggr.GraphMultisetTransformer):
    pass


class SetReadout(Readout):
    """Base of the readouts that aggregate the projected last layer with one PyG module."""

    #: Whether the aggregation pads graphs to one size, and to how many nodes at least.
    padded, fewest_nodes = False, 1
    #: Built by the subclass: ``(rows, index, dim_size) -> [dim_size, width]``.
    aggregation: nn.Module

    def build(self) -> None:
        """Make the modules."""
        self.projection = nn.Linear(self.in_dims[-1], self.dim)

    def node_rows(self, history: History) -> Tensor:
        """Return the projected last layer, ``[num_nodes, dim]``."""
        return self.projection(last_layer(history))

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return the aggregated sets, ``[num_graphs, width]``."""
        rows = self.node_rows(history)  # [num_nodes, dim]
        if not self.padded:
            return self.aggregation(rows, graphs.index, dim_size=graphs.num_graphs)

        def pool(bucket: Bucket) -> Tensor:
            index = bucket.slots // bucket.width  # [bucket's num_nodes]
            width = torch.sym_max(bucket.width, self.fewest_nodes)
            sizes = {"dim_size": bucket.graphs.size(0), "max_num_elements": width}
            return self.aggregation(rows[bucket.nodes], index, **sizes)

        return pool_buckets(graphs, pool)


class AttentionReadout(SetReadout):
    """A softmax-weighted sum of nodes, gated by an MLP.

    From "Gated Graph Sequence Neural Networks" (Li et al., ICLR 2016, arXiv:1511.05493), in the
    form of "Graph Matching Networks" (Li et al., ICML 2019, arXiv:1904.12787).
    """

    def build(self) -> None:
        """Make the modules."""
        super().build()
        gate = nn.Sequential(nn.Linear(self.dim, self.dim), nn.ReLU(), nn.Linear(self.dim, 1))
        self.aggregation = aggr.AttentionalAggregation(gate)
        self.finish(self.dim)


class Set2Set(SetReadout):
    """An LSTM that attends to the set several times.

    From "Order Matters: Sequence to sequence for sets" (Vinyals et al., ICLR 2016,
    arXiv:1511.06391).
    """

    def build(self, *, steps: int = 3) -> None:
        """Make the modules."""
        super().build()
        self.steps = steps
        self.require("steps", steps >= 1, "at least 1")
        self.aggregation = aggr.Set2Set(self.dim, processing_steps=steps)
        self.finish(2 * self.dim)


class SortPool(SetReadout):
    """The first ``k`` nodes in the order of one learned channel, under a 1-D convolution.

    From "An End-to-End Deep Learning Architecture for Graph Classification" (Zhang et al., AAAI
    2018). As there, node features pass a tanh; PyG marks padding with a value below all features,
    which needs them to be bounded.
    """

    padded = True
    #: Channels and width of the convolution over the sorted nodes.
    channels, kernel = 32, 5

    def build(self, *, k: int = 30) -> None:
        """Make the modules."""
        super().build()
        self.k = k
        self.require("k", k >= self.kernel, f"at least {self.kernel}")
        self.fewest_nodes = k
        self.aggregation = _SortAggregation(k)
        self.convolution = nn.Conv1d(self.dim, self.channels, self.kernel)
        self.finish(self.channels * (k - self.kernel + 1))

    def node_rows(self, history: History) -> Tensor:
        """Return the projected last layer within (-1, 1), ``[num_nodes, dim]``."""
        return super().node_rows(history).tanh()

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return the convolved first nodes, ``[num_graphs, width]``."""
        nodes = super().pool_graphs(history, graphs, edge_index)  # [num_graphs, k * dim]
        sequence = nodes.view(-1, self.k, self.dim).transpose(1, 2)  # [num_graphs, dim, k]
        return self.convolution(sequence).relu().flatten(1)


class SetTransformer(SetReadout):
    """Self-attention over the nodes, attention pooling, self-attention over what was pooled.

    From "Set Transformer" (Lee et al., ICML 2019, arXiv:1810.00825), as a readout in "Graph Neural
    Networks with Adaptive Readouts" (Buterez et al., NeurIPS 2022, arXiv:2211.04952).
    """

    padded = True

    def build(self, *, heads: int = 4) -> None:
        """Make the modules."""
        super().build()
        self.heads = heads
        self.require("heads", heads >= 1 and self.dim % heads == 0, f"a divisor of dim={self.dim}")
        self.aggregation = _SetTransformerAggregation(self.dim, heads=heads, layer_norm=True)
        self.finish(self.dim)


class GraphMultisetTransformer(SetReadout):
    """Attention pooling to ``seeds`` nodes, self-attention among them, attention pooling to one.

    From "Accurate Learning of Graph Representations with Graph Multiset Pooling" (Baek et al.,
    ICLR 2021, arXiv:2102.11533).
    """

    padded = True

    def build(self, *, heads: int = 4, seeds: int = 10) -> None:
        """Make the modules."""
        super().build()
        self.heads = heads
        self.require("heads", heads >= 1 and self.dim % heads == 0, f"a divisor of dim={self.dim}")
        self.seeds = seeds
        self.require("seeds", seeds >= 1, "at least 1")
        self.aggregation = _MultisetTransformerAggregation(
            self.dim, k=seeds, heads=heads, layer_norm=True
        )
        self.finish(self.dim)


class SOPool(Readout):
    """Second-order pooling of the concatenated layers ``H [num_nodes, sum(kept_dims)]`` of a graph.

    From "Second-Order Pooling for Graph Neural Networks" (Wang and Ji, TPAMI 2020,
    arXiv:2007.10467). ``bilinear``: the flattened matrix ``(H W)^T (H W)``, with ``W`` a linear map
    to ``rank`` channels. ``attentional``: the vector ``H^T (H m)``, with a learned vector ``m``.
    Neither divides by the number of nodes.
    """

    def build(self, *, mode: str = "bilinear", rank: int = 32) -> None:
        """Make the modules."""
        self.mode = mode
        self.rank = rank
        self.require("mode", mode in ("bilinear", "attentional"), "bilinear or attentional")
        self.require("rank", rank >= 1, "at least 1")
        in_dim, bilinear = sum(self.kept_dims), mode == "bilinear"
        self.map = nn.Linear(in_dim, rank if bilinear else 1, bias=False)
        self.finish(rank * rank if bilinear else in_dim)

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return ``[num_graphs, rank * rank]`` or ``[num_graphs, sum(kept_dims)]``."""
        rows = concatenate(history)  # [num_nodes, sum(kept_dims)]
        mapped = self.map(rows)  # [num_nodes, rank] or [num_nodes, 1]
        if self.mode == "attentional":
            return graphs.sum(mapped * rows)

        def pool(bucket: Bucket) -> Tensor:
            padded = bucket.pad(mapped[bucket.nodes])  # [size, max_nodes, rank], zeros where padded
            return (padded.transpose(1, 2) @ padded).flatten(1)  # [size, rank * rank]

        return pool_buckets(graphs, pool)


class DKEPool(Readout):
    """The nodes of a graph as a Gaussian, embedded as ``W S m``: mean ``m``, covariance ``S``.

    From "Distribution Knowledge Embedding for Graph Pooling" (Chen et al., TKDE 2022,
    arXiv:2109.14333). The plain form never builds ``S``: ``S m`` is a mean over nodes.
    ``robust`` is the paper's variant for graphs of few nodes: noise of ``noise_ratio`` (a 15 dB
    ratio of signal to noise) on the nodes in training, and the square root of ``S`` by
    Newton-Schulz iterations instead of ``S``. To keep those matrices small it maps the layers to
    ``dim`` channels first.
    """

    #: Power of the training noise relative to the features': -15 dB.
    noise_ratio = 10**-1.5
    #: Newton-Schulz iterations, as in the authors' code.
    iterations = 5

    def build(self, *, robust: bool = False) -> None:
        """Make the modules."""
        self.robust = robust
        in_dim = sum(self.kept_dims)
        if robust:
            self.projection = nn.Linear(in_dim, self.dim, bias=False)
        self.map = nn.Linear(self.dim if robust else in_dim, self.dim, bias=False)
        self.finish(self.dim)

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return the embedded distributions, ``[num_graphs, dim]``."""
        rows = concatenate(history)  # [num_nodes, sum(kept_dims)]
        if self.robust:
            rows = self.projection(rows)  # [num_nodes, dim]
            if self.training:
                rows = rows + self._noise(rows, graphs)
        mean = graphs.mean(rows)  # [num_graphs, channels]
        centred = rows - graphs.spread(mean)  # [num_nodes, channels]
        if not self.robust:
            along = (centred * graphs.spread(mean)).sum(dim=1, keepdim=True)  # [num_nodes, 1]
            return self.map(graphs.mean(centred * along))

        def pool(bucket: Bucket) -> Tensor:
            padded = bucket.pad(centred[bucket.nodes])  # [size, max_nodes, dim], zeros where padded
            covariance = padded.transpose(1, 2) @ padded / bucket.sizes.view(-1, 1, 1)
            root = matrix_square_root(covariance, self.iterations)  # [size, dim, dim]
            return (root @ mean[bucket.graphs].unsqueeze(-1)).squeeze(-1)  # [size, dim]

        return self.map(pool_buckets(graphs, pool))

    def _noise(self, rows: Tensor, graphs: Graphs) -> Tensor:
        """Return noise in proportion to each graph's spread, ``[num_nodes, dim]``."""
        values = rows.detach()  # [num_nodes, dim]
        centre = graphs.mean(values).mean(dim=1, keepdim=True)  # [num_graphs, 1]
        squares = (values - graphs.spread(centre)).square().mean(dim=1, keepdim=True)
        power = graphs.spread(graphs.mean(squares))  # [num_nodes, 1]
        return torch.randn_like(values) * (self.noise_ratio * power).sqrt()


def matrix_square_root(matrices: Tensor, iterations: int) -> Tensor:
    """Approximate the square roots of covariance matrices ``[size, dim, dim]``.

    Coupled Newton-Schulz iterations on the matrix divided by its trace (Li et al., "Towards Faster
    Training of Global Covariance Pooling Networks by Iterative Matrix Square Root Normalization",
    CVPR 2018). Five of them leave small eigenvalues unresolved, which is what makes it robust.
    """
    trace = matrices.diagonal(dim1=1, dim2=2).sum(dim=1).clamp_min(1e-6).view(-1, 1, 1)
    identity = torch.eye(matrices.size(-1), dtype=matrices.dtype, device=matrices.device)
    root, inverse = matrices / trace, identity.expand_as(matrices)  # [size, dim, dim]
    for _ in range(iterations):
        step = 1.5 * identity - 0.5 * (inverse @ root)  # [size, dim, dim]
        root, inverse = root @ step, step @ inverse
    return root * trace.sqrt()
