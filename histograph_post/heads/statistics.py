"""Statistics of the nodes of a graph, layer by layer: what a graph is beyond its mean.

A mean over nodes hides what only a few of them show. The maximum of a channel keeps the one node
that shows it most, and the deviation tells a graph of equal nodes from one of different ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .history import History
from .ragged import Graphs, pool_nodes
from .standardize import Standardizer

#: What is taken of every channel, in the order of :func:`layer_statistics`.
STATISTICS = ("mean", "max", "deviation")

#: What follows from these and the number of nodes: the sum of every channel, and the size of the
#: graph, as it is and as its logarithm.
DERIVED = ("sum", "size")

#: The size is two columns beside thousands, and a penalty on weights that treats all columns alike
#: would all but forbid its use: it is scaled to so many deviations.
SIZE_DEVIATION = 10.0


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
    # Layer by layer: what is made on the way is as large as one of them.
    layers = history.unbind(1) if isinstance(history, Tensor) else history
    return torch.cat([_statistics(layer, graphs) for layer in layers], dim=2)


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


class GraphStatistics(nn.Module):
    """Statistics of a graph as one row, each column at one scale.

    A property that adds up over the nodes, such as the weight of a molecule, is in the sum of a
    channel and not in its mean; so sums and the size can be asked for besides.

    Args:
        in_dims: Width of each layer that is used.
        names: Some of :data:`STATISTICS` and :data:`DERIVED`.
    """

    def __init__(self, in_dims: Sequence[int], names: Sequence[str]) -> None:
        super().__init__()
        self.names = tuple(names)
        groups = [width for name in names for width in ((1, 1) if name == "size" else in_dims)]
        #: Centres and scales the columns, once it is fitted to the rows of training graphs.
        self.scaling = Standardizer(groups)
        self.width = sum(groups)
        self._widths = [2 if name == "size" else sum(in_dims) for name in names]
        # Sums and sizes are as large as graphs are: they count once their scale is known.
        for columns in self._columns(*DERIVED):
            self.scaling.scale[columns] = torch.inf

    def forward(self, statistics: Tensor, counts: Tensor) -> Tensor:
        """Return the row of every graph: ``[num_graphs, width]``.

        Args:
            statistics: As :func:`layer_statistics` gives them, ``[num_graphs, 3, sum(D_l)]``.
            counts: Nodes of each graph, ``[num_graphs]``.
        """
        rows = self.rows(statistics, counts)  # [num_graphs, width], of its own
        return rows.sub_(self.scaling.mean).div_(self.scaling.scale)

    def rows(self, statistics: Tensor, counts: Tensor) -> Tensor:
        """Return the row of every graph as it is, before it is scaled: ``[num_graphs, width]``."""
        sizes = counts.to(statistics.dtype).unsqueeze(-1)  # [num_graphs, 1]
        columns, names = [], self.names
        if names[: len(STATISTICS)] == STATISTICS:  # they lie side by side: copied at once
            columns, names = [statistics.flatten(1)], names[len(STATISTICS) :]
        for name in names:
            if name == "size":
                columns += [sizes, sizes.clamp(min=1).log()]  # [num_graphs, 1] each
            elif name == "sum":
                columns.append(statistics[:, 0] * sizes)  # [num_graphs, sum(D_l)]
            else:
                columns.append(statistics[:, STATISTICS.index(name)])  # [num_graphs, sum(D_l)]
        return torch.cat(columns, dim=1)

    def fit(self, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Take the scale of every column from training graphs.

        Args:
            batches: Statistics and counts, as :meth:`forward` takes them.
        """
        rows = (self.rows(*batch) for batch in batches)  # [num_graphs, width] each
        self.scaling.fit(list(batch.split(self.scaling.in_dims, dim=1)) for batch in rows)
        for columns in self._columns("size"):
            self.scaling.scale[columns] /= SIZE_DEVIATION

    def _columns(self, *names: str) -> Iterator[slice]:
        """Yield where statistics of these names stand in a row."""
        start = 0
        for name, width in zip(self.names, self._widths, strict=True):
            if name in names:
                yield slice(start, start + width)
            start += width

    def extra_repr(self) -> str:
        """Describe the module in one line."""
        return "+".join(self.names)


class WideDropout(nn.Dropout):
    """Dropout of rows so wide that drawing the mask would cost more than using it.

    On a CPU, PyTorch draws 64 random bits for every value. Sixteen are enough: values are dropped
    with a probability that is at most 2^-17 off, and scaled by just that.
    """

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows ``[num_rows, width]``, of which values are dropped while training."""
        if not self.training or not self.p or rows.device.type != "cpu":
            return super().forward(rows)
        words = torch.empty(rows.numel() // 4 + 1, dtype=torch.int64)
        bits = words.random_(-(1 << 63), None).view(torch.int16)[: rows.numel()]  # of each value
        dropped = min(round(self.p * (1 << 16)), (1 << 16) - 1)  # of the 2^16 that may be drawn
        kept = bits.to(rows.dtype).ge_(dropped - (1 << 15)).view_as(rows)  # 1 or 0, as they lie
        return rows * kept.mul_((1 << 16) / ((1 << 16) - dropped))  # [num_rows, width]
