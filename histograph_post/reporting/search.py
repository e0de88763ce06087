"""The search behind a tuned readout: which options were tried, and what they gave."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..runs.run import Run
from ..runs.summary import ranked_trials
from ..utils.text import metric_name, number, setting
from .figures import CHOSEN, MUTED, Chart, Figure
from .page import Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Trials in the table.
_MAX_TRIALS = 10


def search_section(run: Run) -> Section:
    """Return what a search has tried; an empty section where there was none."""
    tuning = run.results.get("tuning")
    if tuning is None:
        return Section("search", "Search")
    trials = tuning["trials"]
    scored = [trial for trial in trials if trial["score"] is not None]
    given_up = sum(trial["state"] == "pruned" for trial in trials)
    failed = len(trials) - len(scored) - given_up
    text = (
        f"{len(trials)} choices of options were tried, trial 0 the defaults; {given_up} of them "
        f"were given up early and {failed} failed. Trial {tuning['trial']} was the best by "
        "validation. The search has not looked at the test part."
    )
    return Section(
        "search",
        "Search",
        text=text,
        tables=[_trials_table(run, list(tuning["values"]))],
        figures=[_trials_figure(run, trials, scored)],
    )


def _trials_table(run: Run, names: list[str]) -> Table:
    rows = [
        [
            str(trial["number"]),
            number(trial["score"]),
            *(setting(trial["values"][name]) for name in names),
        ]
        for trial in ranked_trials(run.results)[:_MAX_TRIALS]
    ]
    metric = metric_name(run.results["metric"])
    columns = ["trial", f"validation {metric}", *(name.replace("_", " ") for name in names)]
    return Table(columns, rows, caption="The best trials.", chosen=0)


def _trials_figure(run: Run, trials: list[Any], scored: list[Any]) -> Figure:
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
                label="given up",
            )
        axes.set_xlabel("trial")
        axes.locator_params(axis="x", integer=True)
        axes.set_ylabel(f"validation {metric}")
        axes.legend(loc="best")

    return Figure(
        name="search",
        title=f"Validation {metric} of every trial",
        caption="A dot is the mean over folds and seeds of one choice of options; crosses were "
        "given up before the end.",
        alternative=f"Validation {metric} by trial: the first, with the defaults, has "
        f"{number(scores[0])}, the best {number(best[-1])}.",
        picture=Chart(draw),
    )
