"""Scores: the table of readouts, their ranking, learning curves, and the trials of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..metrics import Summary, paired_difference, summarize
from ..runs.run import TRIALS_NAME, Run
from ..runs.summary import about_intervals, bold_row, counted, ranked_names, ranked_trials
from ..runs.verdict import OWN, gained, reported, validation_of
from ..utils.text import MISSING, difference, metric_name, number, plural, setting, spread
from .figures import CHOSEN, DASHES, GRID, INK, MUTED, RIVAL, Chart, Figure, series_colour
from .outcomes import readout_to_beat
from .page import Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def rank_readouts(run: Run) -> dict[str, Summary]:
    """Return the test score of every readout that has one, in the order of the table.

    With several seeds it is that of their average, as in the table.
    """
    rows = {name: reported(run.results["readouts"][name]) for name in ranked_names(run.results)}
    return {name: Summary(**row["test"]) for name, row in rows.items() if row["test"]}


def headline(run: Run) -> str:
    """Return the verdict, and the gain of fine-tuning or of a search where the run did one."""
    return f"{run.verdict} {gained(run.results)}".strip()


def scores_section(run: Run, ranked: Mapping[str, Summary]) -> Section:
    """Return the headline table, all metrics of the head, and the ranking."""
    figures = [ranking_figure(run, ranked)] if ranked else []
    tables = [table for table in (_headline_table(run, ranked), _metrics_table(run)) if table]
    return Section(
        "scores",
        "Scores",
        text=f"Every readout was trained on the same activations, splits and seeds "
        f"({counted(run)}). The epoch of each fit was chosen on the validation part, which also "
        "orders the table.",
        tables=tables,
        figures=figures,
    )


def _headline_table(run: Run, ranked: Mapping[str, Summary]) -> Table | None:
    names = [*ranked, *(name for name in run.readouts if name not in ranked)]
    if not names:
        return None
    baseline = readout_to_beat(run)
    bold, _ = bold_row(run.results)
    averaged = any(row.get("averaged") for row in run.results["readouts"].values())
    rows: list[dict[str, str]] = []  # column -> cell
    for name in names:
        stored = run.results["readouts"][name]
        counts, parameters = reported(stored), stored["num_parameters"]
        row = {
            "readout": f"{name} (compared only)" if stored.get("compared_only") else name,
            "test": _mean_and_deviation(counts["test"]),
            "validation": _mean_and_deviation(validation_of(stored)),
        }
        if OWN in ranked:
            row["against own readout"] = difference(counts["versus_own"])
        if baseline not in (None, OWN):
            compared = name not in (baseline, OWN)
            row[f"against {baseline}"] = _versus(run, name, baseline) if compared else MISSING
        if averaged:
            single = stored["test"] if stored.get("averaged") else None
            row["single seeds"] = _mean_and_deviation(single)
        rows.append(row | {"parameters": f"{parameters:,}" if parameters else MISSING})
    return Table(
        list(rows[0]),
        [list(row.values()) for row in rows],
        caption=_about_scores(run, averaged=averaged),
        chosen=names.index(bold) if bold in names else None,
    )


def _about_scores(run: Run, *, averaged: bool) -> str:
    """Return the caption: what scores and differences are, and which row is bold."""
    metric = metric_name(run.results["metric"])
    lower = "" if run.results["higher_is_better"] else ", lower is better"
    of_what = ""
    if averaged:
        of_what = (
            "The outputs of a fold's seeds are averaged, then scored, as the run predicts; single "
            "seeds: the test score of one head. "
        )
    intervals = about_intervals(run.results)
    return (
        f"{metric[0].upper()}{metric[1:]}{lower}: mean ± standard deviation. {of_what}Differences "
        f"are paired, on the test part; {intervals}. {bold_row(run.results)[1]}"
    )


def _versus(run: Run, name: str, other: str) -> str:
    """Return the paired difference between a readout and the one to beat."""
    stored = reported(run.results["readouts"][name]).get("versus_baseline")
    if stored is None or stored["baseline"] != other:
        found = paired_difference(run.scores(name, "test"), run.scores(other, "test"))
        stored = None if found is None else found.to_json()
    return difference(stored)


def _mean_and_deviation(found: Mapping[str, Any] | None) -> str:
    """Return a mean with its deviation; a single score has none."""
    if found is None:
        return MISSING
    if found["count"] == 1:
        return number(found["mean"])
    return spread(found["mean"], found["deviation"])


def _metrics_table(run: Run) -> Table | None:
    """Return every metric of the run's head on every part."""
    rows = []
    for part in ("train", "valid", "test"):
        values = {m: list(run.scores(run.head, part, m).values()) for m in run.task.metrics}
        if any(values.values()):
            found = [summarize(scores) for scores in values.values()]
            cells = [_mean_and_deviation(None if each is None else vars(each)) for each in found]
            rows.append(["validation" if part == "valid" else part, *cells])
    if not rows:
        return None
    columns = [run.head, *(metric_name(name) for name in run.task.metrics)]
    caption = f"All metrics of {run.head}: mean ± standard deviation over single fits."
    return Table(columns, rows, caption=caption)


# --- ranking and learning curves

#: Readouts whose learning curves are drawn at most: more lines cannot be told apart.
_MAX_CURVES = 6
#: Up to so many names fit into the axes.
_MAX_INSIDE = 3


def ranking_figure(run: Run, ranked: Mapping[str, Summary]) -> Figure:
    """Draw the test score of every readout, the best by validation first."""
    metric = metric_name(run.results["metric"])

    def draw(axes: Axes) -> None:
        places = np.arange(len(ranked))[::-1]
        for place, (name, summary) in zip(places, ranked.items(), strict=True):
            colour = {run.head: CHOSEN, readout_to_beat(run): RIVAL}.get(name, MUTED)
            scores = list(run.scores(name, "test").values())
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
        axes.set_yticks(places, list(ranked))
        axes.tick_params(axis="y", colors=INK, length=0)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(
            f"test {metric}" + ("" if run.results["higher_is_better"] else " (lower is better)")
        )
        axes.set_ylim(-0.6, len(ranked) - 0.4)

    shown = "; ".join(f"{n} {_mean_and_deviation(vars(s))}" for n, s in ranked.items())
    averaged = any(row.get("averaged") for row in run.results["readouts"].values())
    over = "The score of the table, with seeds averaged" if averaged else "The score of the table"
    if any(summary.count > 1 for summary in ranked.values()):
        over += ", mean and standard deviation over folds"
    return Figure(
        name="ranking",
        title=f"Test {metric} of every readout",
        caption=f"{over}; each faint dot is a fit. Readouts are in the order of the table.",
        alternative=f"Readouts by test {metric}, in the order of validation: {shown}.",
        picture=Chart(draw, size=(4.2, max(1.7, 0.9 + 0.27 * len(ranked)))),
    )


def learning_figures(run: Run, ranked: Sequence[str]) -> list[Figure]:
    """Draw the learning curves: validation score and loss."""
    fits: dict[str, dict[tuple[int, int], list[dict[str, Any]]]] = defaultdict(dict)
    for line in run.log:
        fits[line["head"]].setdefault((line["fold"], line["seed"]), []).append(line)
    found = [_valid_figure(run, fits, ranked), _loss_figure(run, fits.get(run.head, {}))]
    return [figure for figure in found if figure is not None]


Fits = Mapping[tuple[int, int], Sequence[Mapping[str, Any]]]


def _curves(fits: Fits, key: str) -> list[np.ndarray]:
    """Return one quantity by epoch, for each fit that has it: ``[epochs]`` each."""
    return [
        np.array([line[key] for line in lines], dtype=np.float64)  # null is NaN
        for lines in fits.values()
        if all(key in line for line in lines)
    ]


def _draw_curves(axes: Axes, curves: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Draw each fit as a thin line, and their mean over the epochs that all of them reached."""
    for at, (name, fits) in enumerate(curves.items()):
        colour = series_colour(at)
        for fit in fits if len(fits) > 1 else []:
            axes.plot(np.arange(1, len(fit) + 1), fit, color=colour, alpha=0.25, lw=0.7)
        common = min(len(fit) for fit in fits)
        mean = np.mean([fit[:common] for fit in fits], axis=0)  # [epochs]
        marker = "o" if common == 1 else None
        places = np.arange(1, common + 1)
        axes.plot(places, mean, marker=marker, color=colour, linestyle=DASHES[at], label=name)
    axes.set_xlabel("epoch")
    axes.locator_params(axis="x", integer=True)


def _ends(fits: Sequence[np.ndarray], word: str) -> str:
    """Return the mean first and last value of curves, such as ``0.5 to 0.8``."""
    first, last = (number(np.mean([fit[at] for fit in fits])) for at in (0, -1))
    return f"{first} {word} {last}"


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
        _draw_curves(axes, shown)
        axes.set_ylabel(f"validation {metric_name(metric)}")
        if len(shown) > _MAX_INSIDE:
            axes.figure.legend(loc="outside lower left", ncols=3)
        else:
            axes.legend(loc="best")

    ends = "; ".join(
        f"{name} begins at {_ends(found, 'and ends at')}" for name, found in shown.items()
    )
    left_out = len(curves) - len(shown)
    return Figure(
        name="learning-validation",
        title=f"Validation {metric_name(metric)} while training",
        caption="Thin lines are single fits; the thick line is their mean, up to the epoch that "
        "all of them reached."
        + (f" Not drawn: {plural(left_out, 'more readout')}." if left_out else "")
        + (_SOLVED if _solved(run) & set(shown) else ""),
        alternative=f"Validation {metric_name(metric)} by epoch. {ends}.",
        picture=Chart(draw),
    )


#: Caption of the curves of solved readouts.
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
        _draw_curves(axes, drawn)
        best = [
            fit["best_epoch"]
            for fit in run.results["fits"]
            if fit["head"] == run.head and fit.get("best_epoch") is not None
        ]
        for epoch in best:
            axes.axvline(epoch + 1, color=GRID, linewidth=1.0, zorder=0)
        axes.set_ylabel("loss")
        axes.legend(loc="best")

    ends = "; ".join(
        f"{name} loss goes from {_ends(curves, 'to')}" for name, curves in drawn.items()
    )
    return Figure(
        name="learning-loss",
        title=f"Loss of {run.head}",
        caption="Thin lines are single fits; grey vertical lines mark the epochs that validation "
        "chose." + (_SOLVED if run.head in _solved(run) else ""),
        alternative=f"Loss by epoch: {ends}.",
        picture=Chart(draw),
    )


# --- the trials of a search

#: Trials in the table, at most.
_MAX_TRIALS = 8


def search_section(run: Run) -> Section:
    """Return the trials of a search; an empty section for a run without one."""
    tuning = run.results.get("tuning")
    if tuning is None:
        return Section("search", "Search")
    trials = tuning["trials"]
    scored = [trial for trial in trials if trial["score"] is not None]
    pruned = sum(trial["state"] == "pruned" for trial in trials)
    failed = len(trials) - len(scored) - pruned
    text = (
        f"{plural(len(trials), 'trial')}, of which trial 0 has the default options; {pruned} "
        f"stopped early and {failed} failed. Trial {tuning['trial']} was the best by validation. "
        "The search never looks at the test part."
    )
    return Section(
        "search",
        "Search",
        text=text,
        tables=[_trials_table(run, list(tuning["values"]))],
        figures=[trials_figure(run, trials, scored)],
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
    return Table(
        columns, rows, caption=f"The best trials; {TRIALS_NAME} has all of them.", chosen=0
    )


def trials_figure(run: Run, trials: list[Any], scored: list[Any]) -> Figure:
    """Draw the score of every trial of a search, and the best so far."""
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
