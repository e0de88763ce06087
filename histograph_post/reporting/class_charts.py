"""Classes as figures: the confusion matrix, and the targets of a multi-label task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics import roc_auc_score

from ..tasks import Task
from ..utils.text import number
from .cells import draw_cells
from .figures import Chart, Figure
from .record import Outcome, RunRecord
from .style import CHOSEN, INK, MUTED, series_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Classes of a confusion matrix at most: cells of more cannot be read.
_MAX_CLASSES = 20
#: Up to so many classes there is room for counts.
_COUNTED_CLASSES = 6
#: Targets that are listed.
_MAX_TARGETS = 40


def class_rows(outcome: Outcome, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return true and predicted class numbers of the rows that have a label, each ``[rows]``."""
    present = ~np.isnan(outcome.labels[:, 0])
    truth = np.searchsorted(task.classes, outcome.labels[present, 0])
    predicted = outcome.predicted[present]  # [rows, outputs]
    if task.kind == "binary":
        return truth, (predicted[:, -1] > 0.5).astype(int)
    return truth, predicted.argmax(axis=1)


def confusion_counts(outcomes: Sequence[Outcome], task: Task) -> np.ndarray:
    """Count true (rows) by predicted (columns) classes over all fits: ``[classes, classes]``."""
    counts = np.zeros((len(task.classes), len(task.classes)), dtype=np.int64)
    for outcome in outcomes:
        np.add.at(counts, class_rows(outcome, task), 1)
    return counts


def confusion_figure(record: RunRecord) -> Figure | None:
    """Draw the confusion matrix; None where there are too many classes to read it."""
    counts = confusion_counts(record.outcomes, record.task)
    if len(counts) > _MAX_CLASSES or not counts.any():
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # of each true class
    names = [f"{value:g}" for value in record.task.classes]
    counted = len(names) <= _COUNTED_CLASSES

    def text(row: int, column: int) -> str:
        share = shares[row, column]
        return f"{share:.1%}\n{counts[row, column]:,}" if counted else f"{share:.0%}"

    def draw(axes: Axes) -> None:
        places = range(len(names))
        texts = [[text(row, column) for column in places] for row in places]
        draw_cells(axes, shares, texts, colour=CHOSEN)
        axes.set_xticks(places, names)
        axes.set_yticks(places, names)
        axes.tick_params(length=0, colors=INK)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("true class")
        axes.set_aspect("equal")

    right = ", ".join(
        f"{share:.1%} of class {name}" for share, name in zip(shares.diagonal(), names, strict=True)
    )
    return Figure(
        name="confusion",
        title="Confusion matrix",
        caption="Test rows of all fits together, as shares of the true class"
        + (" and counts." if counted else "."),
        alternative=f"Confusion matrix; predicted right: {right}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )


def target_areas(outcomes: Sequence[Outcome], num_targets: int) -> list[float]:
    """Return the ROC-AUC of each target, mean over fits; NaN where it has a single class."""
    areas = []
    for target in range(num_targets):
        found = []
        for outcome in outcomes:
            present = ~np.isnan(outcome.labels[:, target])
            truth = outcome.labels[present, target]
            if len(np.unique(truth)) == 2:
                found.append(roc_auc_score(truth, outcome.predicted[present, target]))
        areas.append(float(np.mean(found)) if found else float("nan"))
    return areas


def targets_figure(record: RunRecord) -> Figure | None:
    """Draw the ROC-AUC of every target of a multi-label task, best first."""
    names = record.saved.target_names
    scores = {}
    for head in filter(None, (record.head, record.baseline)):
        areas = target_areas(record.outcomes_of(head), len(names))
        scores[head] = {n: area for n, area in zip(names, areas, strict=True) if area == area}
    ordered = sorted(scores[record.head].items(), key=lambda pair: -pair[1])
    shown = [name for name, _ in ordered[:_MAX_TARGETS]]
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        axes.axvline(0.5, color=MUTED, linewidth=0.8)
        for at, (head, values) in enumerate(scores.items()):
            present = [name for name in shown if name in values]
            axes.scatter(
                [values[name] for name in present],
                [-shown.index(name) for name in present],
                color=series_colour(at),
                marker="os"[at],
                s=20,
                label=head,
            )
        axes.set_yticks([-at for at in range(len(shown))], shown)
        axes.tick_params(axis="y", colors=INK, length=0)
        axes.set_xlabel("test ROC-AUC")
        axes.legend(loc="best")

    left_out = len(ordered) - len(shown)
    return Figure(
        name="targets",
        title="ROC-AUC of every target",
        caption="Test part, mean over fits; rows without a label do not count"
        + (f"; the best {len(shown)} of {len(ordered)} targets." if left_out else "."),
        alternative="ROC-AUC by target: "
        + ", ".join(f"{name} {number(scores[record.head][name])}" for name in shown)
        + ".",
        picture=Chart(draw, size=(4.2, max(2.2, 0.9 + 0.2 * len(shown)))),
    )
