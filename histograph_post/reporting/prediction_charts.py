"""Figures of predictions against labels, for every kind of task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn import metrics as sk

from ..metrics import NUM_BINS, regression_scores, reliability
from ..runs.predictions import calibration_error, confidences, likeliest_classes
from ..runs.run import Run
from ..tasks import Task
from ..utils.text import MINUS, metric_name, number, plural
from .figures import (
    CHOSEN,
    DASHES,
    GRID,
    INK,
    MUTED,
    RIVAL,
    Chart,
    Figure,
    draw_cells,
    series_colour,
)
from .outcomes import Outcome, chosen_outcomes, combined, outcomes_of, readout_to_beat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SQUARE = (4.2, 3.7)

#: Targets of a regression that are drawn at most.
_MAX_REGRESSIONS = 4


def outcome_figures(run: Run) -> list[Figure]:
    """Draw the predictions of the chosen readout for the test rows."""
    outcomes, task = chosen_outcomes(run), run.task
    if not outcomes:
        return []
    every = combined(outcomes)
    found: list[Figure | None] = []
    if task.kind == "regression":
        for at, name in enumerate(run.saved_head.target_names[:_MAX_REGRESSIONS]):
            found += regression_figures(every, at, name)
    elif task.kind == "binary":
        found += [*curve_figures(run), confusion_figure(every, task)]
    elif task.kind == "multiclass":
        found.append(confusion_figure(every, task))
    else:
        found.append(targets_figure(run))
    if task.kind != "regression":
        found.append(calibration_figure(run, every))
    return [figure for figure in found if figure is not None]


def labelled_rows(outcome: Outcome, target: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that have a label of one target: ``[rows]``, and ``[rows, outputs]``."""
    present = ~np.isnan(outcome.labels[:, target])
    return outcome.labels[present, target], outcome.predicted[present]


# --- two classes: ROC and precision-recall curves

#: Truth (0 or 1) and probability of the rows of one fold, each ``[rows]``.
Pair = tuple[np.ndarray, np.ndarray]


def curve_figures(run: Run) -> list[Figure]:
    """Draw ROC and precision against recall of every fold that has both classes."""
    curves: dict[str, list[Pair]] = {}  # of the chosen readout and the one to beat
    for head in filter(None, (run.head, readout_to_beat(run))):
        rows = [labelled_rows(outcome) for outcome in outcomes_of(run, head)]
        pairs = [((labels == run.task.classes[1]).astype(int), p[:, -1]) for labels, p in rows]
        curves[head] = [pair for pair in pairs if len(np.unique(pair[0])) == 2]
    if not curves[run.head]:
        return []
    curves = {head: pairs for head, pairs in curves.items() if pairs}

    def means(score: Callable[[np.ndarray, np.ndarray], float]) -> dict[str, float]:
        return {
            head: float(np.mean([score(*pair) for pair in pairs])) for head, pairs in curves.items()
        }

    areas, precisions = means(sk.roc_auc_score), means(sk.average_precision_score)
    share = float(np.mean([truth.mean() for truth, _ in curves[run.head]]))

    def draw_roc(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        _draw_curves(axes, curves, areas, lambda *pair: sk.roc_curve(*pair)[:2])
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.legend(loc="lower right")

    def draw_precision(axes: Axes) -> None:
        axes.axhline(share, color=MUTED, linewidth=0.8)
        line = sk.precision_recall_curve
        _draw_curves(axes, curves, precisions, lambda *pair: line(*pair)[1::-1])
        axes.set_xlabel("recall")
        axes.set_ylabel("precision")
        axes.legend(loc="lower left")

    return [
        Figure(
            name="roc",
            title="ROC curves",
            caption=f"Test part, one line per fold ({plural(len(chosen_outcomes(run)), 'fold')}). "
            "In brackets: the area under the curve, mean over folds.",
            alternative=f"ROC curves; area under the curve: {_listed(areas)}.",
            picture=Chart(draw_roc, size=_SQUARE),
        ),
        Figure(
            name="precision-recall",
            title="Precision and recall",
            caption="Test part, one line per fold; the horizontal line is the share of positives. "
            "In brackets: average precision, mean over folds.",
            alternative=f"Precision-recall curves; average precision: {_listed(precisions)}; share "
            f"of positives {number(share)}.",
            picture=Chart(draw_precision, size=_SQUARE),
        ),
    ]


def _draw_curves(
    axes: Axes,
    curves: Mapping[str, Sequence[Pair]],
    scores: Mapping[str, float],
    line: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> None:
    """Draw a line per fold, with one legend entry per readout."""
    for at, (head, pairs) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": series_colour(at), "linestyle": DASHES[at]}
        faint: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5} if len(pairs) > 1 else {}
        for pair in pairs:
            axes.plot(*line(*pair), **style, **faint)
        axes.plot([], [], **style, label=f"{head} ({scores[head]:.3f})")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


# --- calibration: whether predictions of 80 % are right four times in five


#: A bin of fewer rows is not drawn: it would jump between 0 and 1.
_FEWEST_IN_BIN = 5

_BEFORE, _AFTER = "before (as trained)", "after (calibrated)"


def calibration_figure(run: Run, every: Outcome) -> Figure | None:
    """Draw the reliability diagram of the test rows, before and after calibration."""
    if np.isnan(every.labels).all():
        return None
    task, temperature = run.task, run.saved_head.temperature
    drawn = {_AFTER: every.predicted}
    if temperature != 1:
        # Stored probabilities are calibrated: undo that.
        logits = torch.from_numpy(task.logits(every.predicted)) * temperature
        drawn = {_BEFORE: task.probabilities(logits).numpy(), **drawn}
    found = {}
    for name, values in drawn.items():  # how sure a prediction was, and whether it was right
        pairs = confidences(task, values, every.labels)
        sure, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        found[name] = reliability(sure, right)
    errors = {name: calibration_error(task, values, every.labels) for name, values in drawn.items()}
    lowest = 0.0 if task.kind == "multiclass" and len(task.classes) > 2 else 0.5

    def draw(axes: Axes) -> None:
        last = found[_AFTER]
        heights = last.counts / last.counts.max() * 0.25
        axes.bar(last.predicted, heights, width=0.6 * (1 - lowest) / NUM_BINS, color=GRID)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for name, each in found.items():
            is_last, enough = each is last, each.counts >= _FEWEST_IN_BIN
            axes.plot(
                each.predicted[enough],
                each.observed[enough],
                color=CHOSEN if is_last else RIVAL,
                linestyle=DASHES[0 if is_last else 1],
                marker="o" if is_last else "s",
                markersize=5 if is_last else 4,
                label=name,
            )
        axes.set_xlim(lowest - 0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("share that was right")
        if len(found) > 1:
            axes.figure.legend(loc="outside lower left", ncols=2)

    if len(found) > 1:
        stated = f"{number(errors[_BEFORE])} before, {number(errors[_AFTER])} after"
        stated += f" dividing logits by {number(temperature)}, fitted on the validation part"
    else:
        stated = f"{number(errors[_AFTER])}; the probabilities are not calibrated"
    shown = ", ".join(
        f"{p:.2f} was right {o:.0%}"
        for p, o in zip(found[_AFTER].predicted, found[_AFTER].observed, strict=True)
    )
    of_what = "predicted classes" if task.kind != "multilabel" else "predictions of all targets"
    return Figure(
        name="calibration",
        title="Calibration before and after" if len(found) > 1 else "Calibration",
        caption=f"Probabilities of the {of_what}, every test row once, in {NUM_BINS} bins; grey "
        f"bars show how many rows a bin has, and no point is drawn for fewer than "
        f"{_FEWEST_IN_BIN}. Expected calibration error: {stated}.",
        alternative=f"Reliability diagram; expected calibration error {stated}; "
        f"what was predicted with {shown}.",
        picture=Chart(draw, size=_SQUARE),
    )


# --- classes: the confusion matrix, and the targets of a multi-label task

#: Classes of a confusion matrix at most: more cells cannot be read.
_MAX_CLASSES = 20
#: Up to so many classes, cells have room for counts.
_COUNTED_CLASSES = 6
#: Targets that are listed at most.
_MAX_TARGETS = 40


def confusion_counts(outcome: Outcome, task: Task) -> np.ndarray:
    """Count true (rows) by predicted (columns) classes: ``[classes, classes]``."""
    labels, outputs = labelled_rows(outcome)  # [rows] and [rows, outputs]
    predicted = likeliest_classes(task, outputs)
    assert predicted is not None  # of a task with classes
    # As positions: scikit-learn takes labels that are no whole numbers for values.
    both = [np.searchsorted(task.classes, each) for each in (labels, predicted)]
    return np.asarray(sk.confusion_matrix(*both, labels=range(len(task.classes))))


def confusion_figure(outcome: Outcome, task: Task) -> Figure | None:
    """Draw the confusion matrix of every test row once; None for more classes than one can read."""
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
        picture=Chart(draw, size=_SQUARE),
    )


def target_areas(outcomes: Sequence[Outcome], num_targets: int) -> list[float]:
    """Return the ROC-AUC of each target, mean over folds; NaN where it has a single class."""
    areas = []
    for target in range(num_targets):
        found = []
        for outcome in outcomes:
            truth, predicted = labelled_rows(outcome, target)
            if len(np.unique(truth)) == 2:
                found.append(sk.roc_auc_score(truth, predicted[:, target]))
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


# --- regression: predicted against true values, and the errors

#: Points that are drawn at most; of more, a random sample.
_MAX_POINTS = 2000


def regression_figures(outcome: Outcome, target: int, name: str) -> list[Figure]:
    """Draw predicted against true values of one target, every test row once, and the errors."""
    truth, outputs = labelled_rows(outcome, target)
    if not len(truth):
        return []
    predicted = outputs[:, target]
    errors = predicted - truth
    low, middle, high = np.quantile(errors, [0.05, 0.5, 0.95])
    chosen = np.random.default_rng(0).permutation(len(truth))[:_MAX_POINTS]

    def draw_values(axes: Axes) -> None:
        low, high = min(truth.min(), predicted.min()), max(truth.max(), predicted.max())
        axes.plot([low, high], [low, high], color=MUTED, linewidth=0.8)
        axes.scatter(truth[chosen], predicted[chosen], s=9, color=CHOSEN, alpha=0.45, linewidths=0)
        axes.set_xlabel("true")
        axes.set_ylabel("predicted")
        axes.set_aspect("equal", adjustable="datalim")

    def draw_errors(axes: Axes) -> None:
        axes.hist(errors, bins=min(40, max(5, int(len(errors) ** 0.5))), color=CHOSEN, alpha=0.75)
        axes.axvline(0, color=MUTED, linewidth=0.8)
        axes.set_xlabel(f"predicted {MINUS} true")
        axes.set_ylabel("rows")
        axes.grid(axis="x", visible=False)

    scores = regression_scores(truth, predicted)
    shown = ", ".join(f"{metric_name(metric)} {number(value)}" for metric, value in scores.items())
    sampled = (
        f" {_MAX_POINTS:,} of {len(truth):,} rows are drawn." if len(truth) > _MAX_POINTS else ""
    )
    file = f"{target}-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    return [
        Figure(
            name=f"predicted-{file}",
            title=f"Predicted against true: {name}",
            caption=f"Test rows of all folds, each once (seeds averaged): {shown}.{sampled}",
            alternative=f"Scatter plot of predicted against true {name} along the diagonal; "
            f"{shown}.",
            picture=Chart(draw_values, size=_SQUARE),
        ),
        Figure(
            name=f"errors-{file}",
            title=f"Errors: {name}",
            caption=f"Median {number(middle)}; 90 % of the errors lie between {number(low)} and "
            f"{number(high)}.",
            alternative=f"Histogram of errors; median {number(middle)}, 5 % below {number(low)}, "
            f"5 % above {number(high)}.",
            picture=Chart(draw_errors, size=_SQUARE),
        ),
    ]
