"""What the commands print of a run: a table of readouts, what each gained and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from histograph_post.utils.text import plural

from .terminal import ExperimentWatch, Terminal

if TYPE_CHECKING:
    from histograph_post import Run


def show_run(
    terminal: Terminal, run: Run, watch: ExperimentWatch, *, ranked: bool = False
) -> dict[str, Any]:
    """Print the table of a run that has just ended; return its JSON object."""
    seconds = watch.seconds_per_epoch()
    show_results(terminal, run.results, seconds, ranked=ranked)
    return {"run": str(run.folder), **run.results, "seconds_per_epoch": seconds}


def show_results(
    terminal: Terminal, results: Any, seconds: Mapping[str, float], *, ranked: bool = False
) -> None:
    """Print every readout: mean and deviation over folds and seeds, what it gained and costs.

    Where there are several seeds, their averages stand beside the single ones, and the differences
    are those of the averages; what a readout costs is then left to the report and to ``--json``.

    Args:
        terminal: Where to print.
        results: ``results.json`` of a run.
        seconds: Seconds per epoch of each readout; empty if they are not asked for.
        ranked: Number the readouts, the best first.
    """
    from histograph_post.runs.summary import own_verdict, reported

    readouts = list(results["readouts"].items())
    if ranked:
        sign = 1 if results["higher_is_better"] else -1
        readouts.sort(key=lambda item: -sign * item[1]["test"]["mean"] if item[1]["test"] else inf)
    averaged = any(row.get("averaged") for _, row in readouts)
    # A model without a readout of its own is compared with the last layer retrained.
    others = [row.get("versus_baseline") for _, row in readouts]
    baseline = next((other["baseline"] for other in others if other is not None), None)
    has_own = any(row["versus_own"] is not None for _, row in readouts)
    versus, against = ("versus_own", "own") if has_own else ("versus_baseline", baseline)
    rows = []
    for place, (name, row) in enumerate(readouts, start=1):
        difference = reported(row).get(versus)
        cost = [
            row["num_parameters"] or "-",
            *([f"{seconds[name]:.3f}" if name in seconds else "-"] if seconds else []),
        ]
        rows.append(
            [
                *([place] if ranked else []),
                _label(name, row),
                _spread(row["test"]),
                *([_spread((row.get("averaged") or {}).get("test"))] if averaged else []),
                "-" if difference is None else gain(difference),
                *([] if averaged else cost),
            ]
        )
    columns = ["readout", "mean ± deviation", f"against {against or 'own'}"]
    columns += ["parameters", *(["s/epoch"] if seconds else [])]
    if averaged:
        columns = ["readout", "single seeds", "averaged", columns[2]]
    lower = "" if results["higher_is_better"] else "; lower is better"
    keep = ""
    if own_verdict(results) == "better":
        keep = f": keep your own readout rather than {results['head']}"
    terminal.table(
        f"Test {results['metric']} over {_count(results)}{lower}{keep}",
        ["rank", *columns] if ranked else columns,
        rows,
    )
    _say_outcome(terminal, results)


def _say_outcome(terminal: Terminal, results: Any) -> None:
    """Say what the head of a run gained, what it predicts with and how well calibrated that is."""
    from histograph_post.runs.summary import interval_text, own_verdict_text, reported

    head, lower = results["head"], "" if results["higher_is_better"] else "; lower is better"
    row = results["readouts"][head]
    chosen = reported(row).get("versus_baseline")
    if chosen is not None:
        text = f"{head}{', seeds averaged,' if row.get('averaged') else ''} against"
        gained = f"{gain(chosen)}{interval_text(chosen)}{lower}"
        terminal.info(f"{text} {chosen['baseline']}, retrained: {gained}")
    verdict = own_verdict_text(results, gain)
    if verdict is not None:
        terminal.info(verdict)
    calibration = results.get("calibration")
    if calibration is not None and calibration["test"]["before"] is not None:
        errors = " to ".join(f"{calibration['test'][when]:.3f}" for when in ("before", "after"))
        terminal.info(
            f"expected calibration error on the test part: {errors}, by temperature "
            f"{calibration['temperature']:.3g} from the validation part"
        )
    diverged = sum(bool(fit.get("diverged")) for fit in results["fits"])
    if diverged:
        terminal.note(
            f"{plural(diverged, 'fit')} of {len(results['fits'])} diverged and counted with the "
            "best epoch before that, or untrained: lower --lr"
        )
    if results.get("left_out"):
        terminal.info(
            f"the run predicts with {plural(results['members'], 'head')}; {results['left_out']} "
            f"more of {head} have other backbones and are in the table only"
        )


def _label(name: str, row: Any) -> str:
    """Return what a readout is called in the table, with what is to be known of its fits."""
    said = ["compared only"] if row.get("compared_only") else []
    if row.get("diverged"):
        said.append(f"{row['diverged']} diverged")
    return f"{name} ({', '.join(said)})" if said else name


def _spread(test: Any) -> str:
    """Return a mean with its deviation; of a single score there is none."""
    if test is None:
        return "-"
    return f"{test['mean']:.4f}" + (f" ± {test['deviation']:.4f}" if test["count"] > 1 else "")


def gain(versus: Any) -> str:
    """Return a paired difference with its interval, if there is one."""
    interval = "" if versus["low"] is None else f" [{versus['low']:+.4f}, {versus['high']:+.4f}]"
    return f"{versus['mean']:+.4f}{interval}"


def _count(results: Any) -> str:
    folds = {fit["fold"] for fit in results["fits"]}
    seeds = {fit["seed"] for fit in results["fits"]}
    return f"{plural(len(folds), 'fold')} and {plural(len(seeds), 'seed')}"
