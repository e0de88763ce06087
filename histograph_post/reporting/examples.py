"""Which test rows to show: those the head got most right and most wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..caches import Cache
from ..tasks import Task
from ..utils.text import number
from .record import Outcome
from .sampling import owners_of

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
