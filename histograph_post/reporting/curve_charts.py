"""ROC and precision-recall curves of a two-class task, and calibration of any with classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn import metrics as sk

from ..metrics import NUM_BINS, reliability
from ..runs.predictions import calibration_error, confidences
from ..runs.run import Run
from ..tasks import Task
from ..utils.text import number, plural
from .figures import CHOSEN, DASHES, GRID, MUTED, RIVAL, Chart, Figure, series_colour
from .outcomes import Outcome, chosen_outcomes, combined, outcomes_of, readout_to_beat

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SQUARE = (4.2, 3.7)

#: Truth (0 or 1) and probability of the rows of one fold, each ``[rows]``.
Pair = tuple[np.ndarray, np.ndarray]


def two_class_rows(outcome: Outcome, task: Task) -> Pair:
    """Return truth (0 or 1) and probability of the rows that have a label, each ``[rows]``."""
    present = ~np.isnan(outcome.labels[:, 0])
    truth = outcome.labels[present, 0] == task.classes[1]
    return truth.astype(int), outcome.predicted[present, -1]


def roc_figure(run: Run) -> Figure | None:
    """Draw the ROC curve of every fold; None where the test part has one class only."""
    curves = _curves(run)
    if not curves:
        return None
    areas = _means(curves, sk.roc_auc_score)

    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        _draw(axes, curves, areas, lambda truth, values: sk.roc_curve(truth, values)[:2])
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        axes.legend(loc="lower right")

    return Figure(
        name="roc",
        title="ROC curves",
        caption=f"Test part, one line per fold ({plural(len(chosen_outcomes(run)), 'fold')}). In "
        "brackets: the area under the curve, mean over folds.",
        alternative=f"ROC curves; area under the curve: {_listed(areas)}.",
        picture=Chart(draw, size=_SQUARE),
    )


def precision_figure(run: Run) -> Figure | None:
    """Draw precision against recall of every fold; None where there is one class only."""
    curves = _curves(run)
    if not curves:
        return None
    areas = _means(curves, sk.average_precision_score)
    share = float(np.mean([truth.mean() for truth, _ in curves[run.head]]))

    def draw(axes: Axes) -> None:
        axes.axhline(share, color=MUTED, linewidth=0.8)
        _draw(
            axes,
            curves,
            areas,
            lambda truth, values: sk.precision_recall_curve(truth, values)[1::-1],
        )
        axes.set_xlabel("recall")
        axes.set_ylabel("precision")
        axes.legend(loc="lower left")

    return Figure(
        name="precision-recall",
        title="Precision and recall",
        caption="Test part, one line per fold; the horizontal line is the share of positives. In "
        "brackets: average precision, mean over folds.",
        alternative=f"Precision-recall curves; average precision: {_listed(areas)}; share of "
        f"positives {number(share)}.",
        picture=Chart(draw, size=_SQUARE),
    )


def _curves(run: Run) -> dict[str, list[Pair]]:
    """Return the rows of every fit that has both classes, of the chosen readout and its rival."""
    found = {}
    for head in filter(None, (run.head, readout_to_beat(run))):
        pairs = [two_class_rows(outcome, run.task) for outcome in outcomes_of(run, head)]
        found[head] = [pair for pair in pairs if len(np.unique(pair[0])) == 2]
    return {head: pairs for head, pairs in found.items() if pairs and found[run.head]}


def _means(
    curves: Mapping[str, Sequence[Pair]], score: Callable[[np.ndarray, np.ndarray], float]
) -> dict[str, float]:
    return {
        head: float(np.mean([score(truth, values) for truth, values in pairs]))
        for head, pairs in curves.items()
    }


def _draw(
    axes: Axes,
    curves: Mapping[str, Sequence[Pair]],
    areas: Mapping[str, float],
    line: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]],
) -> None:
    """Draw a line per fold, and name each readout once."""
    for at, (head, pairs) in enumerate(curves.items()):
        style: dict[str, Any] = {"color": series_colour(at), "linestyle": DASHES[at]}
        faint: dict[str, Any] = {"linewidth": 1.0, "alpha": 0.5} if len(pairs) > 1 else {}
        for truth, values in pairs:
            axes.plot(*line(truth, values), **style, **faint)
        axes.plot([], [], **style, label=f"{head} ({areas[head]:.3f})")
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_aspect("equal")


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in values.items())


# --- calibration: whether what is called 80 % likely is right four times in five


def _pooled(
    task: Task, probabilities: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return how sure every prediction was and whether it was right, all targets together."""
    pairs = confidences(task, probabilities, labels)
    sure, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return sure, right


#: A bin of fewer rows is left out of the picture: it would jump between 0 and 1.
_FEWEST_IN_BIN = 5

_BEFORE, _AFTER = "before (as trained)", "after (calibrated)"


def calibration_figure(run: Run) -> Figure | None:
    """Draw the reliability diagram of the test rows, before and after calibration."""
    every, task = combined(chosen_outcomes(run)), run.task
    drawn = {_AFTER: every.predicted}
    temperature = run.saved_head.temperature
    if temperature != 1:
        # What is stored is calibrated: this is the way back.
        logits = torch.from_numpy(task.logits(every.predicted)) * temperature
        drawn = {_BEFORE: task.probabilities(logits).numpy(), **drawn}
    pooled = {name: _pooled(task, values, every.labels) for name, values in drawn.items()}
    if not len(pooled[_AFTER][0]):
        return None
    found = {name: reliability(*pair) for name, pair in pooled.items()}
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
        said = f"{number(errors[_BEFORE])} before, {number(errors[_AFTER])} after"
        said += f" dividing logits by {temperature:.3g}, fitted on the validation part"
    else:
        said = f"{number(errors[_AFTER])}; the probabilities are not calibrated"
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
        f"{_FEWEST_IN_BIN}. Expected calibration error: {said}.",
        alternative=f"Reliability diagram; expected calibration error {said}; "
        f"what was predicted with {shown}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )
