"""A cache as training uses it, and how much memory training on it may take."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..data.labels import NonEdges
from ..errors import CacheError
from ..heads.base import last_layer
from ..heads.history import STATISTICS, TableRows
from ..heads.standardize import Standardizer
from ..tasks import Task
from ..utils.machine import machine_memory
from .history_rows import (
    HistoryRows,
    RowsInMemory,
    RowsOnDisk,
    SharedMemory,
    history_pieces,
    history_rows,
    mean_rows,
    statistics_pieces,
    statistics_rows,
)

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
        num_values = len(self.cache) * len(STATISTICS) * sum(self.cache.widths)
        num_bytes = num_values * torch.float32.itemsize
        return num_bytes <= max(SMALL_BYTES, share * self.allowed)

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


# --- the cache

_Made = TypeVar("_Made")

#: Derived data that take much memory.
_LARGE = ("history", "means", "statistics")


@dataclass(frozen=True)
class SharedRows:
    """What a fit in another process reads of a cache, in shared memory."""

    #: Label rows of the graphs that it is standardised by; None if it is not.
    rows: np.ndarray | None
    #: What was made for these rows, by name.
    made: Mapping[str, Any]


class LoadedCache:
    """A cache as training uses it: opened once, for every fold, seed and readout.

    Args:
        cache: The cache.
        memory_limit: Bytes that training may take, for all rows or, if they need too much of it,
            for the batches that are read. By default a share of the machine's memory.
    """

    def __init__(self, cache: Cache, *, memory_limit: int | None = None) -> None:
        self.cache = cache
        self.level = cache.manifest.layout.level
        self.labels = cache.labels()
        self.label_ptr = cache.label_ptr
        self.ptr = cache.node_ptr  # [num_graphs + 1]
        self.memory = MemoryBudget(cache, memory_limit)
        self._shares = False
        #: What was made last under each name, and for which rows: the readouts and seeds of one
        #: fold all need the same.
        self._made: dict[str, tuple[np.ndarray | None, Any]] = {}
        #: Labelled pairs of all graphs, nodes numbered through the cache: ``[2, rows]``.
        self.pairs = cache.label_pairs() if self.level == "link" else None

    # Another process opens the cache itself, and :meth:`use` adds what is shared with it.
    def __reduce__(self) -> tuple[Any, ...]:
        return partial(LoadedCache, memory_limit=self.memory.limit), (self.cache,)

    @cached_property
    def edge_index(self) -> Tensor | None:
        """Edges of all graphs, nodes numbered through the cache: ``[2, num_edges]``."""
        return self.cache.edge_index() if self.cache.manifest.layout.has_edges else None

    @cached_property
    def edge_ptr(self) -> np.ndarray:
        """First edge of each graph, and the number of edges: ``[num_graphs + 1]``."""
        if self.edge_index is None:
            raise CacheError(f"{self.cache.path}: found no edges, which this readout needs")
        # The edges of a graph follow those of the graph before it.
        owners = np.searchsorted(self.ptr, self.edge_index[0].numpy(), side="right") - 1
        return np.searchsorted(owners, np.arange(len(self.ptr)))

    @cached_property
    def non_edges(self) -> list[NonEdges]:
        """The pairs of each graph that are neither edges nor labelled.

        Labelled pairs of every part are left out, links and negatives alike: training on any of
        them would leak which ones the others are.
        """
        assert self.pairs is not None  # links only
        found = []
        for graph, first in enumerate(self.ptr[:-1]):
            known = [self.pairs[:, self.label_ptr[graph] : self.label_ptr[graph + 1]]]
            if self.edge_index is not None:
                known.append(self.edge_index[:, self.edge_ptr[graph] : self.edge_ptr[graph + 1]])
            pairs = torch.cat(known, dim=1).numpy() - first  # [2, num_known]
            found.append(NonEdges(int(self.ptr[graph + 1] - first), pairs))
        return found

    def own_logits(self, task: Task) -> np.ndarray | None:
        """Return the model's own outputs as logits ``[rows, width]``; None if they do not fit."""
        outputs = self.cache.outputs()
        if outputs is None or not task.accepts(outputs.shape[1]):
            return None
        own = self.cache.manifest.own_metrics
        return task.logits(outputs) if own is not None and own.get("probabilities") else outputs

    def last_layer(self) -> Tensor:
        """Return what the network's own readout consumes: ``[num_nodes, D_last]``."""
        pieces = history_pieces(self.cache, np.arange(len(self.cache)))
        # A view would keep all layers of its piece.
        return torch.cat([last_layer(piece).to(torch.float32, copy=True) for piece in pieces])

    def standardizer(self, rows: np.ndarray) -> Standardizer:
        """Return the standardisation by the graphs of these label rows."""

        def fit() -> Standardizer:
            graphs = np.unique(np.searchsorted(self.label_ptr, rows, side="right") - 1)
            return Standardizer(self.cache.widths).fit(history_pieces(self.cache, graphs))

        return copy.deepcopy(self._make("standardizer", rows, fit))

    def forget(self) -> None:
        """Release the memory of the activations, until they are needed again."""
        for name in _LARGE:
            self._made.pop(name, None)

    def history(self, rows: np.ndarray | None) -> HistoryRows:
        """Return the activations, standardised by the graphs of these label rows.

        Args:
            rows: None for the activations as they are stored.
        """
        if self.memory.histories_that_fit():
            return self._read("history", rows, history_rows)
        return self._read("history", rows, lambda cache, scale, _: RowsOnDisk(cache, scale))

    def means(self, rows: np.ndarray | None) -> RowsInMemory | None:
        """Return the means of graphs, one row each; None if they take too much memory."""
        return self._read("means", rows, mean_rows) if self.memory.fits_means() else None

    def statistics(self, rows: np.ndarray | None) -> RowsInMemory | None:
        """Return statistics of graphs, one row ``[3, sum(D_l)]`` each; None if they do not fit."""
        if not self.memory.fits_statistics():
            return None
        return self._read("statistics", rows, statistics_rows)

    def all_statistics(self, rows: np.ndarray | None) -> Tensor | None:
        """Return statistics of all graphs, to solve a probe of them: ``[num_graphs, 3, sum(D_l)]``.

        None if there is no memory for that, even if there is for :meth:`statistics`.
        """
        if not self.memory.fits_statistics(at_once=True):
            return None
        kept = self.statistics(rows)
        found = None if kept is None else kept.select(np.arange(len(self.cache)))
        assert not isinstance(found, TableRows | Sequence)  # one tensor, and not one per layer
        return found

    def statistics_pieces(
        self, rows: np.ndarray | None, graphs: np.ndarray
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield statistics ``[graphs, 3, sum(D_l)]`` and sizes of some graphs, in pieces.

        They are the same whether or not all of them fit into memory.
        """
        standardizer = None if rows is None else self.standardizer(rows)
        for piece, statistics in statistics_pieces(self.cache, standardizer, graphs):
            yield statistics, torch.tensor(self.cache.num_nodes[piece])

    def once(self, rows: np.ndarray | None, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return a result that is computed once for all seeds of a fold, in all processes.

        Args:
            rows: As :meth:`history` takes them.
            key: What it depends on besides the rows.
            make: Computes it.
        """
        known = self._make("results", rows, dict)
        if key not in known:
            known[key] = make()
        found: _Made = known[key]
        return found

    def _make(self, name: str, rows: np.ndarray | None, make: Callable[[], Any]) -> Any:
        """Return what was made last under a name, or make it if that was for other rows."""
        if name not in self._made or not _same(self._made[name][0], rows):
            self._made.pop(name, None)  # before the next is made: one is large enough
            self._made[name] = rows, make()
        return self._made[name][1]

    def _read(self, name: str, rows: np.ndarray | None, read: Callable[..., _Made]) -> _Made:
        def make() -> _Made:
            standardizer = None if rows is None else self.standardizer(rows)
            return read(self.cache, standardizer, SharedMemory() if self._shares else None)

        found: _Made = self._make(name, rows, make)
        return found

    def share(
        self,
        rows: np.ndarray | None,
        *,
        history: bool = True,
        means: bool = False,
        statistics: bool = False,
    ) -> SharedRows:
        """Return what a fit in another process reads, for :meth:`use` there.

        It includes results that :meth:`once` adds for these rows before it is sent.

        Args:
            rows: As :meth:`history` takes them.
            history: Whether the fit reads the activations.
            means: Whether the means of graphs are enough, if there is memory for them.
            statistics: Whether the fit reads the statistics of graphs.
        """
        if not self._shares:
            self.forget()  # in memory of this process alone
            self._shares = True
        made = {"results": self._make("results", rows, dict)}
        if rows is not None:
            made["standardizer"] = self.standardizer(rows)
        if means:
            made["means"] = self.means(rows)
        if history and made.get("means") is None:
            made["history"] = self.history(rows)
        if statistics:
            made["statistics"] = self.statistics(rows)
        return SharedRows(rows, made)

    def use(self, shared: SharedRows) -> None:
        """Use what another process has made."""
        self._made |= {name: (shared.rows, made) for name, made in shared.made.items()}


def _same(rows: np.ndarray | None, others: np.ndarray | None) -> bool:
    if rows is None or others is None:
        return rows is others
    return np.array_equal(rows, others)
