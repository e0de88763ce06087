"""The activations of a cache as training reads them: from memory, or from the file batch by batch.

A history that fits is copied once, standardised on the way, and every batch is rows of it.
One that does not fit stays in the file: a batch is read and standardised when its turn comes, in a
thread that works ahead where there is room for it, and what was read is handed back to the system.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .heads.history import History, TableRows
from .heads.standardize import Standardizer
from .machine_memory import machine_memory
from .ranges import ranges
from .storage import Cache

#: Share of the machine's memory that training may take, unless told otherwise.
MEMORY_SHARE = 2 / 3

#: Share of that for a history that is kept; the rest is for batches.
KEPT_SHARE = 3 / 4

#: Batches that there is room for where one is in use: itself, the one before it, which is held
#: while validating until this one is there, and as much again for what a head makes of it.
BATCHES_IN_USE = 3

#: Bytes of history that are read at a time where all of it is needed.
PIECE_BYTES = 1 << 22

_Item = TypeVar("_Item")


class HistoryRows(Protocol):
    """The rows of a history, graph by graph."""

    #: Whether it pays to fetch the next batch while this one is used, if there is room for it.
    read_ahead: bool

    def select(self, graphs: np.ndarray) -> History | TableRows:
        """Return the rows of some graphs to look at: a tensor, one per layer, or where they lie."""
        ...


class RowsInMemory:
    """All rows of a cache, in single precision, standardised once.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
    """

    read_ahead = False

    def __init__(self, cache: Cache, standardizer: Standardizer | None) -> None:
        self._ptr = cache.node_ptr  # [num_graphs + 1]
        self._uniform = cache.manifest.layout.is_uniform
        # One [num_nodes, L, D], or one [num_nodes, D_l] per layer.
        self._layers = read_rows(cache, np.arange(len(cache)), torch.float32)
        if standardizer is not None:
            standardizer.apply_(self._layers[0] if self._uniform else self._layers)

    def select(self, graphs: np.ndarray) -> History | TableRows:
        """Return the rows of some graphs: where they lie, or copies of layers of many widths."""
        if np.array_equal(graphs, np.arange(len(self._ptr) - 1)):
            return self._layers[0] if self._uniform else self._layers
        starts, stops = self._ptr[graphs], self._ptr[graphs + 1]  # [graphs] each
        if self._uniform:
            return TableRows(self._layers[0], starts, stops - starts)
        nodes = torch.from_numpy(ranges(starts, stops))  # [num_nodes]
        return [layer.index_select(0, nodes) for layer in self._layers]


class RowsOnDisk:
    """The rows of a cache that is too large for memory; each batch is read when it is asked for.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
    """

    read_ahead = True

    def __init__(self, cache: Cache, standardizer: Standardizer | None) -> None:
        self._cache = cache
        self._standardizer = standardizer
        self._memory = RowMemory()

    def select(self, graphs: np.ndarray) -> History:
        """Read the rows of some graphs."""
        layers = read_rows(self._cache, graphs, torch.float32, self._memory)
        history = layers[0] if self._cache.manifest.layout.is_uniform else layers
        if self._standardizer is not None:
            self._standardizer.apply_(history)
        return history


def history_rows(
    cache: Cache, standardizer: Standardizer | None, *, memory_limit: int | None = None
) -> HistoryRows:
    """Return the rows of a cache, in memory if they fit.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
        memory_limit: Bytes that training may take: the rows or, if they need more than their share,
            the batches that are read of them. By default a share of the machine's memory.
    """
    fits = row_bytes(cache) <= KEPT_SHARE * allowed_memory(memory_limit)
    return (RowsInMemory if fits else RowsOnDisk)(cache, standardizer)


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
    largest = BATCHES_IN_USE * row_bytes(cache, np.array([cache.num_nodes.argmax()]))
    average = BATCHES_IN_USE * row_bytes(cache) / len(cache)
    batch_size = min(batch_size, len(cache))
    needed = max(batch_size * average, largest)
    if needed <= allowed:
        return None
    fits = f"{int(allowed / average)} would fit"
    return (
        f"memory limit: batches of {batch_size} graphs take about {needed / 1e6:.3g} MB, "
        f"expected at most {allowed / 1e6:.3g} MB; "
        f"{fits if largest <= allowed else 'the largest graph alone is too large'}"
    )


def allowed_memory(memory_limit: int | None) -> int:
    """Return the bytes that training may take: a share of the machine's, unless told otherwise."""
    return int(MEMORY_SHARE * machine_memory()) if memory_limit is None else memory_limit


def history_pieces(cache: Cache, graphs: np.ndarray) -> Iterator[History]:
    """Yield the stored rows of some graphs, a moderate piece at a time."""
    stored_bytes = sum(cache.widths) * cache.dtype.itemsize  # of a node
    bytes_before = np.cumsum(cache.num_nodes[graphs]) * stored_bytes  # [graphs], inclusive
    pieces = np.split(graphs, np.flatnonzero(np.diff(bytes_before // PIECE_BYTES)) + 1)
    memory = RowMemory()
    for piece in pieces:
        if len(piece):
            rows = read_rows(cache, piece, cache.dtype, memory)
            yield rows[0] if cache.manifest.layout.is_uniform else rows


def read_rows(
    cache: Cache, graphs: np.ndarray, dtype: torch.dtype, memory: RowMemory | None = None
) -> list[Tensor]:
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
    return layers


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
