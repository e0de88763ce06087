"""What the commands print of a run (readouts, gains, the verdict), a pretraining and a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from histograph_post.utils.text import difference, plural, score

from .progress import ExperimentWatch
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post import Run
    from histograph_post.caches import Manifest


def show_run(
    terminal: Terminal, run: Run, watch: ExperimentWatch, *, ranked: bool = False
) -> dict[str, Any]:
    """Print the table of a run that has just ended, and its verdict; return its JSON object.

    Of one with fits that are left to other jobs there is nothing to print.
    """
    if not run.is_finished:
        return {"run": str(run.folder), "complete": False}
    seconds = watch.seconds_per_epoch()
    show_results(terminal, run.results, seconds, ranked=ranked)
    return {"run": str(run.folder), **run.results, "seconds_per_epoch": seconds}


def show_results(
    terminal: Terminal, results: Any, seconds: Mapping[str, float], *, ranked: bool = False
) -> None:
    """Print every readout, its test score and what it gained, then the verdict.

    Where there are several seeds, scores and differences are those of their averages. The mean and
    deviation of single seeds and what a readout costs are shown with ``--verbose``; the report and
    ``--json`` have everything.

    Args:
        seconds: Seconds per epoch of each readout; empty if they are not asked for.
        ranked: Number the readouts, the best by validation first.
    """
    from histograph_post.runs.summary import about_intervals, bold_row, ranked_names
    from histograph_post.runs.verdict import OWN, reported, validation_of, verdict_of

    readouts = results["readouts"]
    averaged = any(row.get("averaged") for row in readouts.values())
    # A model without a readout of its own is compared with the last layer retrained.
    others = [row.get("versus_baseline") for row in readouts.values()]
    baseline = next((other["baseline"] for other in others if other is not None), None)
    has_own = any(row["versus_own"] is not None for row in readouts.values())
    versus, against = ("versus_own", "own") if has_own else ("versus_baseline", baseline)
    more = terminal.verbose and not ranked
    rows, place = [], 0
    names = ranked_names(results) if ranked else list(readouts)
    for name in names:
        row = readouts[name]
        place += name != OWN
        found, valid = reported(row).get(versus), validation_of(row)
        singles = _spread(row["test"]) if row.get("averaged") else "-"
        time = f"{seconds[name]:.3f}" if name in seconds else "-"
        rows.append(
            [
                *([place if name != OWN else "-"] if ranked else []),
                _label(name, row),
                "-" if valid is None else f"{valid['mean']:.4f}",
                _spread(reported(row)["test"]),
                "-" if found is None else difference(found),
                *([singles] if averaged and more else []),
                *([row["num_parameters"] or "-", time] if more else []),
            ]
        )
    columns = [*([""] if ranked else []), "readout", "validation", "test"]
    columns += [f"test, against {against or 'own'}"]
    columns += ["single seeds"] if averaged and more else []
    columns += ["parameters", "s/epoch"] if more else []
    lower = "" if results["higher_is_better"] else "; lower is better"
    title = (
        f"Readouts by validation: {results['metric']}" if ranked else f"Test {results['metric']}"
    )
    bold, why = bold_row(results)
    terminal.table(
        f"{title} over {_count(results)}{', seeds averaged' if averaged else ''}{lower}",
        columns,
        rows,
        bold=names.index(bold) if bold in names else None,
    )
    if not terminal.styled:
        why = why.replace("Bold", bold, 1)
    terminal.info(f"{why} {_sentence(about_intervals(results))}")
    if any(row.get("compared_only") for row in readouts.values()):
        terminal.info("* compared only: not saved, so the run cannot predict with it")
    _say_outcome(terminal, results)
    terminal.say(str(verdict_of(results)))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _say_outcome(terminal: Terminal, results: Any) -> None:
    """Say what the run predicts with and how well calibrated that is."""
    calibration = results.get("calibration")
    if calibration is not None and calibration["test"]["before"] is not None:
        before, after = (calibration["test"][when] for when in ("before", "after"))
        terminal.info(
            f"Calibration by temperature {calibration['temperature']:.3g}, from the validation "
            f"part: expected calibration error on the test part {before:.3f} before, {after:.3f} "
            f"after{', no better there' * (after >= before)}."
        )
    _say_extremes(terminal, results)
    diverged = sum(bool(fit.get("diverged")) for fit in results["fits"])
    if diverged:
        terminal.note(
            f"{diverged} of {plural(len(results['fits']), 'fit')} diverged: what counts is the "
            "best epoch before that, or the untrained head; lower --lr"
        )
    if results.get("left_out"):
        terminal.info(
            f"The run predicts with {plural(results['members'], 'head')} on one backbone; the "
            f"scores in the table are also those of {plural(results['left_out'], 'head')} on other "
            "backbones."
        )


def _say_extremes(terminal: Terminal, results: Any) -> None:
    """Say so where the readout of a run was best before training, or when training ended."""
    from histograph_post.runs.run import FINETUNED, split_name

    name = results["head"]
    trained = [
        fit
        for fit in results["fits"]
        if fit["head"] == name and "strength" not in fit and not fit.get("diverged")
    ]
    if trained and all(fit["best_epoch"] < 0 for fit in trained):
        tuned = split_name(name)[1] == FINETUNED
        start = "frozen head" if tuned else "linear map, solved beforehand,"
        terminal.info(
            f"No epoch of {name} was better on validation than its start: it predicts what the "
            f"{start} does that it started from."
        )
    last = sum(0 <= fit["best_epoch"] == fit["epochs"] - 1 for fit in trained)
    if 2 * last > len(trained):
        terminal.note(
            f"{name} was best at its last epoch in {last} of {plural(len(trained), 'fit')}: more "
            "--epochs may improve it"
        )


def _label(name: str, row: Any) -> str:
    """Return what a readout is called in the table, with what is to be known of its fits."""
    name = f"{name} *" if row.get("compared_only") else name
    return f"{name} ({row['diverged']} diverged)" if row.get("diverged") else name


def _spread(test: Any) -> str:
    """Return a mean with its deviation; of a single score there is none."""
    if test is None:
        return "-"
    return f"{test['mean']:.4f}" + (f" ± {test['deviation']:.4f}" if test["count"] > 1 else "")


def _count(results: Any) -> str:
    folds = {fit["fold"] for fit in results["fits"]}
    seeds = {fit["seed"] for fit in results["fits"]}
    return f"{plural(len(folds), 'fold')} and {plural(len(seeds), 'seed')}"


# --- a pretraining: the scores of its folds


def show_folds(terminal: Terminal, results: Any) -> None:
    """Print the score of every fold, and their mean and deviation."""
    parts = ("valid", "test")
    rows = [
        [
            f"fold {fold['fold']}{' (diverged)' * bool(fold.get('diverged'))}",
            fold["best_epoch"],
            *(score(fold["scores"].get(part, {}).get(results["metric"])) for part in parts),
        ]
        for fold in results["folds"]
    ]
    if len(rows) > 1:
        summaries = [results[part] for part in parts]
        means = ("-" if s is None else f"{s['mean']:.4f} ± {s['deviation']:.4f}" for s in summaries)
        rows.append(["mean ± deviation", "-", *means])
    terminal.table(
        f"{results['model']} on {results['data'].removesuffix(':')}: {results['metric']}",
        ["", "best epoch", *parts],
        rows,
    )


# --- a cache: the score of the checkpoint's own readout


def show_cache(terminal: Terminal, manifest: Manifest) -> None:
    """Print the score of the model's own readout, or why there is none."""
    if manifest.own_metrics is None:
        terminal.note(f"the checkpoint has no score of its own: {manifest.no_metrics_because}")
        return
    rows, folds = own_rows(manifest.own_metrics), len(manifest.own_metrics["folds"])
    names = list(manifest.own_metrics["all"])
    means = f" (parts: means over {folds} folds)" if folds > 1 else ""
    terminal.table(
        f"The checkpoint's own readout on {manifest.data.spec}{means}",
        ["part", *names],
        [[part, *(score(scores.get(name)) for name in names)] for part, scores in rows],
    )


def own_rows(own: Mapping[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Return the scores per part of the split, averaged over folds, and on all rows."""
    folds = own["folds"]
    rows = []
    for part in folds[0]:
        names = set().union(*(fold[part] for fold in folds))
        rows.append(
            (
                part,
                {
                    name: _mean([fold[part][name] for fold in folds if name in fold[part]])
                    for name in names
                },
            )
        )
    return [*rows, ("all", own["all"])]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def summary(manifest: Manifest) -> dict[str, Any]:
    """Return what a script wants to know of a cache."""
    return {
        "data": manifest.data.spec,
        "num_graphs": manifest.data.num_graphs,
        "num_nodes": manifest.data.num_nodes,
        "layers": list(manifest.layout.layer_names),
        "widths": list(manifest.layout.widths),
        "dtype": manifest.layout.dtype,
        "weights_sha256": manifest.weights_sha256,
        "own_metrics": manifest.own_metrics,
        "no_metrics_because": manifest.no_metrics_because,
        "shards": len(manifest.shards),
        "bytes": sum(shard.num_bytes for shard in manifest.shards),
    }
