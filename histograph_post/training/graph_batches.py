"""Training batches of whole graphs, for training a backbone itself."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from ..data import GraphDataset
from ..data.batching import RowBatch, count_batches, make_batch, row_batches, to_device
from ..data.links import LinkNegatives, Negatives, NonEdges
from ..errors import ConfigError
from ..heads.ragged import Graphs
from ..tasks import Task
from ..utils.machine import pinned
from .loop import Step
from .ranks import Ranks


@dataclass(frozen=True)
class GraphInputs:
    """A batch of graphs, and which rows of the output are asked for."""

    batch: Batch
    #: Output rows that have a label to compare with; None for all: ``[rows]``.
    positions: Tensor | None = None
    #: Node pairs to score, for links, negatives that were drawn for training last: ``[2, rows]``.
    pairs: Tensor | None = None
    #: Nodes of each graph, where the host knows them: ``[num_graphs]``.
    sizes: np.ndarray | None = None

    @property
    def graphs(self) -> Graphs | None:
        """Which graph each node belongs to, if the host knows the sizes."""
        if self.sizes is None:
            return None
        return Graphs(self.batch.batch, self.batch.ptr.diff(), self.sizes)


class GraphBatches:
    """A :class:`~histograph_post.training.loop.Source` over the graphs of a data set.

    Its batches have the graphs, rows and drawn negatives that
    :class:`~.batches.HeadBatches` would give for a cache of the same data.

    Args:
        dataset: The graphs.
        task: What is predicted.
        device: Where batches go.
        ranks: Processes that train together: they split the graphs of every shuffled batch, and
            take whole batches in turn otherwise.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        task: Task,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is not None and len(dataset) < ranks.size:
            raise ConfigError(
                f"{dataset.spec}: found {len(dataset)} graphs and WORLD_SIZE={ranks.size}, expected"
                " a graph for every process at least: the graphs of a batch are shared out"
            )
        self.ranks = ranks
        self.labels = dataset.labels()
        self._dataset = dataset
        self._task = task
        self._targets = task.targets(self.labels)
        self._device = device
        self._negatives = LinkNegatives(task, self._targets, lru_cache(None)(self._non_edges))

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._dataset.label_ptr, batch_size=batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        dataset, random = self._dataset, self._negatives.generator(rows, seed)
        whole = row_batches(rows, dataset.label_ptr, batch_size=batch_size, seed=seed)
        for number, members in enumerate(whole):
            if self.ranks is not None and seed is None and number % self.ranks.size != self._rank:
                continue
            drawn = None if random is None else self._negatives.draw(members, random)
            shares = self.ranks is not None and seed is not None
            # In a batch with fewer graphs than ranks, the rest run the first without its labels.
            stands_in = shares and len(members.graphs) <= self._rank
            if shares:
                members, drawn = self._part_of(members, drawn, 0 if stands_in else self._rank)
            batch = make_batch([dataset.graphs[graph] for graph in members.graphs])
            targets = self._targets[members.rows]  # [rows] or [rows, targets]
            positions = pairs = None
            if dataset.level == "node":
                places = batch.ptr[members.owners] + torch.from_numpy(members.within)  # [rows]
                positions = self._there(places)
            elif dataset.level == "link":
                found = self._pairs(batch, members)  # [2, rows]
                if drawn is not None:
                    found = torch.cat([found, drawn.pairs + batch.ptr[drawn.owners]], dim=1)
                    targets = torch.cat([targets, targets.new_zeros(len(drawn.owners), 1)])
                pairs = self._there(found)
            if stands_in:
                targets = torch.full_like(targets, -1 if targets.ndim == 1 else math.nan)
            yield Step(
                inputs=GraphInputs(
                    to_device(batch, self._device), positions, pairs, batch.ptr.diff().numpy()
                ),
                targets=self._there(targets),
                rows=members.rows[:0] if stands_in else members.rows,
                missing=self._task.missing(targets),
            )

    @property
    def _rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    def _part_of(
        self, members: RowBatch, drawn: Negatives | None, rank: int
    ) -> tuple[RowBatch, Negatives | None]:
        """Return a rank's part of a batch: every ``size``-th graph."""
        assert self.ranks is not None
        size, graphs = self.ranks.size, members.graphs[rank :: self.ranks.size]
        if self._dataset.level == "graph":
            return RowBatch(graphs, graphs, members.owners, members.within), None
        inside = members.owners % size == rank  # [rows]
        part = RowBatch(
            graphs,
            members.rows[inside],
            members.owners[inside] // size,
            members.within[inside],
        )
        if drawn is not None:
            inside = drawn.owners % size == rank  # [negatives]
            drawn = Negatives(
                drawn.pairs[:, torch.from_numpy(inside)], drawn.owners[inside] // size
            )
        return part, drawn

    def _there(self, values: Tensor) -> Tensor:
        """Send values to the device; the host does not wait for it."""
        return pinned(values, self._device).to(self._device, non_blocking=True)

    def _pairs(self, batch: Batch, members: RowBatch) -> Tensor:
        """Return the labelled pairs that a batch is asked for: ``[2, rows]``."""
        counts = np.diff(self._dataset.label_ptr)[members.graphs]  # [num_graphs]
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # pair of each graph: [num_graphs]
        pairs: Tensor = batch.edge_label_index[:, first[members.owners] + members.within]
        return pairs

    def _non_edges(self, number: int) -> NonEdges:
        graph = self._dataset.graphs[number]
        known = torch.cat([graph.edge_label_index, graph.edge_index], dim=1)  # [2, num_known]
        return NonEdges(int(graph.num_nodes), known.numpy())
