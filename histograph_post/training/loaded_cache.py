"""A cache as training uses it: opened once, for every fold, seed and readout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..data.links import NonEdges
from ..errors import CacheError
from ..heads.base import last_layer
from ..heads.history import TableRows
from ..heads.standardize import Standardizer
from ..tasks import Task
from .history_rows import (
    HistoryRows,
    history_pieces,
    history_rows,
    mean_rows,
    statistics_pieces,
    statistics_rows,
)
from .memory import MemoryBudget, SharedMemory

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
        return self._read("history", rows, history_rows)

    def means(self, rows: np.ndarray | None) -> HistoryRows | None:
        """Return the means of graphs, one row each; None if they take too much memory."""
        return self._read("means", rows, mean_rows)

    def statistics(self, rows: np.ndarray | None) -> HistoryRows | None:
        """Return statistics of graphs, one row ``[3, sum(D_l)]`` each; None if they do not fit."""
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
            return read(self.memory, standardizer, SharedMemory() if self._shares else None)

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
