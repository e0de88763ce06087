"""Which test rows to show: those the head got most right and most wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..tasks import Task
from ..utils.text import number
from .outcomes import Outcome

# --- a bounded part of a cache, chosen by a seed: what the analyses of a report look at

#: Graphs and nodes that are looked at in one fit, at most; a single graph may have more nodes.
MAX_GRAPHS = 256
MAX_NODES = 20_000

_SEED = 0


@dataclass(frozen=True)
class Sample:
    """Some graphs of a cache in memory."""

    #: Their numbers in the cache, ascending, ``[num_graphs]``.
    graphs: np.ndarray
    #: Of how many they were chosen.
    total: int
    #: One tensor ``[num_nodes, D_l]`` per layer, single precision.
    layers: list[Tensor]
    #: First node of each graph, and the number of nodes: ``[num_graphs + 1]``.
    ptr: np.ndarray
    #: ``[2, num_edges]``; None for a cache without edges.
    edge_index: Tensor | None

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs together."""
        return int(self.ptr[-1])

    @property
    def batch(self) -> Tensor:
        """Graph of each node, ``[num_nodes]``."""
        return torch.from_numpy(np.repeat(np.arange(len(self.graphs)), np.diff(self.ptr)))

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out."""
        return len(self.graphs) == self.total

    def slices(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield the nodes of each graph, and its edges, numbered from its first node."""
        ends = None
        if self.edge_index is not None:  # edges of a graph follow those of the graph before it
            owners = np.searchsorted(self.ptr, self.edge_index[0].numpy(), side="right") - 1
            ends = np.searchsorted(owners, np.arange(len(self.graphs) + 1))
        for place, (start, stop) in enumerate(zip(self.ptr[:-1], self.ptr[1:], strict=True)):
            edges = None
            if ends is not None and self.edge_index is not None:
                edges = self.edge_index[:, ends[place] : ends[place + 1]] - int(start)
            yield slice(int(start), int(stop)), edges


def owners_of(cache: Cache, rows: np.ndarray) -> np.ndarray:
    """Return the graph that each label row belongs to: ``[rows]``."""
    return np.searchsorted(cache.label_ptr, rows, side="right") - 1


def choose_graphs(
    sizes: np.ndarray, *, max_graphs: int = MAX_GRAPHS, max_nodes: int = MAX_NODES
) -> np.ndarray:
    """Return which graphs to look at, ascending: a random choice within bounds, at least one.

    Args:
        sizes: Nodes of each graph to choose from, ``[num_graphs]``.
        max_graphs: How many to take at most.
        max_nodes: How many nodes they may have together, unless the first alone has more.
    """
    order = np.random.default_rng(_SEED).permutation(len(sizes))[:max_graphs]
    within = np.cumsum(sizes[order]) <= max_nodes
    within[:1] = True
    return np.sort(order[within])


def read_sample(cache: Cache, graphs: np.ndarray, total: int) -> Sample:
    """Read some graphs of a cache."""
    found = cache.gather(graphs, edges=cache.manifest.layout.has_edges)
    layers = found.history.unbind(1) if isinstance(found.history, Tensor) else found.history
    return Sample(
        graphs=graphs,
        total=total,
        layers=[layer.float() for layer in layers],
        ptr=found.ptr.numpy(),
        edge_index=found.edge_index,
    )


def sample_test_graphs(cache: Cache, rows: np.ndarray) -> Sample:
    """Read a bounded number of the graphs that own these label rows."""
    graphs = np.unique(owners_of(cache, rows))
    chosen = choose_graphs(cache.num_nodes[graphs])
    return read_sample(cache, graphs[chosen], len(graphs))


#: How many of the best, and how many of the worst.
NUM_SHOWN = 3

#: Graphs of more nodes are not drawn: they would be a smudge.
MAX_DRAWN_NODES = 70

_TINY = 1e-12


@dataclass(frozen=True)
class Example:
    """A test row worth looking at."""

    #: ``best`` or ``worst``, and its place among those, from 1.
    rank: str
    place: int
    name: str
    #: Number of the row among all label rows, and of its graph.
    row: int
    graph: int
    #: What was true and what was predicted.
    words: str


def row_losses(outcome: Outcome, task: Task) -> np.ndarray:
    """Return how wrong each row is; NaN for one without a label: ``[rows]``.

    The negative logarithm of what the truth was given (mean over the labels there are), or the
    mean absolute error.
    """
    labels, predicted = outcome.labels, outcome.predicted
    if task.kind == "multiclass":
        present = ~np.isnan(labels[:, 0])
        truth = np.searchsorted(task.classes, np.where(present, labels[:, 0], task.classes[0]))
        given = predicted[np.arange(len(truth)), truth]
        return np.where(present, -np.log(np.maximum(given, _TINY)), np.nan)
    if task.kind == "regression":
        losses = np.abs(predicted - labels)  # [rows, targets]
    else:
        truth = labels == (task.classes[1] if task.kind == "binary" else 1.0)
        given = np.where(truth, predicted, 1 - predicted)  # [rows, targets]
        losses = np.where(np.isnan(labels), np.nan, -np.log(np.maximum(given, _TINY)))
    counts = (~np.isnan(losses)).sum(axis=1)
    return np.where(counts > 0, np.nansum(losses, axis=1) / np.maximum(counts, 1), np.nan)


def choose_examples(outcome: Outcome, task: Task, cache: Cache) -> list[Example]:
    """Return the rows that were predicted best and worst, of graphs that can be drawn."""
    losses = row_losses(outcome, task)
    graphs = owners_of(cache, outcome.rows)  # [rows]
    eligible = ~np.isnan(losses)
    if task.level == "graph":
        eligible &= cache.num_nodes[graphs] <= MAX_DRAWN_NODES
    order = np.flatnonzero(eligible)[np.argsort(losses[eligible], kind="stable")]
    count = min(NUM_SHOWN, len(order) // 2 or len(order))
    chosen = [("best", place + 1, order[place]) for place in range(count)]
    if len(order) > 1:
        chosen += [("worst", place + 1, order[-1 - place]) for place in range(count)]
    return [
        Example(
            rank=rank,
            place=place,
            name=outcome.ids[at],
            row=int(outcome.rows[at]),
            graph=int(graphs[at]),
            words=_words(outcome, task, int(at)),
        )
        for rank, place, at in chosen
    ]


def _words(outcome: Outcome, task: Task, row: int) -> str:
    labels, predicted = outcome.labels[row], outcome.predicted[row]
    if task.kind == "binary":
        return f"true {labels[0]:g}, p({task.classes[1]:g}) = {predicted[-1]:.3f}"
    if task.kind == "multiclass":
        chosen = task.classes[int(predicted.argmax())]
        return f"true {labels[0]:g}, predicted {chosen:g} (p = {predicted.max():.3f})"
    present = ~np.isnan(labels)
    if task.kind == "multilabel":
        right = int(((predicted > 0.5) == (labels == 1))[present].sum())
        return f"{right} of {int(present.sum())} labels right"
    truth = ", ".join(number(value) for value in labels[present][:3])
    said = ", ".join(number(value) for value in predicted[present][:3])
    return f"true {truth}, predicted {said}"
