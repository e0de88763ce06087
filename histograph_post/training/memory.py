"""Memory for training: how much it may take, and where the rows of a history are put."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..heads.history import STATISTICS
from ..utils.machine import SharedTensor, machine_memory

#: Share of the machine's memory that training may take by default.
MEMORY_SHARE = 2 / 3

#: Share of that for a history in memory; the rest is for batches.
KEPT_SHARE = 3 / 4

#: Share of what training may take for the means, and for the statistics, of graphs, beside a
#: history in memory.
MEANS_SHARE = 1 / 16

#: The same for statistics if the history does not fit into memory: computing them again for every
#: batch takes longer than the rest of the step.
STATISTICS_SHARE = 1 / 4

#: Statistics of up to so many bytes are kept whatever the limit.
SMALL_BYTES = 1 << 20

#: Room for a batch in use, in batches: itself, the one before it, which validation holds until this
#: one is there, and as much again for the activations of a head.
BATCHES_IN_USE = 3


@dataclass(frozen=True)
class MemoryBudget:
    """What training on a cache may take of memory, and what fits into it.

    Args:
        cache: Where the rows come from.
        limit: Bytes that training may take; by default a share of the machine's memory.
    """

    cache: Cache
    limit: int | None = None

    @property
    def allowed(self) -> int:
        """Bytes that training may take."""
        return int(MEMORY_SHARE * machine_memory()) if self.limit is None else self.limit

    def histories_that_fit(self) -> int:
        """Return how many folds fit into memory at once; 0 if rows are read from the file."""
        return int(KEPT_SHARE * self.allowed) // max(row_bytes(self.cache), 1)

    def fits_means(self) -> bool:
        """Say whether the means of all graphs may be kept."""
        num_rows = np.count_nonzero(self.cache.num_nodes)
        num_bytes = num_rows * sum(self.cache.widths) * torch.float32.itemsize
        return bool(num_bytes <= MEANS_SHARE * self.allowed)

    def fits_statistics(self, *, at_once: bool = False) -> bool:
        """Say whether statistics of all graphs may be kept.

        Args:
            at_once: Whether they are used at once, to solve a probe, which takes more memory.
        """
        beside = at_once or self.histories_that_fit() > 0
        share = MEANS_SHARE if beside else STATISTICS_SHARE
        num_bytes = math.prod(self.statistics_shape) * torch.float32.itemsize
        return num_bytes <= max(SMALL_BYTES, share * self.allowed)

    @property
    def statistics_shape(self) -> tuple[int, int, int]:
        """Shape of the statistics of all graphs: ``(num_graphs, 3, sum(D_l))``."""
        return len(self.cache), len(STATISTICS), sum(self.cache.widths)

    def fits_ahead(self, batches: Iterable[np.ndarray]) -> bool:
        """Say whether one of these batches of graphs can be prefetched while another is in use."""
        largest = max((row_bytes(self.cache, graphs) for graphs in batches), default=0)
        return (BATCHES_IN_USE + 1) * largest <= self.allowed

    def batches_that_fit(self, batch_size: int) -> int:
        """Return how many fits can train on batches of so many graphs at once, at least one."""
        kept = row_bytes(self.cache) if self.histories_that_fit() else 0
        _, _, needed = self._batch_bytes(batch_size)
        return max(1, int((self.allowed - kept) / max(needed, 1.0)))

    def batch_note(self, batch_size: int) -> str | None:
        """Return a note if training on batches of so many graphs will exceed the limit."""
        allowed = self.allowed
        average, largest, needed = self._batch_bytes(batch_size)
        if needed <= allowed:
            return None
        fits = f"{int(allowed / average)} would fit"
        return (
            f"memory limit: batches of {min(batch_size, len(self.cache))} graphs take about "
            f"{needed / 1e6:.3g} MB, expected at most {allowed / 1e6:.3g} MB; "
            f"{fits if largest <= allowed else 'the largest graph alone is too large'}"
        )

    def _batch_bytes(self, batch_size: int) -> tuple[float, int, float]:
        """Return the bytes in use for the average graph, the largest one, and a batch of graphs."""
        cache = self.cache
        largest = BATCHES_IN_USE * row_bytes(cache, np.array([cache.num_nodes.argmax()]))
        average = BATCHES_IN_USE * row_bytes(cache) / len(cache)
        return average, largest, max(min(batch_size, len(cache)) * average, largest)


def row_bytes(cache: Cache, graphs: np.ndarray | None = None) -> int:
    """Return the bytes of the rows of some graphs, or of all, in single precision."""
    num_nodes = cache.num_nodes if graphs is None else cache.num_nodes[graphs]
    return int(num_nodes.sum()) * sum(cache.widths) * torch.float32.itemsize


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
