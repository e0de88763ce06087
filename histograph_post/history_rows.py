"""The activations of a cache as training reads them: from memory, or from the file batch by batch.

A history that fits is copied once, standardised on the way, and every batch is a gather from it.
One that does not fit stays in the file: a batch is read and standardised when its turn comes, in a
thread that works ahead, and what was read is handed back to the system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .heads.history import History
from .heads.standardize import Standardizer
from .storage import Cache

#: Share of the machine's memory that a history may take, unless told otherwise.
MEMORY_SHARE = 0.5

#: Bytes of history that are read at a time where all of it is needed.
PIECE_BYTES = 1 << 22

_Item = TypeVar("_Item")


class HistoryRows(Protocol):
    """The rows of a history, graph by graph."""

    #: Whether it pays to fetch the next batch while this one is used.
    read_ahead: bool

    def select(self, graphs: np.ndarray) -> History:
        """Return a copy of the rows of some graphs, ``[num_nodes, L, D]`` or one per layer."""
        ...


class RowsInMemory:
    """All rows of a cache, in single precision, standardised once.

    Args:
        cache: Where they come from.
        standardizer: Applied to every row.
    """

    read_ahead = False

    def __init__(self, cache: Cache, standardizer: Standardizer | None) -> None:
        self._ptr = np.concatenate([[0], np.cumsum(cache.num_nodes)])  # [num_graphs + 1]
        self._layers = [  # one [num_nodes, L, D], or one [num_nodes, D_l] per layer
            torch.empty(dataset.shape)
            for dataset in cache.manifest.layout.activations(int(self._ptr[-1]))
        ]
        self._uniform = cache.manifest.layout.is_uniform
        done = 0
        for piece in history_pieces(cache, np.arange(len(cache))):
            parts = [piece] if isinstance(piece, Tensor) else list(piece)
            rows = slice(done, done + len(parts[0]))
            targets = [layer[rows] for layer in self._layers]
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
            if standardizer is not None:
                standardizer.apply_(targets[0] if self._uniform else targets)
            done = rows.stop

    def select(self, graphs: np.ndarray) -> History:
        """Return a copy of the rows of some graphs."""
        nodes = torch.from_numpy(ranges(self._ptr[graphs], self._ptr[graphs + 1]))  # [num_nodes]
        found = [layer.index_select(0, nodes) for layer in self._layers]
        return found[0] if self._uniform else found


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

    def select(self, graphs: np.ndarray) -> History:
        """Read the rows of some graphs."""
        found = self._cache.gather(graphs).history
        # Mapped pages count as this process's memory until they are handed back.
        self._cache.release()
        history = found.float() if isinstance(found, Tensor) else [layer.float() for layer in found]
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
        memory_limit: Bytes that the rows may take; by default a share of the machine's memory.
    """
    needed = int(cache.num_nodes.sum()) * sum(cache.widths) * torch.float32.itemsize
    if memory_limit is None:
        memory_limit = int(MEMORY_SHARE * machine_memory())
    kind = RowsInMemory if needed <= memory_limit else RowsOnDisk
    return kind(cache, standardizer)


def machine_memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def history_pieces(cache: Cache, graphs: np.ndarray) -> Iterator[History]:
    """Yield the stored rows of some graphs, a moderate piece at a time."""
    row_bytes = sum(cache.widths) * cache.dtype.itemsize
    bytes_before = np.cumsum(cache.num_nodes[graphs]) * row_bytes  # [graphs], inclusive
    pieces = np.split(graphs, np.flatnonzero(np.diff(bytes_before // PIECE_BYTES)) + 1)
    for piece in pieces:
        if len(piece):
            yield cache.gather(piece).history
            cache.release()


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return all numbers from ``starts[i]`` to ``stops[i] - 1``, for each i in turn."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)


def working_ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield items, of which the next one is made in a thread while the last one is used."""
    nothing = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead") as pool:
        coming: Future[_Item | object] = pool.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = pool.submit(next, items, nothing)
            yield item  # type: ignore[misc]  # not the mark of the end
