"""Second-order readouts: products of features, where the plain ones sum features.

As in their papers they read all layers at once, concatenated node by node.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import History, Readout
from .ragged import Bucket, Graphs, pool_buckets
from .readouts import concatenate


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
