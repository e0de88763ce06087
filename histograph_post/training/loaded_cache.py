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

#: What takes much memory of all that is made.
_LARGE = ("history", "means", "statistics")


@dataclass(frozen=True)
class LentRows:
    """What a fit reads of a cache, on its way to another process: the memory is shared."""

    #: Label rows of the graphs that it is standardised by; None if it is not.
    rows: np.ndarray | None
    #: What was made of them, by name.
    made: Mapping[str, Any]


class LoadedCache:
    """A cache as training uses it: opened once, for every fold, seed and readout.

    Args:
        cache: The cache.
        memory_limit: Bytes that training may take: the rows or, if they need more than their share,
            the batches that are read of them. By default a share of the machine's memory.
    """

    def __init__(self, cache: Cache, *, memory_limit: int | None = None) -> None:
        self.cache = cache
        self.level = cache.manifest.layout.level
        self.labels = cache.labels()
        self.label_ptr = cache.label_ptr
        self.ptr = cache.node_ptr  # [num_graphs + 1]
        #: What training may take of memory.
        self.memory = MemoryBudget(cache, memory_limit)
        self._lends = False
        #: What was made last under each name, and for which rows: the readouts and seeds of one
        #: fold all ask for the same.
        self._made: dict[str, tuple[np.ndarray | None, Any]] = {}
        #: Labelled pairs of all graphs, nodes numbered through the cache: ``[2, rows]``.
        self.pairs = cache.label_pairs() if self.level == "link" else None

    # Another process opens the cache for itself, and is lent the rest.
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
        """The pairs of each graph that neither an edge joins nor a label names.

        Labelled pairs of every part are left out, links and negatives alike: training on any of
        them would tell which the others are.
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
        """Return the standardisation by the graphs that own these label rows."""

        def fit() -> Standardizer:
            graphs = np.unique(np.searchsorted(self.label_ptr, rows, side="right") - 1)
            found = Standardizer(self.cache.widths).fit(history_pieces(self.cache, graphs))
            if not all(bool(value.isfinite().all()) for value in found.state_dict().values()):
                raise CacheError(
                    f"{self.cache.path}: found activations that are not finite, expected numbers; "
                    "histograph verify says where"
                )
            return found

        return copy.deepcopy(self._make("standardizer", rows, fit))

    def forget(self) -> None:
        """Release the memory of the activations, until they are asked for again."""
        for name in _LARGE:
            self._made.pop(name, None)

    def history(self, rows: np.ndarray | None) -> HistoryRows:
        """Return the activations, standardised by the graphs that own these label rows.

        Args:
            rows: None for the activations as they are stored.
        """
        return self._read("history", rows, history_rows)

    def means(self, rows: np.ndarray | None) -> HistoryRows | None:
        """Return the means of graphs, one row each; None if they take too much memory.

        Args:
            rows: As :meth:`history` takes them.
        """
        return self._read("means", rows, mean_rows)

    def statistics(self, rows: np.ndarray | None) -> HistoryRows | None:
        """Return statistics of graphs, one row ``[3, sum(D_l)]`` each; None if they do not fit.

        Args:
            rows: As :meth:`history` takes them.
        """
        return self._read("statistics", rows, statistics_rows)

    def all_statistics(self, rows: np.ndarray | None) -> Tensor | None:
        """Return statistics of all graphs, to be solved by, ``[num_graphs, 3, sum(D_l)]``.

        None if there is no memory for that, even where :meth:`statistics` may be kept.
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

        They are the same whether all of them fit into memory or not.
        """
        standardizer = None if rows is None else self.standardizer(rows)
        for piece, statistics in statistics_pieces(self.cache, standardizer, graphs):
            yield statistics, torch.tensor(self.cache.num_nodes[piece])

    def once(self, rows: np.ndarray | None, key: Any, make: Callable[[], _Made]) -> _Made:
        """Return what is made once for all seeds of a fold, and for all processes.

        Args:
            rows: As :meth:`history` takes them.
            key: What it depends on besides the rows.
            make: Makes it.
        """
        known = self._make("results", rows, dict)
        if key not in known:
            known[key] = make()
        found: _Made = known[key]
        return found

    def _make(self, name: str, rows: np.ndarray | None, make: Callable[[], Any]) -> Any:
        """Return what was made last under a name, made anew if that was for other rows."""
        if name not in self._made or not _same(self._made[name][0], rows):
            self._made.pop(name, None)  # before the next is made: one is large enough
            self._made[name] = rows, make()
        return self._made[name][1]

    def _read(self, name: str, rows: np.ndarray | None, read: Callable[..., _Made]) -> _Made:
        def make() -> _Made:
            standardizer = None if rows is None else self.standardizer(rows)
            return read(self.memory, standardizer, SharedMemory() if self._lends else None)

        found: _Made = self._make(name, rows, make)
        return found

    def lend(
        self,
        rows: np.ndarray | None,
        *,
        history: bool = True,
        means: bool = False,
        statistics: bool = False,
    ) -> LentRows:
        """Return what a fit in another process reads, for :meth:`borrow` there.

        What is made :meth:`once` for these rows later on, until it is sent, goes with it.

        Args:
            rows: As :meth:`history` takes them.
            history: Whether it reads the activations.
            means: Whether the means of graphs will do, if there is memory for them.
            statistics: Whether it reads the statistics of graphs.
        """
        if not self._lends:
            self.forget()  # memory of this process alone
            self._lends = True
        made = {"results": self._make("results", rows, dict)}
        if rows is not None:
            made["standardizer"] = self.standardizer(rows)
        if means:
            made["means"] = self.means(rows)
        if history and made.get("means") is None:
            made["history"] = self.history(rows)
        if statistics:
            made["statistics"] = self.statistics(rows)
        return LentRows(rows, made)

    def borrow(self, lent: LentRows) -> None:
        """Use what another process has made ready."""
        self._made |= {name: (lent.rows, made) for name, made in lent.made.items()}


def _same(rows: np.ndarray | None, others: np.ndarray | None) -> bool:
    if rows is None or others is None:
        return rows is others
    return np.array_equal(rows, others)
