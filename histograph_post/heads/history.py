"""The activations of all layers as a readout is given them, and their statistics by graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import DataError
from ..utils.machine import send
from .ragged import Graphs, ranges

#: One tensor ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
History: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True)
class TableRows:
    """The history of some graphs where it lies, in a table of many graphs.

    Args:
        table: ``[all nodes, L, D]``.
        starts: Row where each graph starts, ``[num_graphs]``.
        sizes: Nodes of each graph, ``[num_graphs]``.
    """

    table: Tensor
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in ("starts", "sizes"):
            # A copy: they are checked here, and must not change before they are used.
            object.__setattr__(self, name, np.array(getattr(self, name), dtype=np.int64))
        starts, sizes = self.starts, self.sizes
        if starts.ndim != 1 or starts.shape != sizes.shape:
            raise DataError(
                f"table: found {list(starts.shape)} starts and {list(sizes.shape)} sizes, "
                "expected one of each for every graph"
            )
        # Kernels read these rows without a check of their own.
        ends = starts + sizes
        if len(starts) and not (
            starts.min() >= 0 and sizes.min() >= 0 and ends.max() <= len(self.table)
        ):
            raise DataError(
                f"table: found rows {starts.min()} to {ends.max()} and graphs of at least "
                f"{sizes.min()} nodes, expected rows of the {len(self.table)} there are"
            )

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of all nodes, graph by graph: ``[num_nodes]``."""
        return ranges(self.starts, self.starts + self.sizes)

    @cached_property
    def nodes(self) -> Tensor:
        """The same where the table is: ``[num_nodes]``."""
        return send([self.rows], self.table.device)[0]

    def copy(self, nodes: Tensor | None = None) -> Tensor:
        """Return the rows as a tensor of their own: ``[num_nodes, L, D]``.

        Args:
            nodes: What :attr:`nodes` is, if that was sent already.
        """
        return self.table.index_select(0, self.nodes if nodes is None else nodes)


#: A first layer more than this many times as wide as every later one is not an embedding.
RAW_INPUT = 2


def kept_dims(in_dims: Sequence[int], history_layers: int | None) -> tuple[int, ...]:
    """Return the widths of the layers a readout uses: the last ``history_layers`` of them.

    ``None`` is all of them, except a first layer more than ``RAW_INPUT`` times as wide as every
    later one: that is the raw input of a network without an input embedding (1,433 words of a
    paper, say). A map of its own would have more weights than the network spends on it, all to be
    learnt from the labels; with Cora's 140 labels it costs every readout 20 points of accuracy.
    """
    if history_layers is not None:
        return tuple(in_dims[-history_layers:])
    raw = len(in_dims) > 1 and in_dims[0] > RAW_INPUT * max(in_dims[1:])
    return tuple(in_dims[1:] if raw else in_dims)


def check_layers(history: History, in_dims: Sequence[int]) -> tuple[int, torch.device]:
    """Refuse a history of other layers, and return its number of nodes and its device.

    Args:
        history: ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
        in_dims: The width each layer must have.
    """
    if isinstance(history, Tensor):
        if history.dim() != 3:
            raise DataError(
                f"history: found shape {list(history.shape)}, expected [nodes, layers, dim]"
            )
        rows, widths, device = (
            [history.size(0)],
            [history.size(2)] * history.size(1),
            history.device,
        )
    else:
        rows = [layer.size(0) for layer in history]
        widths = [layer.size(-1) for layer in history]
        device = history[0].device
    if widths != list(in_dims) or any(count != rows[0] for count in rows):
        raise DataError(
            f"history: found layers of widths {widths} with {sorted(set(rows))} rows, "
            f"expected widths {list(in_dims)} and as many rows each"
        )
    return rows[0], device


def check_batch(
    history: History | TableRows,
    batch: Tensor | Graphs | None,
    num_graphs: int | None,
    in_dims: Sequence[int],
) -> Graphs:
    """Refuse a batch that does not fit; return which graph each node belongs to."""
    if not isinstance(history, TableRows):
        num_nodes, device = check_layers(history, in_dims)
        return Graphs.from_batch(batch, num_nodes, num_graphs, device)
    _, device = check_layers(history.table, in_dims)
    graphs = Graphs.from_batch(batch, int(history.sizes.sum()), num_graphs, device)
    if not np.array_equal(graphs.sizes, history.sizes):
        raise DataError(
            f"batch: found graphs of {graphs.sizes.tolist()} nodes, "
            f"expected those of the rows, {history.sizes.tolist()}"
        )
    return graphs


def layers_of(history: History) -> tuple[Tensor, ...]:
    """Return the layers of a history, each ``[num_nodes, D_l]``, without copying."""
    return history.unbind(1) if isinstance(history, Tensor) else tuple(history)


def map_layers(history: History, change: Callable[[Tensor], Tensor]) -> History:
    """Apply a function to a stacked history at once, or to each layer of one that is not."""
    return change(history) if isinstance(history, Tensor) else [change(layer) for layer in history]


def last_layer(history: History) -> Tensor:
    """Return what the network's own readout consumes: ``[num_nodes, dim]``."""
    return history[:, -1] if isinstance(history, Tensor) else history[-1]


# --- statistics of a graph beyond its mean

#: What is taken of every channel, in the order of :func:`layer_statistics`.
STATISTICS = ("mean", "max", "deviation")

#: What follows from these and the number of nodes: the sum of every channel, and the size of the
#: graph, as a number and as its logarithm.
DERIVED = ("sum", "size")


def layer_statistics(history: History, graphs: Graphs) -> Tensor:
    """Return mean, maximum and deviation over the nodes of each graph, of every channel.

    A mean over nodes hides what only a few of them show. The maximum of a channel keeps the one
    node that shows it most, and the deviation tells a graph of equal nodes from one of different.

    The deviation is that of the population: 0 for a single node. All three are 0 for a graph
    without nodes. Gradients are finite everywhere; where all nodes agree, the deviation has none.

    Args:
        history: ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_graphs, 3, sum(D_l)]``, the layers side by side, first to last.
    """
    # Layer by layer: what is made on the way is as large as one of them.
    return torch.cat([_statistics(layer, graphs) for layer in layers_of(history)], dim=2)


def _statistics(rows: Tensor, graphs: Graphs) -> Tensor:
    """Return the statistics of rows ``[num_nodes, width]``: ``[num_graphs, 3, width]``."""
    mean = graphs.mean(rows)  # [num_graphs, width]
    # The sum over a large graph, or of values far from zero, rounds small differences away. The
    # mean of what is left after subtracting it is the error.
    with torch.no_grad():
        correction = graphs.mean(rows - graphs.spread(mean))  # [num_graphs, width]
    mean = mean + correction
    variance = graphs.mean((rows - graphs.spread(mean)).square())  # [num_graphs, width]
    # The slope of a square root is infinite at zero, also where it is masked afterwards.
    varies = variance > 0
    deviation = torch.where(varies, torch.where(varies, variance, 1.0).sqrt(), 0.0)
    return torch.stack([mean, graphs.max(rows), deviation], dim=1)
