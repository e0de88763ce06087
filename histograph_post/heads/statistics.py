"""Statistics of the nodes of a graph, layer by layer: what a graph is beyond its mean.

A mean over nodes hides what only a few of them show. The maximum of a channel keeps the one node
that shows it most, and the deviation tells a graph of equal nodes from one of different ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import pool_nodes
from .history import History
from .ragged import Graphs

#: What is taken of every channel, in the order of :func:`layer_statistics`.
STATISTICS = ("mean", "max", "deviation")


def layer_statistics(history: History, graphs: Graphs) -> Tensor:
    """Return mean, maximum and deviation over the nodes of each graph, of every channel.

    The deviation is that of the population: 0 for a single node. All three are 0 for a graph
    without nodes. Gradients are finite everywhere; where all nodes agree, the deviation has none.

    Args:
        history: ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_graphs, 3, sum(D_l)]``, the layers side by side, first to last.
    """
    if isinstance(history, Tensor):
        return _statistics(history.flatten(1), graphs)
    return torch.cat([_statistics(layer, graphs) for layer in history], dim=2)


def _statistics(rows: Tensor, graphs: Graphs) -> Tensor:
    """Return the statistics of rows ``[num_nodes, width]``: ``[num_graphs, 3, width]``."""
    mean = graphs.mean(rows)  # [num_graphs, width]
    # The sum of a large graph, or of values far from zero, rounds small differences away. What
    # is left of the rows once it is taken off says by how much.
    with torch.no_grad():
        correction = graphs.mean(rows - graphs.spread(mean))  # [num_graphs, width]
    mean = mean + correction
    variance = graphs.mean((rows - graphs.spread(mean)).square())  # [num_graphs, width]
    # The slope of a square root is infinite at zero, also where it is masked afterwards.
    varies = variance > 0
    deviation = torch.where(varies, torch.where(varies, variance, 1.0).sqrt(), 0.0)
    largest = pool_nodes(rows, graphs.index, graphs.num_graphs, "max")  # [num_graphs, width]
    return torch.stack([mean, largest, deviation], dim=1)
