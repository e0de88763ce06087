"""The rows of some graphs as a shard stores them, filled layer by layer while a model runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .precision import TORCH_TYPES, check_range


class RowBlock:
    """Rows of the graphs ``graphs`` of a shard; every layer is put into its place once.

    Args:
        layout: What a shard holds.
        graphs: Positions of the graphs in their shard.
        num_nodes: Their nodes together.
        graph_of_row: Names the graph of a row, for errors.
        where: Names the shard, for errors.
        memory: Flat, of the stored type, and large enough: from :class:`BlockMemory`.
    """

    def __init__(
        self,
        layout: Layout,
        graphs: range,
        num_nodes: int,
        *,
        graph_of_row: Callable[[int], str],
        where: str,
        memory: Tensor,
    ) -> None:
        self.graphs = graphs
        self.num_nodes = num_nodes
        self.memory = memory
        self._layout = layout
        self._graph_of_row = graph_of_row
        self._where = where
        values = memory[: num_nodes * sum(layout.widths)]
        if layout.is_uniform:
            rows = values.view(num_nodes, layout.num_layers, layout.widths[0])
            self._stored = [rows]  # [num_nodes, num_layers, dim]
            #: Where each layer goes, ``[num_nodes, width]``.
            self.layers = list(rows.unbind(1))
        else:
            parts = values.split([num_nodes * width for width in layout.widths])
            sized = zip(parts, layout.widths, strict=True)
            self._stored = [part.view(num_nodes, width) for part, width in sized]
            self.layers = self._stored

    @torch.no_grad()
    def put(self, layer: int, values: Tensor) -> Tensor:
        """Check one layer, ``[num_nodes, width]``, and copy it; return it as it is stored.

        The copy converts, interleaves and leaves the device at once.
        """
        check_range(values, layer, self._layout, self._graph_of_row, self._where)
        return self.layers[layer].copy_(values)

    def arrays(self) -> list[np.ndarray]:
        """Return the rows of every dataset of activations: one, or one per layer."""
        # NumPy has no bfloat16: hand over its bits.
        return [
            (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
            for rows in self._stored
        ]


class BlockMemory:
    """Memory for blocks of up to ``num_nodes`` nodes, handed on from those that are written.

    Memory that is new every time costs more than what is copied into it.
    """

    def __init__(self, layout: Layout, num_nodes: int) -> None:
        self._size = num_nodes * sum(layout.widths)
        self._dtype = TORCH_TYPES[layout.dtype]
        self._free: list[Tensor] = []

    def take(self) -> Tensor:
        """Return memory that nobody uses."""
        return self._free.pop() if self._free else torch.empty(self._size, dtype=self._dtype)

    def give(self, block: RowBlock) -> None:
        """Take back the memory of a block."""
        self._free.append(block.memory)
