"""Scores as figures: the readouts ranked, and how they learned."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..experiments.results import OWN
from ..metrics import Summary
from ..runs.run import Run
from ..utils.text import metric_name, number, spread
from .figures import CHOSEN, DASHES, GRID, INK, MUTED, RIVAL, Chart, Figure, series_colour
from .outcomes import readout_to_beat

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Readouts whose learning curves are drawn at most: more lines cannot be told apart.
_MAX_CURVES = 6
#: Up to so many names there is room for inside the axes.
_MAX_INSIDE = 3


def ranking_figure(run: Run, ranked: Mapping[str, Summary]) -> Figure:
    """Draw the test score of every readout, the best by validation first."""
    names = list(ranked)
    summaries = list(ranked.values())
    metric = metric_name(run.results["metric"])

    def draw(axes: Axes) -> None:
        places = np.arange(len(names))[::-1]
        for place, name, summary in zip(places, names, summaries, strict=True):
            colour = {run.head: CHOSEN, readout_to_beat(run): RIVAL}.get(name, MUTED)
            scores = _test_scores(run, name)
            axes.scatter(scores, [place] * len(scores), s=9, color=colour, alpha=0.35, linewidths=0)
            axes.errorbar(
                summary.mean,
                place,
                xerr=summary.deviation or None,
                fmt="D" if name == OWN else "o",
                color=colour,
                markersize=5,
                elinewidth=1.6,
                capsize=3,
            )
        axes.set_yticks(places, names)
        axes.tick_params(axis="y", colors=INK, length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(
            f"test {metric}" + ("" if run.results["higher_is_better"] else " (lower is better)")
        )
        axes.set_ylim(-0.6, len(names) - 0.4)

    shown = "; ".join(f"{n} {spread(s.mean, s.deviation)}" for n, s in ranked.items())
    return Figure(
        name="ranking",
        title=f"Test {metric} of every readout",
        caption="Mean and standard deviation over folds and seeds; each faint dot is a fit. In "
        "the order of the table.",
        alternative=f"Readouts by test {metric}, in the order of validation: {shown}.",
        picture=Chart(draw, size=(4.2, max(1.7, 0.9 + 0.27 * len(names)))),
    )


def _test_scores(run: Run, name: str) -> list[float]:
    return list(run.scores(name, "test").values())


def learning_figures(run: Run, ranked: Sequence[str]) -> list[Figure]:
    """Draw what was measured after every epoch."""
    fits: dict[str, dict[tuple[int, int], list[dict[str, Any]]]] = defaultdict(dict)
    for line in run.log:
        fits[line["head"]].setdefault((line["fold"], line["seed"]), []).append(line)
    found = [_valid_figure(run, fits, ranked), _loss_figure(run, fits.get(run.head, {}))]
    return [figure for figure in found if figure is not None]


Fits = Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]


def _curves(fits: Fits, key: str) -> list[np.ndarray]:
    """Return what one quantity was after every epoch of each fit: ``[epochs]`` each."""
    return [
        np.array([line[key] for line in lines])
        for lines in fits.values()
        if all(key in line for line in lines)
    ]


def _draw_curves(axes: Axes, curves: Sequence[np.ndarray], style: Mapping[str, Any]) -> None:
    """Draw each fit thinly, and their mean over the epochs that all of them reached."""
    for curve in curves if len(curves) > 1 else []:
        axes.plot(np.arange(1, len(curve) + 1), curve, color=style["color"], alpha=0.25, lw=0.7)
    common = min(len(curve) for curve in curves)
    mean = np.mean([curve[:common] for curve in curves], axis=0)
    axes.plot(np.arange(1, common + 1), mean, marker="o" if common == 1 else None, **style)


def _valid_figure(run: Run, fits: Mapping[str, Fits], ranked: Sequence[str]) -> Figure | None:
    metric = run.results["metric"]
    wanted = dict.fromkeys(filter(None, [run.head, readout_to_beat(run), *ranked]))
    curves = {
        name: found for name in wanted if (found := _curves(fits.get(name, {}), f"valid_{metric}"))
    }
    shown = dict(list(curves.items())[:_MAX_CURVES])
    if not shown:
        return None

    def draw(axes: Axes) -> None:
        for at, (name, found) in enumerate(shown.items()):
            style = {"color": series_colour(at), "linestyle": DASHES[at], "label": name}
            _draw_curves(axes, found, style)
        axes.set_xlabel("epoch")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(f"validation {metric_name(metric)}")
        if len(shown) > _MAX_INSIDE:
            axes.figure.legend(loc="outside lower left", ncols=3)
        else:
            axes.legend(loc="best")

    ends = "; ".join(
        f"{name} begins at {number(np.mean([c[0] for c in found]))} and ends at "
        f"{number(np.mean([c[-1] for c in found]))}"
        for name, found in shown.items()
    )
    left_out = len(curves) - len(shown)
    return Figure(
        name="learning-validation",
        title=f"Validation {metric_name(metric)} while training",
        caption="Thin lines are single fits; the thick line is their mean, up to the epoch that "
        "all of them reached."
        + (f" {left_out} more readouts are not drawn." if left_out else "")
        + (_SOLVED if _solved(run) & set(shown) else ""),
        alternative=f"Validation {metric_name(metric)} by epoch. {ends}.",
        picture=Chart(draw),
    )


#: Of curves of readouts that have no epochs.
_SOLVED = (
    " A solved readout has no epochs: its curve runs from the strongest penalty on the weights to "
    "the weakest."
)


def _solved(run: Run) -> set[str]:
    return {fit["head"] for fit in run.results["fits"] if fit.get("strength") is not None}


def _loss_figure(run: Run, fits: Fits) -> Figure | None:
    found = {"training": _curves(fits, "loss"), "validation": _curves(fits, "valid_loss")}
    drawn = {name: curves for name, curves in found.items() if curves}
    if not drawn:
        return None

    def draw(axes: Axes) -> None:
        for at, (name, curves) in enumerate(drawn.items()):
            style = {"color": series_colour(at), "linestyle": DASHES[at], "label": name}
            _draw_curves(axes, curves, style)
        best = [
            fit["best_epoch"]
            for fit in run.results["fits"]
            if fit["head"] == run.head and fit.get("best_epoch") is not None
        ]
        for epoch in best:
            axes.axvline(epoch + 1, color=GRID, linewidth=1.0, zorder=0)
        axes.set_xlabel("epoch")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel("loss")
        axes.legend(loc="best")

    ends = "; ".join(
        f"{name} loss goes from {number(np.mean([c[0] for c in curves]))} to "
        f"{number(np.mean([c[-1] for c in curves]))}"
        for name, curves in drawn.items()
    )
    return Figure(
        name="learning-loss",
        title=f"Loss of {run.head}",
        caption="Thin lines are single fits; grey vertical lines mark the epochs that validation "
        "chose." + (_SOLVED if run.head in _solved(run) else ""),
        alternative=f"Loss by epoch: {ends}.",
        picture=Chart(draw),
    )


def trials_figure(run: Run, trials: list[Any], scored: list[Any]) -> Figure:
    """Draw what every trial of a search has scored, and the best so far."""
    metric = metric_name(run.results["metric"])
    places = [trial["number"] for trial in scored]
    scores = [trial["score"] for trial in scored]
    best = list(accumulate(scores, max if run.results["higher_is_better"] else min))
    others = [trial["number"] for trial in trials if trial["score"] is None]

    def draw(axes: Axes) -> None:
        axes.step(places, best, where="post", color=CHOSEN, label="best so far")
        axes.scatter(places, scores, s=16, color=MUTED, linewidths=0, label="trial", zorder=3)
        if others:
            bottom = axes.get_xaxis_transform()  # data along x, the height of the axes along y
            axes.scatter(
                others,
                [0.02] * len(others),
                s=18,
                marker="x",
                color=MUTED,
                linewidths=0.9,
                transform=bottom,
                label="stopped early",
            )
        axes.set_xlabel("trial")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(f"validation {metric}")
        axes.legend(loc="best")

    return Figure(
        name="search",
        title=f"Validation {metric} of every trial",
        caption="Each dot is a trial: the mean over folds and seeds. Crosses are trials that were "
        "stopped early or failed.",
        alternative=f"Validation {metric} by trial: the first, with the defaults, has "
        f"{number(scores[0])}, the best {number(best[-1])}.",
        picture=Chart(draw),
    )
