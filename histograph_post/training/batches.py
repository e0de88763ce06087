"""Training batches of cached activations, for training a readout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ..data.batching import RowBatch, count_batches, row_batches
from ..data.links import LinkNegatives, Negatives
from ..heads.base import History
from ..heads.histograph.large_graphs import WholeGraph
from ..heads.history import TableRows
from ..heads.ragged import Graphs, ranges
from ..tasks import Missing, Task
from ..utils.machine import send
from .history_rows import HistoryRows
from .loaded_cache import LoadedCache
from .loop import Step

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class HeadInputs:
    """What a readout takes, and which rows of its output are asked for."""

    history: History | TableRows
    #: Graph of each node, sorted: ``[num_nodes]``; or the graphs, where the host knows their sizes.
    batch: Tensor | Graphs
    num_graphs: int
    edge_index: Tensor | None = None
    #: Nodes whose outputs are asked for; None for every graph: ``[rows]``.
    positions: Tensor | None = None
    #: Statistics of the graphs, where they are known: ``[num_graphs, 3, sum(D_l)]``.
    statistics: Tensor | None = None
    #: Summary of the one graph of which these are some nodes, for a head that needs it.
    whole: WholeGraph | None = None
    #: Node pairs to score, for links, negatives that were drawn for training last: ``[2, rows]``.
    pairs: Tensor | None = None


class HeadBatches:
    """A :class:`~histograph_post.training.loop.Source` over the activations of a cache.

    Training links commonly come without negatives. Then every batch of an epoch gets as many as it
    has links, drawn from the pairs of the same graphs by the seed of the epoch. They follow the
    rows of the batch, in its inputs and in its targets.

    Args:
        loaded: The cache.
        history: Its activations, standardised or not, from :meth:`LoadedCache.history`, or the
            means of graphs, where they are all that the readout needs.
        task: Gives the targets.
        device: Where batches go.
        edges: Whether the readout needs ``edge_index``.
        statistics: Of the graphs, for a readout that reads them, from
            :meth:`LoadedCache.statistics`.
    """

    def __init__(
        self,
        loaded: LoadedCache,
        history: HistoryRows,
        task: Task,
        device: torch.device,
        *,
        edges: bool = False,
        statistics: HistoryRows | None = None,
    ) -> None:
        self.labels = loaded.labels
        self._statistics = None if statistics is None else statistics.on(device)
        self._loaded = loaded
        self._history = history.on(device)
        self._task = task
        self._targets = task.targets(loaded.labels)
        self._device = device
        self._targets_there = self._targets.to(device)
        self._edges = edges
        self._negatives = LinkNegatives(task, self._targets, lambda graph: loaded.non_edges[graph])

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._loaded.label_ptr, batch_size=batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        loaded = self._loaded
        batches = list(row_batches(rows, loaded.label_ptr, batch_size=batch_size, seed=seed))
        steps = self._steps(batches, self._negatives.generator(rows, seed))
        ahead = self._history.prefetches and loaded.memory.fits_ahead(
            members.graphs for members in batches
        )
        return prefetch(steps) if ahead else steps

    def _steps(
        self, batches: Sequence[RowBatch], random: np.random.Generator | None
    ) -> Iterator[Step]:
        for members in batches:
            missing = self._task.missing(self._targets[members.rows])
            negatives = None
            if random is not None:
                negatives = self._negatives.draw(members, random)
                missing = "some" if missing == "all" and len(negatives.owners) else missing
            yield self._step(members, negatives, missing)

    def _step(self, members: RowBatch, negatives: Negatives | None, missing: Missing) -> Step:
        """Make a batch; all indices it needs are sent to the device in one copy."""
        loaded, graphs = self._loaded, members.graphs
        ptr = self._history.ptr  # [num_graphs + 1]
        starts, stops = ptr[graphs], ptr[graphs + 1]
        sizes = stops - starts  # [num_graphs]
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])  # of each graph in the batch
        numbers = {
            "index": np.repeat(np.arange(len(graphs)), sizes),  # [num_nodes]
            "sizes": sizes,
            "rows": members.rows,
        }
        if loaded.level == "node":
            numbers["positions"] = first[members.owners] + members.within  # [rows]
        if loaded.pairs is not None:
            shifts = torch.from_numpy((first - starts)[members.owners])  # [rows]
            pairs = loaded.pairs[:, members.rows] + shifts  # [2, rows]
            if negatives is not None:
                drawn = negatives.pairs + torch.from_numpy(first[negatives.owners])
                pairs = torch.cat([pairs, drawn], dim=1)  # [2, rows + negatives]
            numbers["pairs"] = pairs.flatten().numpy()
        if self._edges:
            numbers["edges"] = self._edge_index(graphs, first - starts).flatten().numpy()
        history = self._history.select(graphs)
        statistics = None if self._statistics is None else self._statistics.select(graphs)
        stays = self._device.type == "cpu"  # where readouts take rows from the table themselves
        if isinstance(history, TableRows) and not stays:
            numbers["history"] = history.rows  # [num_nodes]
        if isinstance(statistics, TableRows):
            numbers["statistics"] = statistics.rows  # [num_graphs]
        there = dict(zip(numbers, send(list(numbers.values()), self._device), strict=True))
        if isinstance(history, TableRows) and not stays:
            history = history.copy(there["history"])  # [num_nodes, L, D]
        if isinstance(statistics, TableRows):
            statistics = statistics.copy(there["statistics"])  # [num_graphs, 3, sum(D_l)]
        assert not isinstance(statistics, Sequence)  # one tensor, and not one per layer
        targets = self._targets_there.index_select(0, there["rows"])  # [rows] or [rows, targets]
        if negatives is not None:
            targets = torch.cat([targets, targets.new_zeros(len(negatives.owners), 1)])
        inputs = HeadInputs(
            history=history,
            batch=Graphs(there["index"], there["sizes"], sizes),
            num_graphs=len(graphs),
            edge_index=there["edges"].view(2, -1) if "edges" in there else None,
            positions=there.get("positions"),
            pairs=there["pairs"].view(2, -1) if "pairs" in there else None,
            statistics=statistics,
        )
        return Step(inputs, targets, members.rows, missing)

    def _edge_index(self, graphs: np.ndarray, shifts: np.ndarray) -> Tensor:
        """Return the edges of these graphs, numbered as in the batch: ``[2, num_edges]``."""
        starts, stops = self._loaded.edge_ptr[graphs], self._loaded.edge_ptr[graphs + 1]
        assert self._loaded.edge_index is not None  # edge_ptr has checked it
        edges = self._loaded.edge_index[:, ranges(starts, stops)]  # [2, num_edges]
        return edges + torch.from_numpy(np.repeat(shifts, stops - starts))


def prefetch(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield items; a thread makes the next one while the last one is used."""
    nothing = object()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch") as pool:
        coming: Future[_Item | object] = pool.submit(next, items, nothing)
        while (item := coming.result()) is not nothing:
            coming = pool.submit(next, items, nothing)
            yield item  # type: ignore[misc]  # not the end marker
