"""The plain readouts: the last layer, or a fixed mixture of all layers, then a classifier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_geometric.nn.models import JumpingKnowledge as JumpingKnowledgeMixture

from ..utils import LEVELS
from .base import History, Readout, last_layer
from .history import STATISTICS, layer_statistics, layers_of
from .ragged import Graphs, pool_nodes


class LastLayer(Readout):
    """The last layer alone: nodes reduced by mean, sum or max, then the MLP classifier.

    For nodes and links there is nothing to reduce, and this is an MLP probe of the last layer.
    """

    levels = LEVELS

    def build(self, *, reduce: str = "mean") -> None:
        """Make the modules."""
        self.reduce = reduce
        self.require("reduce", reduce in ("mean", "sum", "max"), "mean, sum or max")
        self.reads_means = reduce == "mean"
        self.finish(self.in_dims[-1])

    def node_rows(self, history: History) -> Tensor:
        """Return the last layer, ``[num_nodes, in_dims[-1]]``."""
        return last_layer(history)

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return the reduced nodes, ``[num_graphs, in_dims[-1]]``."""
        return pool_nodes(self.node_rows(history), graphs.index, graphs.num_graphs, self.reduce)


class LinearProbe(Readout):
    """The mean of the last layer and one linear map: what the checkpoint's features hold as is."""

    levels = LEVELS
    reads_means = True
    solved = True

    def build(self) -> None:
        """Make the modules."""
        self.finish(self.in_dims[-1], linear=True)

    def node_rows(self, history: History) -> Tensor:
        """Return the last layer, ``[num_nodes, in_dims[-1]]``."""
        return last_layer(history)


class Concat(Readout):
    """All layers side by side and one linear map; for graphs, the concatenated mean pools."""

    levels = LEVELS
    reads_means = True
    solved = True

    def build(self, *, history_layers: int | None = None) -> None:
        """Make the modules."""
        self.keep_layers(history_layers)
        self.finish(sum(self.feature_widths), linear=True)

    def node_rows(self, history: History) -> Tensor:
        """Return the layers side by side, ``[num_nodes, sum(kept_dims)]``."""
        return concatenate(history)

    @property
    def feature_widths(self) -> tuple[int, ...]:
        """The widths of the layers."""
        return self.kept_dims


class Probe(Concat):
    """Mean, maximum and deviation of every layer over the nodes, and one linear map.

    What a graph is beyond its mean, without anything to learn before the classifier. For a node
    there is nothing to reduce, and this is a :class:`Concat`.
    """

    levels = ("graph", "node")
    reads_means = False

    def pool_graphs(self, history: History, graphs: Graphs, edge_index: Tensor | None) -> Tensor:
        """Return statistic after statistic of all layers, ``[num_graphs, 3 * sum(kept_dims)]``."""
        return self.of_statistics(layer_statistics(history, graphs))

    def of_statistics(self, statistics: Tensor) -> Tensor:
        """Return the same from what is known of all layers, ``[num_graphs, 3, sum(in_dims)]``."""
        return statistics[..., -sum(self.kept_dims) :].flatten(1)

    @property
    def feature_widths(self) -> tuple[int, ...]:
        """The widths of the layers, once for every statistic."""
        return self.kept_dims * (len(STATISTICS) if self.level == "graph" else 1)


class LayerMean(Readout):
    """The mean over all layers, then as :class:`LastLayer` with the mean over nodes."""

    levels = LEVELS
    reads_means = True

    def build(self, *, history_layers: int | None = None) -> None:
        """Make the modules."""
        self.keep_layers(history_layers)
        self.align = AlignLayers(self.kept_dims, self.dim)
        self.finish(self.align.width)

    def node_rows(self, history: History) -> Tensor:
        """Return the mean over layers, ``[num_nodes, width]``."""
        return self.align(history).mean(dim=1)


class JumpingKnowledge(Readout):
    """Layers joined node by node, then as :class:`LastLayer` with the mean over nodes.

    From "Representation Learning on Graphs with Jumping Knowledge Networks" (Xu et al., ICML 2018,
    arXiv:1806.03536): concatenated (``cat``), the largest value of each channel (``max``), or
    weighted per node by attention scores of a bidirectional LSTM over the layers (``lstm``).
    """

    levels = LEVELS

    def build(self, *, history_layers: int | None = None, mode: str = "cat") -> None:
        """Make the modules."""
        self.keep_layers(history_layers)
        self.mode = mode
        self.require("mode", mode in ("cat", "max", "lstm"), "cat, max or lstm")
        self.reads_means = mode == "cat"
        if mode == "cat":
            self.finish(sum(self.kept_dims))
            return
        self.align = AlignLayers(self.kept_dims, self.dim, always=mode == "lstm")
        if mode == "lstm":
            # PyG's LSTM has num_layers * channels / 2 hidden units, 34 million weights for 64
            # layers of width 64. The number only sets that size: 2 makes it `dim` at any depth.
            self.mixture = JumpingKnowledgeMixture("lstm", channels=self.dim, num_layers=2)
        self.finish(self.align.width)

    def node_rows(self, history: History) -> Tensor:
        """Return the joined layers, ``[num_nodes, width]``."""
        if self.mode == "cat":
            return concatenate(history)
        layers = self.align(history)  # [num_nodes, num_layers, width]
        if self.mode == "max":
            return layers.amax(dim=1)
        return self.mixture(layers.unbind(1))


class AlignLayers(nn.Module):
    """Layers of one width: as they are where they agree, through a linear map each where not."""

    def __init__(self, in_dims: Sequence[int], dim: int, *, always: bool = False) -> None:
        super().__init__()
        self.maps = nn.ModuleList()
        if always or len(set(in_dims)) > 1:
            self.maps.extend(nn.Linear(in_dim, dim) for in_dim in in_dims)
        self.width = dim if len(self.maps) else in_dims[0]

    def forward(self, history: History) -> Tensor:
        """Return ``[num_nodes, num_layers, width]``."""
        if not len(self.maps):
            return history if isinstance(history, Tensor) else torch.stack(list(history), dim=1)
        layers = zip(self.maps, layers_of(history), strict=True)
        return torch.stack([linear(layer) for linear, layer in layers], dim=1)


def concatenate(history: History) -> Tensor:
    """Return all layers side by side, without a copy of a stacked history: ``[num_nodes, sum]``."""
    return history.flatten(1) if isinstance(history, Tensor) else torch.cat(list(history), dim=1)
