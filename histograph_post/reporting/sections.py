"""The sections of a report, from what is known of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..experiments.results import OWN
from ..metrics import Summary, paired_difference, summarize
from ..runs.run import PREDICTIONS_NAME, TRIALS_NAME, Run
from ..runs.summary import counted, facts, ranked_trials, repeat_commands
from ..runs.verdict import about_intervals, bold_row, ranked_names, reported, validation_of
from ..utils.text import MISSING, difference, metric_name, number, plural, setting, spread
from .curve_charts import calibration_figure, precision_figure, roc_figure
from .figures import Figure, scale_figure
from .layer_analysis import LayerProfile, Smoothness
from .molecules import Molecule
from .outcomes import chosen_outcomes, combined, predictions_table, readout_to_beat
from .page import Section, Table
from .prediction_charts import confusion_figure, error_figure, scatter_figure, targets_figure
from .score_charts import ranking_figure, trials_figure

# --- predictions against the truth as figures, for every kind of task

#: Targets of a regression that are drawn.
_MAX_REGRESSIONS = 4


def outcome_figures(run: Run) -> list[Figure]:
    """Draw what the chosen readout predicted for the test rows."""
    outcomes, task = chosen_outcomes(run), run.task
    if not any(len(outcome.rows) for outcome in outcomes):
        return []
    every = combined(outcomes)
    found: list[Figure | None] = []
    if task.kind == "regression":
        for at, name in enumerate(run.saved_head.target_names[:_MAX_REGRESSIONS]):
            found += [scatter_figure(every, at, name), error_figure(every, at, name)]
    elif task.kind == "binary":
        found += [roc_figure(run), precision_figure(run), confusion_figure(every, task)]
    elif task.kind == "multiclass":
        found.append(confusion_figure(every, task))
    else:
        found.append(targets_figure(run))
    if task.kind != "regression":
        found.append(calibration_figure(run))
    return [figure for figure in found if figure is not None]


def rank_readouts(run: Run) -> dict[str, Summary]:
    """Return the test score of every readout: the own one, then the best by validation first."""
    readouts = run.results["readouts"]
    order = ranked_names(run.results)
    return {name: Summary(**readouts[name]["test"]) for name in order if readouts[name]["test"]}


def headline(run: Run) -> str:
    """Return the verdict, and what else the run was about: a search, or a backbone that moved."""
    said = [str(run.verdict)]
    for versus, other in (
        (run.results.get("versus_frozen"), "on the frozen backbone"),
        (run.results.get("versus_default"), "with its defaults"),
    ):
        if versus is not None:
            said.append(f"Against {versus['baseline']} {other}: {difference(versus)}.")
    return " ".join(said)


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
    own, baseline = OWN in ranked, readout_to_beat(run)
    bold, _ = bold_row(run.results)
    averaged = any(row.get("averaged") for row in run.results["readouts"].values())
    rows = []
    for name in names:
        stored = run.results["readouts"][name]
        shown = f"{name} (compared only)" if stored.get("compared_only") else name
        counts = reported(stored)
        row = [
            shown,
            _mean_and_deviation(counts["test"]),
            _mean_and_deviation(validation_of(stored)),
        ]
        if own:
            row.append(difference(counts["versus_own"]))
        if baseline:
            row.append(MISSING if name in (baseline, OWN) else _versus(run, name, baseline))
        if averaged:
            row.append(_mean_and_deviation(stored["test"] if stored.get("averaged") else None))
        count = stored["num_parameters"]
        row.append(f"{count:,}" if count else MISSING)
        rows.append(row)
    columns = ["readout", "test", "validation"]
    columns += ["against own readout"] if own else []
    columns += [f"against {baseline}"] if baseline else []
    columns += ["single seeds"] if averaged else []
    return Table(
        [*columns, "parameters"],
        rows,
        caption=_about_scores(run, averaged=averaged),
        chosen=names.index(bold) if bold in names else None,
    )


def _about_scores(run: Run, *, averaged: bool) -> str:
    """Return what the scores and differences of the table are, and what is bold."""
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
    """Return how much better a readout is than the one to beat."""
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
    return Table(columns, rows, caption=f"All metrics of {run.head}, over single fits.")


def rows_section(run: Run, molecules: Mapping[int, Molecule]) -> Section:
    """Return the test rows one by one, as a table to sort.

    Args:
        run: The run.
        molecules: Label row -> its molecule, where it is one.
    """
    outcomes = [outcome for outcome in chosen_outcomes(run) if len(outcome.rows)]
    table = None
    if outcomes:
        table = predictions_table(combined(outcomes), run.task, molecules, PREDICTIONS_NAME)
    return Section("rows", "Every prediction", tables=[] if table is None else [table])


def smoothing_section(figures: Sequence[Figure], profile: LayerProfile | None) -> Section:
    """Return over-smoothing per layer as figures and as a table."""
    if profile is None:
        return Section("smoothing", "Over-smoothing")
    measured = [(str(at), name, s) for at, (name, s) in enumerate(_layers(profile))]
    measured += [("head", stage, found) for stage, found in profile.head.items()]
    rows = [
        [
            place,
            name,
            number(found.pairwise.median),
            number(found.dirichlet.median),
            number(found.cosine.median),
        ]
        for place, name, found in measured
    ]
    return Section(
        "smoothing",
        "Over-smoothing",
        text="How different the nodes of a graph still are after each layer, and at each stage of "
        "the head: near zero, all nodes are alike. Activations are measured as captured. Distance "
        "and energy depend on the scale of a layer, MAD does not.",
        tables=[
            Table(
                ["layer", "name", "mean pairwise distance", "Dirichlet energy", "MAD"],
                rows,
                caption="Medians over graphs.",
                summary="All layers in numbers",
            )
        ],
        figures=figures,
    )


def _layers(profile: LayerProfile) -> list[tuple[str, Smoothness]]:
    return list(zip(profile.names, profile.smoothness, strict=True))


def examples_section(figures: Sequence[Figure], *, attended: bool) -> Section:
    """Return the graphs that were predicted best and worst."""
    text = "The best and the worst predictions among the test rows of the best head's fold."
    if attended:
        text += " Colour shows how much attention this head pays to a node, on one scale for all."
    return Section(
        "examples",
        "Best and worst predictions",
        text=text if figures else "",
        figures=figures,
        legend=scale_figure() if figures and attended else None,
        small=True,
    )


def facts_sections(run: Run) -> list[Section]:
    """Return what was trained, on what, and how to repeat it."""
    table = Table((), [list(pair) for pair in facts(run)])
    return [
        Section("run", "What was trained", tables=[table]),
        Section("repeat", "Repeat it", code=repeat_commands(run)),
    ]


# --- the search behind a tuned readout: which options were tried, and what they gave

#: Trials in the table.
_MAX_TRIALS = 8


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
        f"{plural(len(trials), 'trial')}, of which trial 0 has the default options; {given_up} "
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
