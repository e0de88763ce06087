"""The activations of all layers as a head reads them: checked, grouped, in blocks, never copied.

A block of rows small enough for the processor's cache is converted (half precision, one tensor per
layer, standardisation) and used up before the next one is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import DataError
from .ragged import Graphs

#: One tensor ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
History: TypeAlias = Tensor | Sequence[Tensor]

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


def split_layers(history: History, in_dims: Sequence[int]) -> tuple[Tensor, ...]:
    """Return the layers of a history, each ``[num_nodes, D_l]``, without copying.

    Args:
        history: ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
        in_dims: The width each layer must have.
    """
    if isinstance(history, Tensor) and history.dim() != 3:
        raise DataError(
            f"history: found shape {list(history.shape)}, expected [nodes, layers, dim]"
        )
    layers = history.unbind(1) if isinstance(history, Tensor) else tuple(history)
    widths = [layer.size(-1) for layer in layers]
    rows = [layer.size(0) for layer in layers]
    if widths != list(in_dims) or any(count != rows[0] for count in rows):
        raise DataError(
            f"history: found layers of widths {widths} with {sorted(set(rows))} rows, "
            f"expected widths {list(in_dims)} and as many rows each"
        )
    return layers


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
    """A batch as the layer stage reads it.

    Args:
        stacks: The layers, one stack per width.
        last: The last layer, standardised, in the precision to compute in, ``[num_nodes, D_last]``.
        graphs: Which graph each node belongs to.
    """

    stacks: tuple[LayerStack, ...]
    last: Tensor
    graphs: Graphs

    @classmethod
    def read(
        cls,
        history: History,
        graphs: Graphs,
        *,
        groups: Sequence[Sequence[int]],
        statistics: Sequence[tuple[Tensor, Tensor]] | None,
        dtype: torch.dtype,
    ) -> HistoryBatch:
        """Group the last layers of a history by width.

        Args:
            history: One tensor ``[num_nodes, L, D]``, or one ``[num_nodes, D_l]`` per layer.
            graphs: Which graph each node belongs to.
            groups: The layers of each width, counted from the first layer that is kept.
            statistics: Mean and scale of each layer of the history; ``None`` to use it as it is.
            dtype: Precision to compute in.
        """
        depth = history.size(1) if isinstance(history, Tensor) else len(history)
        skipped = depth - sum(len(group) for group in groups)
        stacks = []
        for group in groups:
            members = [skipped + layer for layer in group]
            if isinstance(history, Tensor):  # of one width, so this is the only group
                tensors: tuple[Tensor, ...] = (history[:, skipped:],)
            else:
                tensors = tuple(history[member] for member in members)
            mean = inverse_scale = None
            if statistics is not None:
                mean = torch.stack([statistics[member][0] for member in members])  # [L, D]
                scale = torch.stack([statistics[member][1] for member in members])  # [L, D]
                inverse_scale = scale.reciprocal()
            stacks.append(LayerStack(tensors, mean, inverse_scale, dtype))
        last = (history[:, -1] if isinstance(history, Tensor) else history[-1]).to(dtype)
        if statistics is not None:
            last = (last - statistics[-1][0]) / statistics[-1][1]  # [num_nodes, D_last]
        return cls(tuple(stacks), last, graphs)
