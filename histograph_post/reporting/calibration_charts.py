"""Calibration: whether what is called 80 % likely is right four times in five."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..tasks import Task
from ..utils.text import number
from .class_charts import class_rows
from .curve_charts import two_class_rows
from .figures import Chart, Figure
from .record import Outcome
from .style import CHOSEN, GRID, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    """Draw the reliability diagram of the test rows of all fits."""
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
        caption=f"Probabilities {of_what}, test rows of all fits in {NUM_BINS} bins; grey bars "
        f"show how many rows a bin has. Expected calibration error {number(found.error)}.",
        alternative=f"Reliability diagram; expected calibration error {number(found.error)}; "
        f"predictions of {shown}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )
