"""Predictions against the truth: confusion matrix, targets of a multi-label task, regression."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from sklearn.metrics import roc_auc_score

from ..metrics import regression_scores
from ..runs.run import Run
from ..tasks import Task
from ..utils.text import MINUS, metric_name, number
from .figures import CHOSEN, INK, MUTED, Chart, Figure, draw_cells, series_colour
from .outcomes import Outcome, outcomes_of, readout_to_beat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- classes as figures: the confusion matrix, and the targets of a multi-label task

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


def confusion_counts(outcome: Outcome, task: Task) -> np.ndarray:
    """Count true (rows) by predicted (columns) classes: ``[classes, classes]``."""
    counts = np.zeros((len(task.classes), len(task.classes)), dtype=np.int64)
    np.add.at(counts, class_rows(outcome, task), 1)
    return counts


def confusion_figure(outcome: Outcome, task: Task) -> Figure | None:
    """Draw the confusion matrix; None where there are too many classes to read it.

    Args:
        outcome: Every test row once.
        task: What is predicted.
    """
    counts = confusion_counts(outcome, task)
    if len(counts) > _MAX_CLASSES or not counts.any():
        return None
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # of each true class
    names = [f"{value:g}" for value in task.classes]
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
        caption="Test rows of all folds, each counted once (seeds averaged), as shares of the true "
        + ("class and as counts." if counted else "class."),
        alternative=f"Confusion matrix; predicted right: {right}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )


def target_areas(outcomes: Sequence[Outcome], num_targets: int) -> list[float]:
    """Return the ROC-AUC of each target, mean over folds; NaN where it has a single class."""
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


def targets_figure(run: Run) -> Figure | None:
    """Draw the ROC-AUC of every target of a multi-label task, best first."""
    names = run.saved_head.target_names
    scores = {}
    for head in filter(None, (run.head, readout_to_beat(run))):
        areas = target_areas(outcomes_of(run, head), len(names))
        scores[head] = {n: area for n, area in zip(names, areas, strict=True) if area == area}
    ordered = sorted(scores[run.head].items(), key=lambda pair: -pair[1])
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
        caption="Test part, mean over folds; rows without a label do not count"
        + (f"; the best {len(shown)} of {len(ordered)} targets." if left_out else "."),
        alternative="ROC-AUC by target: "
        + ", ".join(f"{name} {number(scores[run.head][name])}" for name in shown)
        + ".",
        picture=Chart(draw, size=(4.2, max(2.2, 0.9 + 0.2 * len(shown)))),
    )


# --- regression as figures: predicted against true, and the errors

#: Points that are drawn; of more, so many are chosen by a seed.
_MAX_POINTS = 2000


def target_rows(outcome: Outcome, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Return true and predicted values of the rows that have a label."""
    truth, predicted = outcome.labels[:, target], outcome.predicted[:, target]
    present = ~np.isnan(truth)
    return truth[present], predicted[present]


def scatter_figure(outcome: Outcome, target: int, name: str) -> Figure | None:
    """Draw predicted against true values of one target; ``outcome`` has every row once."""
    truth, predicted = target_rows(outcome, target)
    if not len(truth):
        return None
    scores = regression_scores(truth, predicted)
    chosen = np.random.default_rng(0).permutation(len(truth))[:_MAX_POINTS]

    def draw(axes: Axes) -> None:
        low, high = min(truth.min(), predicted.min()), max(truth.max(), predicted.max())
        axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8)
        axes.scatter(truth[chosen], predicted[chosen], s=9, color=CHOSEN, alpha=0.45, linewidths=0)
        axes.set_xlabel("true")
        axes.set_ylabel("predicted")
        axes.set_aspect("equal", adjustable="datalim")

    said = ", ".join(f"{metric_name(metric)} {number(value)}" for metric, value in scores.items())
    sampled = (
        f" {_MAX_POINTS:,} of {len(truth):,} rows are drawn." if len(truth) > _MAX_POINTS else ""
    )
    return Figure(
        name=f"predicted-{_plain(name, target)}",
        title=f"Predicted against true: {name}",
        caption=f"Test rows of all folds, each once (seeds averaged): {said}.{sampled}",
        alternative=f"Scatter plot of predicted against true {name} along the diagonal; {said}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )


def error_figure(outcome: Outcome, target: int, name: str) -> Figure | None:
    """Draw how the errors of one target are distributed."""
    truth, predicted = target_rows(outcome, target)
    if not len(truth):
        return None
    errors = predicted - truth
    low, middle, high = np.quantile(errors, [0.05, 0.5, 0.95])

    def draw(axes: Axes) -> None:
        axes.hist(errors, bins=min(40, max(5, int(len(errors) ** 0.5))), color=CHOSEN, alpha=0.75)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_xlabel(f"predicted {MINUS} true")
        axes.set_ylabel("rows")
        axes.grid(axis="x", visible=False)

    return Figure(
        name=f"errors-{_plain(name, target)}",
        title=f"Errors: {name}",
        caption=f"Median {number(middle)}; 90 % of the errors lie between {number(low)} and "
        f"{number(high)}.",
        alternative=f"Histogram of errors; median {number(middle)}, 5 % below {number(low)}, 5 % "
        f"above {number(high)}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )


def _plain(name: str, target: int) -> str:
    """Return a target's name as part of a file name."""
    return f"{target}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
