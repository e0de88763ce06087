"""The activations of a cache as training reads them: from memory, or from the file batch by batch.

A history that fits is copied once, standardised on the way, and every batch is rows of it. One that
does not fit stays in the file: a batch is read and standardised when it is needed, by a thread that
prefetches if there is room for it, and its pages are released afterwards. A readout that starts
with the mean over a graph's nodes needs no more than that mean.
"""

from __future__ import annotations

import copy
import math
import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..heads.history import (
    STATISTICS,
    History,
    TableRows,
    last_layer,
    layer_statistics,
    layers_of,
    map_layers,
)
from ..heads.ragged import Graphs, pool_nodes, ranges
from ..heads.standardize import Standardizer
from ..utils.machine import SharedTensor, free_memory, pinned, send

#: Share of a device's free memory for a history that stays there.
DEVICE_SHARE = 1 / 2

#: Bytes of history that are read at a time where all of it is needed.
PIECE_BYTES = 1 << 22


_CPU = torch.device("cpu")


class RowMemory:
    """Memory for rows, which is reused when the last tensor in it is gone.

    It is mapped from the system and unmapped with this object. An allocator would keep much of what
    is freed, above all by another thread: batches of different sizes fragment it.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is not initialised."""
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = self._free.pop() if self._free else None
        if pages is None or len(pages) < num_bytes:
            pages = _map_pages(num_bytes)
        values = np.frombuffer(pages, np.uint8)
        # A tensor made from an array, and every view of it, keeps that array alive.
        weakref.finalize(values, self._free.append, pages).atexit = False
        return torch.from_numpy(values)[:num_bytes].view(dtype).view(shape)


class SharedMemory:
    """Memory for the layers of a history that several processes read."""

    def __init__(self) -> None:
        self.layers: list[SharedTensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor that is not initialised."""
        self.layers.append(SharedTensor(tuple(shape), dtype))
        return self.layers[-1].tensor


def _map_pages(num_bytes: int) -> mmap.mmap:
    """Return memory for so many bytes and half as much again: untouched pages take none."""
    pages = mmap.mmap(-1, num_bytes + num_bytes // 2 + 1, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; not in every build of it
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


# --- the rows of a history


class RowsInMemory:
    """All rows of a history, in memory.

    Args:
        history: ``[rows, L, D]``, or one ``[rows, D_l]`` per layer.
        ptr: First row of each graph, and the number of rows: ``[num_graphs + 1]``.
        memory: Where the history lies, if it is shared with other processes.
        device: Where batches go, if the device has no room for the history: each is sent before it
            is needed.
    """

    def __init__(
        self,
        history: History,
        ptr: np.ndarray,
        memory: SharedMemory | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.ptr = ptr
        #: Whether to prefetch the next batch while this one is used, if there is room for it.
        self.prefetches = device is not None
        self.device = device or last_layer(history).device
        self._history = history
        self._memory = memory
        self._moved: RowsInMemory | None = None

    def on(self, device: torch.device) -> RowsInMemory:
        """Return the same rows on a device: all of them if there is room, else batch by batch."""
        if self.device == device:
            return self
        if self._moved is None or self._moved.device != device:
            num_bytes = sum(layer.nbytes for layer in layers_of(self._history))
            if num_bytes > DEVICE_SHARE * free_memory(device):
                return RowsInMemory(self._history, self.ptr, device=device)
            # Once for all fits of a fold.
            history = map_layers(self._history, lambda layer: layer.to(device))
            self._moved = RowsInMemory(history, self.ptr)
        return self._moved

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._memory is not None  # only shared memory is sent to other processes
        return _shared_rows, (self._memory, isinstance(self._history, Tensor), self.ptr)

    def select(self, graphs: np.ndarray) -> History | TableRows:
        """Return the rows of some graphs, read only.

        They are one tensor, or where they lie in it, or one per layer if their widths differ.
        """
        if np.array_equal(graphs, np.arange(len(self.ptr) - 1)):
            return self._sent(self._history)
        starts, stops = self.ptr[graphs], self.ptr[graphs + 1]  # [graphs] each
        if isinstance(self._history, Tensor) and not self.prefetches:
            return TableRows(self._history, starts, stops - starts)
        return self.nodes(ranges(starts, stops))

    def nodes(self, rows: np.ndarray) -> History:
        """Return copies of some rows, whatever graph they belong to."""
        (chosen,) = send([rows], last_layer(self._history).device)  # [rows]
        return self._sent(map_layers(self._history, lambda layer: layer.index_select(0, chosen)))

    def _sent(self, history: History) -> History:
        if not self.prefetches:
            return history
        return map_layers(history, lambda rows: _send_rows(rows, self.device))


class RowsOnDisk:
    """The rows of a cache that is too large for memory; each batch is read when it is needed.

    To another device they are sent as they are stored, and converted and standardised there: half
    precision is half as much to send.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
        device: Where they go.
    """

    #: Whether to prefetch the next batch while this one is used, if there is room for it.
    prefetches = True

    def __init__(
        self,
        cache: Cache,
        standardizer: Standardizer | None,
        device: torch.device = _CPU,
    ) -> None:
        self.ptr = cache.node_ptr
        self._cache, self._device, self._memory = cache, device, RowMemory()
        self._standardizer = None
        if standardizer is not None:
            self._standardizer = copy.deepcopy(standardizer).to(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsOnDisk, (self._cache, self._standardizer, self._device)

    def on(self, device: torch.device) -> RowsOnDisk:
        """Return the same rows on a device, each batch when it is needed."""
        same = device == self._device
        return self if same else RowsOnDisk(self._cache, self._standardizer, device)

    def select(self, graphs: np.ndarray) -> History:
        """Read the rows of some graphs, and send them to the device."""
        dtype = torch.float32 if self._device.type == "cpu" else self._cache.dtype
        return self._prepare(read_history(self._cache, graphs, dtype, self._memory))

    def nodes(self, rows: np.ndarray) -> History:
        """Read some rows of the only graph, and send them to the device."""
        chosen = torch.from_numpy(rows)
        stored = self._cache[0].history
        found = map_layers(stored, lambda layer: layer.index_select(0, chosen).float())
        self._cache.release()
        return self._prepare(found)

    def _prepare(self, stored: History) -> History:
        history = stored
        if self._device.type != "cpu":
            history = map_layers(stored, lambda rows: _send_rows(rows, self._device).float())
        if self._standardizer is not None:
            self._standardizer.apply_(history)
        return history


#: The rows of a history, graph by graph.
HistoryRows = RowsInMemory | RowsOnDisk


def _send_rows(rows: Tensor, device: torch.device) -> Tensor:
    return pinned(rows, device).to(device, non_blocking=True)


def _shared_rows(memory: SharedMemory, uniform: bool, ptr: np.ndarray) -> RowsInMemory:
    layers = [layer.tensor for layer in memory.layers]
    return RowsInMemory(layers[0] if uniform else layers, ptr, memory)


def history_rows(
    cache: Cache, standardizer: Standardizer | None, memory: SharedMemory | None
) -> RowsInMemory:
    """Return the rows of a cache in memory.

    Args:
        standardizer: Applied to every row.
        memory: Where they are put, if they are shared with other processes.
    """
    history = _read_standardized(cache, np.arange(len(cache)), standardizer, memory)
    return RowsInMemory(history, cache.node_ptr, memory)


def mean_rows(
    cache: Cache, standardizer: Standardizer | None, memory: SharedMemory | None
) -> RowsInMemory:
    """Return the mean of the rows of each graph, a row each; see :func:`history_rows`."""
    piece_memory, pieces = RowMemory(), []
    kept = np.minimum(cache.num_nodes, 1)  # rows of each graph: [num_graphs]
    for graphs in graph_pieces(cache, np.flatnonzero(kept)):
        # Standardised first: the sum of values that hardly differ would lose their difference.
        history = _read_standardized(cache, graphs, standardizer, piece_memory)
        owners = _members(cache, graphs).index  # [num_nodes]
        layers = [history] if isinstance(history, Tensor) else history
        # [graphs, L, D], or one [graphs, D_l] per layer
        pieces.append([pool_nodes(layer, owners, len(graphs), "mean") for layer in layers])
    layers = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    if memory is not None:
        layers = [memory.empty(layer.shape, layer.dtype).copy_(layer) for layer in layers]
    means = layers[0] if cache.manifest.layout.is_uniform else layers
    return RowsInMemory(means, np.concatenate([[0], np.cumsum(kept)]), memory)


def statistics_rows(
    cache: Cache, standardizer: Standardizer | None, memory: SharedMemory | None
) -> RowsInMemory:
    """Return statistics of each graph, a row ``[3, sum(D_l)]`` each; see :func:`history_rows`.

    They are those of :func:`~histograph_post.heads.history.layer_statistics`, computed once for all
    epochs, readouts and seeds of a fold.
    """
    shape = len(cache), len(STATISTICS), sum(cache.widths)
    found = torch.empty(shape) if memory is None else memory.empty(shape, torch.float32)
    for piece, statistics in statistics_pieces(cache, standardizer, np.arange(len(cache))):
        found[torch.from_numpy(piece)] = statistics
    return RowsInMemory(found, np.arange(len(cache) + 1), memory)


def statistics_pieces(
    cache: Cache, standardizer: Standardizer | None, graphs: np.ndarray
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield some graphs and their statistics, ``[graphs, 3, sum(D_l)]``, a piece at a time."""
    memory = RowMemory()
    for piece in graph_pieces(cache, graphs):
        history = _read_standardized(cache, piece, standardizer, memory)
        yield piece, layer_statistics(history, _members(cache, piece))


def _members(cache: Cache, graphs: np.ndarray) -> Graphs:
    """Return which graph each node of these graphs belongs to."""
    return Graphs.of_sizes(cache.num_nodes[graphs], _CPU)


def history_pieces(cache: Cache, graphs: np.ndarray) -> Iterator[History]:
    """Yield the stored rows of some graphs, in pieces of moderate size."""
    memory = RowMemory()
    for piece in graph_pieces(cache, graphs):
        yield read_history(cache, piece, cache.dtype, memory)


def graph_pieces(cache: Cache, graphs: np.ndarray) -> Iterator[np.ndarray]:
    """Cut some graphs into pieces whose rows take a moderate number of bytes."""
    stored_bytes = sum(cache.widths) * cache.dtype.itemsize  # of a node
    bytes_before = np.cumsum(cache.num_nodes[graphs]) * stored_bytes  # [graphs], inclusive
    for piece in np.split(graphs, np.flatnonzero(np.diff(bytes_before // PIECE_BYTES)) + 1):
        if len(piece):
            yield piece


def read_history(
    cache: Cache,
    graphs: np.ndarray,
    dtype: torch.dtype,
    memory: RowMemory | SharedMemory | None = None,
) -> History:
    """Return a copy of the rows of some graphs: ``[num_nodes, L, D]``, or one per layer.

    Memory never holds more than the copy and a small piece of the file.

    Args:
        cache: Where they come from.
        graphs: Which, in the order of the copy.
        dtype: Of the copy.
        memory: Where it is put; new memory by default.
    """
    num_nodes = int(cache.num_nodes[graphs].sum())
    memory = RowMemory() if memory is None else memory
    layers = [
        memory.empty(dataset.shape, dtype)
        for dataset in cache.manifest.layout.activations(num_nodes)
    ]
    for place, parts in cache.pieces(graphs):
        for layer, part in zip(layers, parts, strict=True):
            layer[place].copy_(part)  # converts on the way
    return layers[0] if cache.manifest.layout.is_uniform else layers


def _read_standardized(
    cache: Cache,
    graphs: np.ndarray,
    standardizer: Standardizer | None,
    memory: RowMemory | SharedMemory | None = None,
) -> History:
    """Return a copy of the rows of some graphs in single precision, standardised if wanted."""
    history = read_history(cache, graphs, torch.float32, memory)
    if standardizer is not None:
        standardizer.apply_(history)
    return history
