"""The activations of a cache as training reads them: from memory, or from the file batch by batch.

A history that fits is copied once, standardised on the way, and every batch is rows of it.
One that does not fit stays in the file: a batch is read and standardised when its turn comes, in a
thread that works ahead where there is room for it, and what was read is handed back to the system.
A readout that takes the mean of a graph's nodes before anything else needs no more than that mean.
"""

from __future__ import annotations

import copy
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..heads.history import History, TableRows, last_layer
from ..heads.ragged import Graphs, pool_nodes, ranges
from ..heads.standardize import Standardizer
from ..heads.statistics import STATISTICS, layer_statistics
from ..utils.machine import SharedTensor, free_memory, machine_memory, pinned, send

#: Share of the machine's memory that training may take, unless told otherwise.
MEMORY_SHARE = 2 / 3

#: Share of that for a history that is kept; the rest is for batches.
KEPT_SHARE = 3 / 4

#: Share of what a device has left for a history that stays there.
DEVICE_SHARE = 1 / 2

#: Share of what training may take for the means, and for the statistics, of graphs, which may be
#: kept beside a history.
MEANS_SHARE = 1 / 16

#: The same for statistics where the history is too large to be kept: taking them again with every
#: batch costs more than all that is done with them.
STATISTICS_SHARE = 1 / 4

#: Statistics of so many bytes are kept whatever the limit: what is trained does not depend on it.
SMALL_BYTES = 1 << 20

#: Batches that there is room for where one is in use: itself, the one before it, which is held
#: while validating until this one is there, and as much again for what a head makes of it.
BATCHES_IN_USE = 3

#: Bytes of history that are read at a time where all of it is needed.
PIECE_BYTES = 1 << 22

_Item = TypeVar("_Item")


class HistoryRows(Protocol):
    """The rows of a history, graph by graph."""

    #: First row of each graph, and the number of rows: ``[num_graphs + 1]``.
    ptr: np.ndarray
    #: Whether it pays to fetch the next batch while this one is used, if there is room for it.
    read_ahead: bool

    def on(self, device: torch.device) -> HistoryRows:
        """Return the same rows on a device."""
        ...

    def select(self, graphs: np.ndarray) -> History | TableRows:
        """Return the rows of some graphs to look at: a tensor, one per layer, or where they lie."""
        ...

    def nodes(self, rows: np.ndarray) -> History:
        """Return copies of some rows, whatever graph they belong to."""
        ...


class RowsInMemory:
    """All rows of a history, in memory.

    Args:
        history: ``[rows, L, D]``, or one ``[rows, D_l]`` per layer.
        ptr: First row of each graph, and the number of rows: ``[num_graphs + 1]``.
        memory: Where the history lies, if other processes are to use it as well.
    """

    read_ahead = False

    def __init__(
        self, history: History, ptr: np.ndarray, memory: SharedMemory | None = None
    ) -> None:
        self.ptr = ptr
        self._history = history
        self._memory = memory
        self._moved: RowsInMemory | None = None

    def on(self, device: torch.device) -> HistoryRows:
        """Return the same rows on a device: all of them, if there is room, or batch by batch."""
        layers = [self._history] if isinstance(self._history, Tensor) else self._history
        if layers[0].device == device:
            return self
        if self._moved is None or self._moved.device != device:
            num_bytes = sum(layer.nbytes for layer in layers)
            if num_bytes > DEVICE_SHARE * free_memory(device):
                return SentRows(self, device)
            moved = [layer.to(device) for layer in layers]  # once for all fits of a fold
            history = moved[0] if isinstance(self._history, Tensor) else moved
            self._moved = RowsInMemory(history, self.ptr)
        return self._moved

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return last_layer(self._history).device

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._memory is not None  # nothing else is sent to other processes
        return _shared_rows, (self._memory, isinstance(self._history, Tensor), self.ptr)

    def select(self, graphs: np.ndarray) -> History | TableRows:
        """Return the rows of some graphs: where they lie, or copies of layers of many widths."""
        if np.array_equal(graphs, np.arange(len(self.ptr) - 1)):
            return self._history
        starts, stops = self.ptr[graphs], self.ptr[graphs + 1]  # [graphs] each
        if isinstance(self._history, Tensor):
            return TableRows(self._history, starts, stops - starts)
        (rows,) = send([ranges(starts, stops)], self.device)  # [rows]
        return [layer.index_select(0, rows) for layer in self._history]

    def nodes(self, rows: np.ndarray) -> History:
        """Return copies of some rows, whatever graph they belong to."""
        (chosen,) = send([rows], self.device)
        if isinstance(self._history, Tensor):
            return self._history.index_select(0, chosen)  # [rows, L, D]
        return [layer.index_select(0, chosen) for layer in self._history]


class RowsOnDisk:
    """The rows of a cache that is too large for memory; each batch is read when it is asked for.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
    """

    read_ahead = True

    def __init__(self, cache: Cache, standardizer: Standardizer | None) -> None:
        self.ptr = cache.node_ptr
        self._cache = cache
        self._standardizer = standardizer
        self._memory = RowMemory()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowsOnDisk, (self._cache, self._standardizer)

    def on(self, device: torch.device) -> HistoryRows:
        """Return the same rows on a device, each batch when it is asked for."""
        return self if device.type == "cpu" else StoredRows(self._cache, self._standardizer, device)

    def select(self, graphs: np.ndarray) -> History:
        """Read the rows of some graphs."""
        return _read_standardized(self._cache, graphs, self._standardizer, self._memory)

    def nodes(self, rows: np.ndarray) -> History:
        """Read some rows of the one graph there is."""
        chosen, stored = torch.from_numpy(rows), self._cache[0].history
        layers = [stored] if isinstance(stored, Tensor) else stored
        found = [layer.index_select(0, chosen).float() for layer in layers]
        history = found[0] if isinstance(stored, Tensor) else found
        self._cache.release()
        if self._standardizer is not None:
            self._standardizer.apply_(history)
        return history


class SentRows:
    """Rows of the host's memory, of which each batch is sent to a device ahead of its turn.

    Args:
        rows: In memory, and more than the device has room for.
        device: Where they go.
    """

    read_ahead = True

    def __init__(self, rows: RowsInMemory, device: torch.device) -> None:
        self.ptr = rows.ptr
        self._rows, self._device = rows, device

    def on(self, device: torch.device) -> HistoryRows:
        """Return the same rows on another device."""
        return self._rows.on(device)

    def select(self, graphs: np.ndarray) -> History:
        """Send the rows of some graphs; the host does not wait until they are there."""
        found = self._rows.select(graphs)
        history = found.copy() if isinstance(found, TableRows) else found
        return _each(history, lambda rows: _send_rows(rows, self._device))

    def nodes(self, rows: np.ndarray) -> History:
        """Send copies of some rows, whatever graph they belong to."""
        return _each(self._rows.nodes(rows), lambda each: _send_rows(each, self._device))


class StoredRows:
    """Rows of a cache that is too large for memory, sent as they are stored, ahead of their turn.

    They are widened and standardised on the device: half precision is half as much to send.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
        device: Where they go.
    """

    read_ahead = True

    def __init__(
        self, cache: Cache, standardizer: Standardizer | None, device: torch.device
    ) -> None:
        self.ptr = cache.node_ptr
        self._cache, self._device, self._memory = cache, device, RowMemory()
        self._standardizer = copy.deepcopy(standardizer)
        if self._standardizer is not None:
            self._standardizer.to(device)

    def on(self, device: torch.device) -> HistoryRows:
        """Return the same rows on another device."""
        standardizer = None if self._standardizer is None else self._standardizer.cpu()
        return RowsOnDisk(self._cache, standardizer).on(device)

    def select(self, graphs: np.ndarray) -> History:
        """Read the rows of some graphs and send them."""
        stored = read_history(self._cache, graphs, self._cache.dtype, self._memory)
        history = _each(stored, lambda rows: _send_rows(rows, self._device).to(torch.float32))
        if self._standardizer is not None:
            self._standardizer.apply_(history)
        return history

    def nodes(self, rows: np.ndarray) -> History:
        """Read some rows of the one graph there is, and send them."""
        history = _each(
            RowsOnDisk(self._cache, None).nodes(rows), lambda each: _send_rows(each, self._device)
        )
        if self._standardizer is not None:
            self._standardizer.apply_(history)
        return history


def _each(history: History, change: Callable[[Tensor], Tensor]) -> History:
    """Do something with a history, or with each layer of it."""
    return change(history) if isinstance(history, Tensor) else [change(rows) for rows in history]


def _send_rows(rows: Tensor, device: torch.device) -> Tensor:
    return pinned(rows, device).to(device, non_blocking=True)


def _shared_rows(memory: SharedMemory, uniform: bool, ptr: np.ndarray) -> RowsInMemory:
    layers = [layer.tensor for layer in memory.layers]
    return RowsInMemory(layers[0] if uniform else layers, ptr, memory)


def history_rows(
    cache: Cache,
    standardizer: Standardizer | None,
    *,
    memory_limit: int | None = None,
    memory: SharedMemory | None = None,
) -> HistoryRows:
    """Return the rows of a cache, in memory if they fit.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
        memory_limit: Bytes that training may take: the rows or, if they need more than their share,
            the batches that are read of them. By default a share of the machine's memory.
        memory: Where they are put, if other processes are to use them as well.
    """
    if not histories_that_fit(cache, memory_limit):
        return RowsOnDisk(cache, standardizer)
    history = _read_standardized(cache, np.arange(len(cache)), standardizer, memory)
    return RowsInMemory(history, cache.node_ptr, memory)


def histories_that_fit(cache: Cache, memory_limit: int | None) -> int:
    """Return how many copies of the rows of a cache, each standardised otherwise, may be kept."""
    return int(KEPT_SHARE * allowed_memory(memory_limit)) // max(row_bytes(cache), 1)


def mean_rows(
    cache: Cache,
    standardizer: Standardizer | None,
    *,
    memory_limit: int | None = None,
    memory: SharedMemory | None = None,
) -> RowsInMemory | None:
    """Return the mean of the rows of each graph as its one row; None if that takes too much memory.

    Args:
        cache: Where the rows come from.
        standardizer: Applied to every row.
        memory_limit: Bytes that training may take.
        memory: Where they are put, if other processes are to use them as well.
    """
    kept = np.minimum(cache.num_nodes, 1)  # rows of each graph: [num_graphs]
    num_bytes = int(kept.sum()) * sum(cache.widths) * torch.float32.itemsize
    if num_bytes > MEANS_SHARE * allowed_memory(memory_limit):
        return None
    pieces, piece_memory = [], RowMemory()
    for graphs in graph_pieces(cache, np.flatnonzero(kept)):
        # Standardised first: a sum of values that hardly differ would round their difference away.
        history = _read_standardized(cache, graphs, standardizer, piece_memory)
        sizes = cache.num_nodes[graphs]
        owners = torch.from_numpy(np.repeat(np.arange(len(graphs)), sizes))  # [num_nodes]
        layers = [history] if isinstance(history, Tensor) else history
        # [graphs, L, D], or one [graphs, D_l] per layer
        pieces.append([pool_nodes(layer, owners, len(graphs), "mean") for layer in layers])
    layers = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    if memory is not None:
        layers = [memory.empty(layer.shape, layer.dtype).copy_(layer) for layer in layers]
    means = layers[0] if cache.manifest.layout.is_uniform else layers
    return RowsInMemory(means, np.concatenate([[0], np.cumsum(kept)]), memory)


def statistics_rows(
    cache: Cache,
    standardizer: Standardizer | None,
    *,
    memory_limit: int | None = None,
    memory: SharedMemory | None = None,
) -> RowsInMemory | None:
    """Return statistics of every graph as its one row, ``[3, sum(D_l)]``; None if they do not fit.

    They are those of :func:`~histograph_post.heads.statistics.layer_statistics`, taken once for all
    epochs, and all readouts and seeds of a fold.

    Args:
        cache: Where the rows come from.
        standardizer: Applied to every row first.
        memory_limit: Bytes that training may take.
        memory: Where they are put, if other processes are to use them as well.
    """
    kept = histories_that_fit(cache, memory_limit) > 0
    if not statistics_fit(cache, memory_limit, MEANS_SHARE if kept else STATISTICS_SHARE):
        return None
    shape = _statistics_shape(cache)
    found = torch.empty(shape) if memory is None else memory.empty(shape, torch.float32)
    graphs = np.arange(len(cache))
    for piece, statistics in statistics_pieces(cache, standardizer, graphs):
        found[torch.from_numpy(piece)] = statistics
    return RowsInMemory(found, np.arange(len(cache) + 1), memory)


def statistics_fit(cache: Cache, memory_limit: int | None, share: float = MEANS_SHARE) -> bool:
    """Say whether statistics of all graphs fit into a share of the memory that training may take.

    By default one that leaves room for what is made of all of them at once, to solve a probe.
    """
    num_bytes = math.prod(_statistics_shape(cache)) * torch.float32.itemsize
    return num_bytes <= max(SMALL_BYTES, share * allowed_memory(memory_limit))


def _statistics_shape(cache: Cache) -> tuple[int, int, int]:
    return len(cache), len(STATISTICS), sum(cache.widths)


def statistics_pieces(
    cache: Cache, standardizer: Standardizer | None, graphs: np.ndarray
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield some graphs and their statistics, ``[graphs, 3, sum(D_l)]``, a piece at a time."""
    memory = RowMemory()
    for piece in graph_pieces(cache, graphs):
        history = _read_standardized(cache, piece, standardizer, memory)
        sizes = cache.num_nodes[piece]
        owners = torch.from_numpy(np.repeat(np.arange(len(piece)), sizes))  # [num_nodes]
        members = Graphs(owners, torch.from_numpy(sizes), sizes)
        yield piece, layer_statistics(history, members)


def row_bytes(cache: Cache, graphs: np.ndarray | None = None) -> int:
    """Return the bytes of the rows of some graphs, or of all, in single precision."""
    num_nodes = cache.num_nodes if graphs is None else cache.num_nodes[graphs]
    return int(num_nodes.sum()) * sum(cache.widths) * torch.float32.itemsize


def fits_ahead(cache: Cache, batches: Iterable[np.ndarray], memory_limit: int | None) -> bool:
    """Say whether there is room for one of these batches of graphs beside those in use."""
    largest = max((row_bytes(cache, graphs) for graphs in batches), default=0)
    return (BATCHES_IN_USE + 1) * largest <= allowed_memory(memory_limit)


def batch_note(cache: Cache, batch_size: int, memory_limit: int | None) -> str | None:
    """Say so if training on batches of so many graphs will not stay within the limit."""
    allowed = allowed_memory(memory_limit)
    batch_size = min(batch_size, len(cache))
    average, largest, needed = _batch_bytes(cache, batch_size)
    if needed <= allowed:
        return None
    fits = f"{int(allowed / average)} would fit"
    return (
        f"memory limit: batches of {batch_size} graphs take about {needed / 1e6:.3g} MB, "
        f"expected at most {allowed / 1e6:.3g} MB; "
        f"{fits if largest <= allowed else 'the largest graph alone is too large'}"
    )


def batches_that_fit(cache: Cache, batch_size: int, memory_limit: int | None) -> int:
    """Return how many fits can train on batches of so many graphs at once, at least one."""
    allowed = allowed_memory(memory_limit)
    kept = row_bytes(cache) if histories_that_fit(cache, memory_limit) else 0
    _, _, needed = _batch_bytes(cache, min(batch_size, len(cache)))
    return max(1, int((allowed - kept) / max(needed, 1.0)))


def _batch_bytes(cache: Cache, batch_size: int) -> tuple[float, int, float]:
    """Return the bytes in use for the average graph, the largest one, and a batch of graphs."""
    largest = BATCHES_IN_USE * row_bytes(cache, np.array([cache.num_nodes.argmax()]))
    average = BATCHES_IN_USE * row_bytes(cache) / len(cache)
    return average, largest, max(batch_size * average, largest)


def allowed_memory(memory_limit: int | None) -> int:
    """Return the bytes that training may take: a share of the machine's, unless told otherwise."""
    return int(MEMORY_SHARE * machine_memory()) if memory_limit is None else memory_limit


def history_pieces(cache: Cache, graphs: np.ndarray) -> Iterator[History]:
    """Yield the stored rows of some graphs, a moderate piece at a time."""
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

    At no time is there more than the copy and a small piece of the file.

    Args:
        cache: Where they come from.
        graphs: Which, in the order of the copy.
        dtype: Of the copy.
        memory: Where it is kept; memory of its own by default.
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
    """Return a copy of the rows of some graphs in single precision, standardised if asked for."""
    history = read_history(cache, graphs, torch.float32, memory)
    if standardizer is not None:
        standardizer.apply_(history)
    return history


class RowMemory:
    """Memory for rows, which is used again when the last tensor that lies in it is gone.

    It comes from the system and goes back there with this object. Of what an allocator frees it
    keeps much, above all if another thread has asked for it: batches of ever different sizes leave
    holes that the next one does not fit in.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of any values."""
        num_bytes = math.prod(shape) * dtype.itemsize
        pages = self._free.pop() if self._free else None
        if pages is None or len(pages) < num_bytes:
            pages = _map_pages(num_bytes)
        values = np.frombuffer(pages, np.uint8)
        # What torch makes of an array keeps that array, whoever it is shared with.
        weakref.finalize(values, self._free.append, pages).atexit = False
        return torch.from_numpy(values)[:num_bytes].view(dtype).view(shape)


class SharedMemory:
    """Memory for the layers of a history that several processes read."""

    def __init__(self) -> None:
        self.layers: list[SharedTensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor of any values."""
        self.layers.append(SharedTensor(tuple(shape), dtype))
        return self.layers[-1].tensor


def _map_pages(num_bytes: int) -> mmap.mmap:
    """Return memory for so many bytes, and room for more: what is not touched takes none."""
    pages = mmap.mmap(-1, num_bytes + num_bytes // 2 + 1, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux; not in every build of it
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def working_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield items, of which the next one is made in a thread while the last one is used."""
    nothing = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        coming: Future[_Item | object] = pool.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = pool.submit(next, items, nothing)
            yield item  # type: ignore[misc]  # not the mark of the end
