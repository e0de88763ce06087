"""Learned readouts that see a graph as the set of its nodes in the last layer.

Each wraps PyG's own aggregation, between a linear map of the last layer to width ``dim`` and the
classifier. Aggregations on padded tensors run on buckets of graphs of similar size.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch_geometric.nn import aggr

from .base import History, Readout, last_layer
from .ragged import Bucket, Graphs, pool_buckets


class SetReadout(Readout):
    """Base of the readouts that aggregate the projected last layer with one PyG module."""

    #: Whether the aggregation pads graphs to one size.
    padded = False
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
            return self.aggregation(rows[bucket.nodes], index, dim_size=len(bucket.graphs))

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
        self.aggregation = aggr.SortAggregation(k)
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
        self.aggregation = aggr.SetTransformerAggregation(self.dim, heads=heads, layer_norm=True)
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
        self.aggregation = aggr.GraphMultisetTransformer(
            self.dim, k=seeds, heads=heads, layer_norm=True
        )
        self.finish(self.dim)
