"""ROC and precision-recall curves of a two-class task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn import metrics as sk

from ..runs.run import Run
from ..tasks import Task
from ..utils.text import number, plural
from .figures import CHOSEN, DASHES, GRID, MUTED, Chart, Figure, series_colour
from .outcomes import Outcome, chosen_outcomes, outcomes_of, readout_to_beat
from .prediction_charts import class_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SQUARE = (4.2, 3.7)

#: Truth (0 or 1) and probability of the rows of one fit, each ``[rows]``.
Pair = tuple[np.ndarray, np.ndarray]


def two_class_rows(outcome: Outcome, task: Task) -> Pair:
    """Return truth (0 or 1) and probability of the rows that have a label, each ``[rows]``."""
    present = ~np.isnan(outcome.labels[:, 0])
    truth = outcome.labels[present, 0] == task.classes[1]
    return truth.astype(int), outcome.predicted[present, -1]


def roc_figure(run: Run) -> Figure | None:
    """Draw the ROC curve of every fit; None where the test part has one class only."""
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
        caption=f"Test part, a line per fit ({plural(len(chosen_outcomes(run)), 'fit')}); the "
        "numbers are areas under the curve, means over folds.",
        alternative=f"ROC curves; area under the curve: {_listed(areas)}.",
        picture=Chart(draw, size=_SQUARE),
    )


def precision_figure(run: Run) -> Figure | None:
    """Draw precision against recall of every fit; None where there is one class only."""
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
        caption="Test part, a line per fit; the level line is the share of positives, the numbers "
        "are average precision, means over folds.",
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
    """Draw a line per fit, and name each readout once."""
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

#: Bins of equal width between 0 and 1.
NUM_BINS = 10


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed frequencies, in the bins that have rows."""

    predicted: np.ndarray
    observed: np.ndarray
    counts: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean gap, weighted by rows."""
        gaps = np.abs(self.predicted - self.observed)
        return float((gaps * self.counts).sum() / self.counts.sum())


def reliability(probabilities: np.ndarray, right: np.ndarray) -> Reliability:
    """Group predictions by their probability.

    Args:
        probabilities: What was predicted, 0 to 1, ``[rows]``.
        right: Whether it came true, ``[rows]``.
    """
    bins = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    used = counts > 0
    predicted = np.bincount(bins, weights=probabilities, minlength=NUM_BINS)[used] / counts[used]
    observed = np.bincount(bins, weights=right, minlength=NUM_BINS)[used] / counts[used]
    return Reliability(predicted, observed, counts[used])


def _rows(outcome: Outcome, task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return probability and truth: of the second class, of every target, or of the choice."""
    if task.kind == "binary":
        truth, probabilities = two_class_rows(outcome, task)
        return probabilities, truth
    if task.kind == "multilabel":
        present = ~np.isnan(outcome.labels)
        return outcome.predicted[present], outcome.labels[present]
    labelled = ~np.isnan(outcome.labels[:, 0])
    truth, chosen = class_rows(outcome, task)
    return outcome.predicted[labelled].max(axis=1), truth == chosen


def calibration_figure(outcomes: Sequence[Outcome], task: Task) -> Figure | None:
    """Draw the reliability diagram of the test rows of all folds."""
    pairs = [_rows(outcome, task) for outcome in outcomes]
    probabilities, right = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if not len(probabilities):
        return None
    found = reliability(probabilities, right)

    def draw(axes: Axes) -> None:
        axes.bar(found.predicted, found.counts / found.counts.max() * 0.25, width=0.05, color=GRID)
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        axes.plot(found.predicted, found.observed, color=CHOSEN, marker="o")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.set_aspect("equal")
        axes.set_xlabel("predicted probability")
        axes.set_ylabel("observed frequency")

    of_what = {
        "binary": "of the second class",
        "multilabel": "of all targets together",
        "multiclass": "of the predicted class",
    }[task.kind]
    shown = ", ".join(
        f"{p:.2f} came true {o:.0%}" for p, o in zip(found.predicted, found.observed, strict=True)
    )
    return Figure(
        name="calibration",
        title="Calibration",
        caption=f"Probabilities {of_what}, test rows of all folds in {NUM_BINS} bins; grey bars "
        f"show how many rows a bin has. Expected calibration error {number(found.error)}.",
        alternative=f"Reliability diagram; expected calibration error {number(found.error)}; "
        f"predictions of {shown}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )
