"""Batches of rows, and a readout on those of a cache; ``networks.py`` has those of graphs.

Both sources give the same graphs, rows and drawn negatives for a cache and for its data.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ..data.batching import RowBatch, count_batches, row_batches
from ..data.labels import NonEdges
from ..heads.base import History
from ..heads.histograph.accelerate import read_out
from ..heads.histograph.large_graphs import WholeGraph
from ..heads.history import TableRows
from ..heads.ragged import Graphs, ranges
from ..tasks import Missing, Task
from ..utils.machine import send
from .history_rows import HistoryRows
from .loaded_cache import LoadedCache
from .loop import Step

_Item = TypeVar("_Item")


class Negatives(NamedTuple):
    """The negatives of one batch."""

    #: Nodes numbered within their graph: ``[2, negatives]``.
    pairs: Tensor
    #: Position of each pair's graph in the batch: ``[negatives]``.
    owners: np.ndarray


class RowBatches:
    """Label rows in batches of whole graphs, and negatives of links that come without any.

    Training links commonly come without negatives. Then every batch of an epoch gets as many as it
    has links, drawn from the pairs of the same graphs by the seed of the epoch. They follow the
    rows of the batch, in its inputs and in its targets.

    Args:
        labels: Of all rows, missing ones NaN: ``[rows, targets]``.
        label_ptr: First row of each graph, and the number of rows: ``[num_graphs + 1]``.
        task: Gives the targets.
        device: Where batches go.
    """

    def __init__(
        self, labels: np.ndarray, label_ptr: np.ndarray, task: Task, device: torch.device
    ) -> None:
        self.labels = labels
        self._label_ptr = label_ptr
        self._task = task
        self._targets = task.targets(labels)  # [rows] or [rows, targets]
        self._device = device

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._label_ptr, batch_size=batch_size)

    def _members(
        self, rows: np.ndarray, batch_size: int, seed: int | None
    ) -> Iterator[tuple[RowBatch, Negatives | None]]:
        """Yield what each batch has: at most ``batch_size`` graphs, their rows, and negatives."""
        random = None
        links = self._task.level == "link" and self._task.kind == "binary"
        if seed is not None and links and not bool((self._targets.numpy()[rows] == 0).any()):
            # A stream of its own: the seed itself shuffles the graphs.
            random = np.random.default_rng([seed, 1])
        for members in row_batches(rows, self._label_ptr, batch_size=batch_size, seed=seed):
            yield members, None if random is None else self._draw(members, random)

    def _draw(self, members: RowBatch, random: np.random.Generator) -> Negatives:
        """Draw as many pairs in each graph as it has links; a dense graph may have fewer."""
        targets = self._targets[members.rows]  # [rows, 1]
        links = members.owners[targets[:, 0].numpy() == 1]  # graph in the batch: [links]
        counts = np.bincount(links, minlength=len(members.graphs))  # [num_graphs]
        drawn = [
            self._non_edges(graph).draw(int(count), random)
            for graph, count in zip(members.graphs, counts, strict=True)
        ]
        sizes = [pairs.shape[1] for pairs in drawn]
        return Negatives(
            pairs=torch.from_numpy(np.concatenate(drawn, axis=1)),
            owners=np.repeat(np.arange(len(drawn)), sizes),
        )

    @abstractmethod
    def _non_edges(self, graph: int) -> NonEdges:
        """Return the pairs of a graph that have neither an edge nor a label."""


# --- cached activations


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


class HeadNetwork(nn.Module):
    """A readout as the training loop calls it: on rows that are standardised already."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def aux_loss(self) -> Tensor | None:
        """What the last forward pass adds to the loss, for readouts that have such a term."""
        return getattr(self.head, "aux_loss", None)

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        given = {"statistics": inputs.statistics, "whole": inputs.whole}
        outputs = read_out(
            self.head,
            inputs.history,
            inputs.batch,
            num_graphs=inputs.num_graphs,
            edge_index=inputs.edge_index,
            **{name: value for name, value in given.items() if value is not None},
        )
        if inputs.pairs is not None:
            scores: Tensor = self.head.score(outputs, inputs.pairs)  # type: ignore[operator]
            return scores.unsqueeze(-1)  # [rows, 1]
        return outputs if inputs.positions is None else outputs[inputs.positions]


class HeadBatches(RowBatches):
    """A :class:`~histograph_post.training.loop.Source` over the activations of a cache.

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
        super().__init__(loaded.labels, loaded.label_ptr, task, device)
        self._statistics = None if statistics is None else statistics.on(device)
        self._loaded = loaded
        self._history = history.on(device)
        self._targets_there = self._targets.to(device)
        self._edges = edges

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        steps = self._steps(rows, batch_size, seed)
        if self._history.prefetches:
            whole = row_batches(rows, self._label_ptr, batch_size=batch_size, seed=seed)
            if self._loaded.memory.fits_ahead(members.graphs for members in whole):
                return prefetch(steps)
        return steps

    def _steps(self, rows: np.ndarray, batch_size: int, seed: int | None) -> Iterator[Step]:
        for members, negatives in self._members(rows, batch_size, seed):
            missing = self._task.missing(self._targets[members.rows])
            if negatives is not None and missing == "all" and len(negatives.owners):
                missing = "some"
            yield self._step(members, negatives, missing)

    def _non_edges(self, graph: int) -> NonEdges:
        return self._loaded.non_edges[graph]

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
