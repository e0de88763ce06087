"""Regression as figures: predicted against true, and the errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..metrics import regression_scores
from ..utils.text import MINUS, number
from .figures import Chart, Figure
from .record import Outcome
from .style import CHOSEN, MUTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Points that are drawn; of more, so many are chosen by a seed.
_MAX_POINTS = 2000


def target_rows(outcomes: Sequence[Outcome], target: int) -> tuple[np.ndarray, np.ndarray]:
    """Return true and predicted values of the rows of all fits that have a label."""
    truth = np.concatenate([outcome.labels[:, target] for outcome in outcomes])
    predicted = np.concatenate([outcome.predicted[:, target] for outcome in outcomes])
    present = ~np.isnan(truth)
    return truth[present], predicted[present]


def scatter_figure(outcomes: Sequence[Outcome], target: int, name: str) -> Figure | None:
    """Draw predicted against true values of one target."""
    truth, predicted = target_rows(outcomes, target)
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

    said = ", ".join(f"{metric.upper()} {number(value)}" for metric, value in scores.items())
    sampled = (
        f" {_MAX_POINTS:,} of {len(truth):,} rows are drawn." if len(truth) > _MAX_POINTS else ""
    )
    return Figure(
        name=f"predicted-{_plain(name, target)}",
        title=f"Predicted against true: {name}",
        caption=f"Test rows of all fits together: {said}.{sampled}",
        alternative=f"Scatter plot of predicted against true {name} along the diagonal; {said}.",
        picture=Chart(draw, size=(4.2, 3.7)),
    )


def error_figure(outcomes: Sequence[Outcome], target: int, name: str) -> Figure | None:
    """Draw how the errors of one target are distributed."""
    truth, predicted = target_rows(outcomes, target)
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
