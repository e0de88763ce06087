"""Rows of activations on their way into a shard.

While the model runs, each layer is checked and copied into its place in a :class:`RowBlock`; full
blocks are then written to the datasets of the shard from top to bottom, plain or compressed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from h5py import h5d, h5s
from torch import Tensor

from ..errors import CacheError
from .layout import Dataset, Layout, compress
from .shard import TORCH_TYPES


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
        _check_range(values, layer, self._layout, self._graph_of_row, self._where)
        return self.layers[layer].copy_(values)

    def arrays(self) -> list[np.ndarray]:
        """Return the rows of every dataset of activations: one, or one per layer."""
        # NumPy has no bfloat16: hand over its bits.
        return [
            (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
            for rows in self._stored
        ]


#: What to store activations as that the type of the layout loses.
_WIDER = {"float16": "bfloat16 or float32", "bfloat16": "float32", "float32": "a smaller scale"}


def _check_range(
    values: Tensor, layer: int, layout: Layout, graph_of_row: Callable[[int], str], where: str
) -> None:
    """Refuse activations of a layer that are not finite, or that the storage type would lose.

    One pass for the extremes; which graph is to blame is only searched on failure. A layer is lost
    when it is not all zero, yet below the smallest normal number of the type.
    """
    if not values.shape[0]:
        return
    # NaN survives both.  [2]
    low, high = torch.stack(torch.aminmax(values)).tolist()
    stored = TORCH_TYPES[layout.dtype]
    limits = torch.finfo(stored)
    largest = max(-low, high)
    if not (math.isfinite(low) and math.isfinite(high)):
        problem = "a value that is not finite, expected finite activations"
        wrong = ~torch.isfinite(values)
    elif largest > limits.max:
        problem = (
            f"{largest:.6g}, expected at most {limits.max:.6g} in {layout.dtype}; "
            f"use {_WIDER[layout.dtype]}"
        )
        wrong = values.double().abs() > limits.max
    elif 0 < largest < limits.tiny and values.dtype != stored:
        problem = (
            f"nothing above {largest:.3g}, expected at least {limits.tiny:.3g} in "
            f"{layout.dtype}, which would lose it; use {_WIDER[layout.dtype]}"
        )
        wrong = values.double().abs() == largest
    else:
        return
    row = int(wrong.any(dim=1).nonzero()[0])
    raise CacheError(
        f"{where}: graph {graph_of_row(row)!r}, layer {layout.layer_names[layer]!r}: "
        f"found {problem}"
    )


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


class RowWriter(Protocol):
    """A dataset that takes its rows in order."""

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""

    def finish(self) -> None:
        """Write what is still held back."""


class PlainWriter:
    """Stores rows as they are: one write per block."""

    def __init__(self, dataset: h5d.DatasetID, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._done = 0

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""
        if not block.size:
            return
        place = self._dataset.get_space()
        place.select_hyperslab((self._done, *(0 for _ in block.shape[1:])), block.shape)
        try:
            self._dataset.write(h5s.create_simple(block.shape), place, np.ascontiguousarray(block))
        except OSError as error:
            raise cannot_write(self._path, error) from None
        self._done += len(block)

    def finish(self) -> None:
        """Write nothing more: no row is ever held back."""


class CompressedWriter:
    """Stores rows in compressed chunks; what does not fill a chunk yet is held back."""

    def __init__(self, dataset: h5d.DatasetID, spec: Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._chunk = np.zeros((spec.chunk_rows, *spec.shape[1:]), spec.dtype)
        self._start = 0
        self._filled = 0

    def write(self, block: np.ndarray) -> None:
        """Take the next rows, and write the chunks that are full."""
        while len(block):
            taken = min(len(block), len(self._chunk) - self._filled)
            self._chunk[self._filled : self._filled + taken] = block[:taken]
            self._filled += taken
            block = block[taken:]
            if self._filled == len(self._chunk):
                self._write_chunk()

    def finish(self) -> None:
        """Write the last chunk, padded with zeros as HDF5 wants it."""
        if self._filled:
            self._chunk[self._filled :] = 0
            self._write_chunk()

    def _write_chunk(self) -> None:
        origin = (self._start, *(0 for _ in self._chunk.shape[1:]))
        try:
            self._dataset.write_direct_chunk(origin, compress(self._chunk))
        except OSError as error:
            raise cannot_write(self._path, error) from None
        self._start += len(self._chunk)
        self._filled = 0


def cannot_write(path: Path, error: Exception) -> CacheError:
    """Return the error for a shard that the file system did not take, as on a full disk."""
    reason = str(error).partition("\n")[0]
    return CacheError(f"{path}: cannot be written ({reason})")
