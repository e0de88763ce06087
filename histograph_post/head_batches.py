"""Training batches of cached activations, for training a readout."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .data.non_edges import NonEdges
from .errors import CacheError
from .heads.base import History
from .heads.standardize import Standardizer
from .link_negatives import LinkNegatives, Negatives
from .row_batches import RowBatch, count_batches, row_batches
from .storage import Cache
from .tasks import Task
from .training import Step


@dataclass(frozen=True)
class HeadInputs:
    """What a readout takes, and which rows of its output are asked for."""

    history: History
    #: Graph of each node, sorted: ``[num_nodes]``.
    batch: Tensor
    num_graphs: int
    edge_index: Tensor | None = None
    #: Nodes whose outputs are asked for; None for every graph: ``[rows]``.
    positions: Tensor | None = None
    #: Node pairs to score, for links, negatives that were drawn for training last: ``[2, rows]``.
    pairs: Tensor | None = None


class LoadedCache:
    """A cache in memory: read once, used by every fold, seed and readout."""

    def __init__(self, cache: Cache) -> None:
        layout = cache.manifest.layout
        everything = cache.gather(np.arange(len(cache)), edges=layout.has_edges)
        found = everything.history
        self.cache = cache
        self.level = layout.level
        self.labels = cache.labels()
        self.label_ptr = cache.label_ptr
        self.ptr = everything.ptr.numpy()
        self.history: History = (
            found.float() if isinstance(found, Tensor) else [layer.float() for layer in found]
        )
        self._standardized: tuple[np.ndarray, History, Standardizer] | None = None
        #: Edges of all graphs, nodes numbered through the cache: ``[2, num_edges]``.
        self.edge_index = everything.edge_index
        #: Labelled pairs of all graphs, numbered likewise: ``[2, rows]``.
        self.pairs = cache.label_pairs() if layout.level == "link" else None

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

    def standardized(self, rows: np.ndarray) -> tuple[History, Standardizer]:
        """Return a standardised copy of the history, by the graphs that own these label rows.

        The last copy is kept: the readouts and seeds of one fold all ask for the same.
        """
        if self._standardized is not None and np.array_equal(self._standardized[0], rows):
            return self._standardized[1], copy.deepcopy(self._standardized[2])
        self._standardized = None  # before the next copy is made: one is large enough
        standardizer = Standardizer(self.cache.widths)
        graphs = np.unique(np.searchsorted(self.label_ptr, rows, side="right") - 1)
        nodes = _ranges(self.ptr[graphs], self.ptr[graphs + 1])  # [training nodes]
        standardizer.fit([_select(self.history, torch.from_numpy(nodes))])
        copied = (
            self.history.clone()
            if isinstance(self.history, Tensor)
            else [layer.clone() for layer in self.history]
        )
        standardizer.apply_(copied)
        self._standardized = (rows, copied, standardizer)
        return copied, copy.deepcopy(standardizer)


class HeadBatches:
    """A :class:`~histograph_post.training.Source` over the activations of a cache.

    Links that train commonly come without negatives. Then every batch of an epoch gets as many
    as it has links, drawn from the pairs of the same graphs by the seed of the epoch. They stand
    behind the rows of the batch, in its inputs and in its targets.

    Args:
        loaded: The cache.
        history: Its history, standardised or not: ``[num_nodes, L, D]`` or a list.
        task: Gives the targets.
        device: Where batches go.
        edges: Whether the readout needs ``edge_index``.
    """

    def __init__(
        self,
        loaded: LoadedCache,
        history: History,
        task: Task,
        device: torch.device,
        *,
        edges: bool = False,
    ) -> None:
        self.labels = loaded.labels
        self._loaded = loaded
        self._history = history
        self._targets = task.targets(loaded.labels)
        self._device = device
        self._edges = edges
        self._negatives = LinkNegatives(task, self._targets, lambda graph: loaded.non_edges[graph])

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._loaded.label_ptr, batch_size=batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        loaded = self._loaded
        random = self._negatives.generator(rows, seed)
        for members in row_batches(
            rows, loaded.level, loaded.label_ptr, batch_size=batch_size, seed=seed
        ):
            targets = self._targets[members.rows]  # [rows] or [rows, targets]
            negatives = None
            if random is not None:
                negatives = self._negatives.draw(members, random)
                targets = torch.cat([targets, targets.new_zeros(len(negatives.owners), 1)])
            yield Step(self._inputs(members, negatives), targets.to(self._device), members.rows)

    def _inputs(self, members: RowBatch, negatives: Negatives | None) -> HeadInputs:
        loaded, graphs = self._loaded, members.graphs
        starts, stops = loaded.ptr[graphs], loaded.ptr[graphs + 1]
        sizes = stops - starts  # [num_graphs]
        first = np.concatenate([[0], np.cumsum(sizes)[:-1]])  # of each graph in the batch
        nodes = torch.from_numpy(_ranges(starts, stops))  # [num_nodes]
        batch = np.repeat(np.arange(len(graphs)), sizes)  # [num_nodes]
        positions = pairs = edge_index = None
        if loaded.level == "node":
            positions = torch.from_numpy(first[members.owners] + members.within)  # [rows]
        if loaded.pairs is not None:
            shifts = torch.from_numpy((first - starts)[members.owners])  # [rows]
            pairs = loaded.pairs[:, members.rows] + shifts  # [2, rows]
            if negatives is not None:
                drawn = negatives.pairs + torch.from_numpy(first[negatives.owners])
                pairs = torch.cat([pairs, drawn], dim=1)  # [2, rows + negatives]
        if self._edges:
            edge_index = self._edge_index(graphs, first - starts)  # [2, num_edges]
        history = _select(self._history, nodes)
        return HeadInputs(
            history=_to(history, self._device),
            batch=torch.from_numpy(batch).to(self._device),
            num_graphs=len(graphs),
            edge_index=None if edge_index is None else edge_index.to(self._device),
            positions=None if positions is None else positions.to(self._device),
            pairs=None if pairs is None else pairs.to(self._device),
        )

    def _edge_index(self, graphs: np.ndarray, shifts: np.ndarray) -> Tensor:
        """Return the edges of these graphs, numbered as in the batch: ``[2, num_edges]``."""
        starts, stops = self._loaded.edge_ptr[graphs], self._loaded.edge_ptr[graphs + 1]
        assert self._loaded.edge_index is not None  # edge_ptr has checked it
        edges = self._loaded.edge_index[:, _ranges(starts, stops)]  # [2, num_edges]
        return edges + torch.from_numpy(np.repeat(shifts, stops - starts))


def _ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return all numbers from ``starts[i]`` to ``stops[i] - 1``, for each i in turn."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)


def _select(history: History, nodes: Tensor) -> History:
    if isinstance(history, Tensor):
        return history.index_select(0, nodes)  # [num_nodes, L, D]
    return [layer.index_select(0, nodes) for layer in history]


def _to(history: History, device: torch.device) -> History:
    if isinstance(history, Tensor):
        return history.to(device, non_blocking=True)
    return [layer.to(device, non_blocking=True) for layer in history]
