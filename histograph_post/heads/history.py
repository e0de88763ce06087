"""The activations of all layers as a head reads them: checked, grouped, in blocks, never copied.

A block of rows small enough for the processor's cache is converted (half precision, one tensor per
layer, standardisation) and used up before the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import DataError
from .ragged import Graphs
from .ranges import ranges

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
        # Nothing checks it where they are read.
        ends = starts + sizes
        if len(starts) and not (
            starts.min() >= 0 and sizes.min() >= 0 and ends.max() <= len(self.table)
        ):
            raise DataError(
                f"table: found rows {starts.min()} to {ends.max()} and graphs of at least "
                f"{sizes.min()} nodes, expected rows of the {len(self.table)} there are"
            )

    @cached_property
    def ptr(self) -> npt.NDArray[np.int64]:
        """First node of each graph in the batch, and the number of nodes: ``[num_graphs + 1]``."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def nodes(self) -> Tensor:
        """The rows of all nodes, graph by graph: ``[num_nodes]``."""
        nodes = torch.from_numpy(ranges(self.starts, self.starts + self.sizes))
        return nodes.to(self.table.device)

    def copy(self) -> Tensor:
        """Return the rows as a tensor of their own: ``[num_nodes, L, D]``."""
        return self.table.index_select(0, self.nodes)

    def last(self) -> Tensor:
        """Return the last layer: ``[num_nodes, D]``."""
        return self.table[:, -1].index_select(0, self.nodes)


#: Bytes of history, and of what is made of it, at a time: in a processor's cache, but enough rows
#: that calling a kernel costs less than what it does; more on an accelerator.
CPU_BLOCK_BYTES = 1 << 22
ACCELERATOR_BLOCK_BYTES = 1 << 26

#: A first layer more than so many times as wide as every later one is no embedding.
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


def split_layers(history: History, in_dims: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the layers of a history, each ``[num_nodes, D_l]``, without copying.

    Args:
        history: ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
        in_dims: The width each layer must have.
    """
    check_layers(history, in_dims)
    return history.unbind(1) if isinstance(history, Tensor) else tuple(history)


def last_layer(history: History) -> Tensor:
    """Return what the network's own readout consumes: ``[num_nodes, dim]``."""
    return history[:, -1] if isinstance(history, Tensor) else history[-1]


@dataclass(frozen=True)
class LayerStack:
    """Layers of one width: one tensor ``[num_nodes, L, D]``, or ``L`` tensors ``[num_nodes, D]``.

    Args:
        tensors: The stacked tensor alone, or one tensor per layer.
        mean: Subtracted from every row, ``[L, D]``; ``None`` when rows are used as they are.
        inverse_scale: Multiplied with every row after that, ``[L, D]``.
        dtype: Precision to compute in.
    """

    tensors: tuple[Tensor, ...]
    mean: Tensor | None
    inverse_scale: Tensor | None
    dtype: torch.dtype

    @property
    def stacked(self) -> bool:
        """Whether the layers come as one tensor."""
        return self.tensors[0].dim() == 3

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return self.tensors[0].size(1) if self.stacked else len(self.tensors)

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return self.tensors[0].size(0)

    @property
    def width(self) -> int:
        """Channels per layer."""
        return self.tensors[0].size(-1)

    def slices(self, made: int = 0) -> Iterator[slice]:
        """Yield the node ranges to work on, one after the other.

        Args:
            made: Rows of the history's width that are made for every node on the way.
        """
        on_cpu = self.tensors[0].device.type == "cpu"
        budget = CPU_BLOCK_BYTES if on_cpu else ACCELERATOR_BLOCK_BYTES
        row_bytes = max(1, (self.num_layers + made) * self.width * self.dtype.itemsize)
        step = max(1, budget // row_bytes)
        for start in range(0, self.num_nodes, step):
            yield slice(start, min(start + step, self.num_nodes))

    def block(self, rows: slice) -> Tensor:
        """Return the standardised history of some nodes: ``[rows, L, D]``."""
        if self.stacked:
            block = self.tensors[0][rows]  # [rows, L, D]
        else:
            block = torch.stack([layer[rows] for layer in self.tensors], dim=1)  # [rows, L, D]
        block = block.to(self.dtype)
        if self.mean is not None and self.inverse_scale is not None:
            block = (block - self.mean).mul_(self.inverse_scale)
        return block


@dataclass(frozen=True)
class HistoryBatch:
    """A batch as the layer stage reads it; what is not asked for is not made.

    Args:
        history: One tensor ``[num_nodes, L, D]``, one ``[num_nodes, D_l]`` per layer, or rows of a
            table.
        graphs: Which graph each node belongs to.
        groups: The layers of each width, counted from the first layer that is kept.
        statistics: Mean and scale of each layer of the history; ``None`` to use it as it is.
        dtype: Precision to compute in.
    """

    history: History | TableRows
    graphs: Graphs
    groups: Sequence[Sequence[int]]
    statistics: Sequence[tuple[Tensor, Tensor]] | None
    dtype: torch.dtype

    @cached_property
    def last(self) -> Tensor:
        """The last layer, standardised, in the precision to compute in: ``[num_nodes, D_last]``."""
        history = self.history
        last = history.last() if isinstance(history, TableRows) else last_layer(history)
        last = last.to(self.dtype)
        if self.statistics is not None:
            last = (last - self.statistics[-1][0]) / self.statistics[-1][1]
        return last

    @cached_property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The layers, one stack per width."""
        history = self.history.copy() if isinstance(self.history, TableRows) else self.history
        depth = history.size(1) if isinstance(history, Tensor) else len(history)
        skipped = depth - sum(len(group) for group in self.groups)
        stacks = []
        for group in self.groups:
            members = [skipped + layer for layer in group]
            if isinstance(history, Tensor):  # of one width, so this is the only group
                tensors: tuple[Tensor, ...] = (history[:, skipped:],)
            else:
                tensors = tuple(history[member] for member in members)
            mean = inverse_scale = None
            if self.statistics is not None:
                mean = torch.stack([self.statistics[member][0] for member in members])  # [L, D]
                scale = torch.stack([self.statistics[member][1] for member in members])  # [L, D]
                inverse_scale = scale.reciprocal()
            stacks.append(LayerStack(tensors, mean, inverse_scale, self.dtype))
        return tuple(stacks)

    def rows(self) -> TableRows | None:
        """Return the layers that are kept where they lie; None if they are to be changed first."""
        if self.statistics is not None or len(self.groups) > 1:
            return None
        history = self.history
        if isinstance(history, Tensor):
            history = TableRows(history, self.graphs.ptr[:-1], self.graphs.sizes)
        if not isinstance(history, TableRows) or history.table.dtype != self.dtype:
            return None
        kept = len(self.groups[0])
        if kept == history.table.size(1):
            return history
        return replace(history, table=history.table[:, -kept:])
