"""`histograph train-head` and `histograph compare`: readouts on one cache."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.utils.text import plural

from .options import TaskKind
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.experiments.head_training import Experiment
    from histograph_post.experiments.stage import Stage
    from histograph_post.runs.fits import Fit

CacheArgument = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A cache, or a folder of per-fold caches.")
]
RunOption = Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder to write.")]
SplitsOption = Annotated[
    str | None,
    typer.Option("--splits", metavar="FILE|SPEC", help="Another split than the cache's own."),
]
FoldsOption = Annotated[
    int | None, typer.Option("--folds", min=3, help="Split into so many folds instead.")
]
SeedsOption = Annotated[str, typer.Option("--seeds", help="Such as 0-4 or 0,3,7; a fit for each.")]
TaskOption = Annotated[
    TaskKind, typer.Option("--task", help="What the labels are, if they do not say so themselves.")
]
MetricOption = Annotated[str | None, typer.Option("--metric", help="The metric to track.")]
LrOption = Annotated[
    float | None,
    typer.Option("--lr", help="Highest learning rate; 1e-3, or 1e-2 on a single graph."),
]
StandardizeOption = Annotated[
    bool, typer.Option("--standardize/--no-standardize", help="Bring layers to one scale.")
]
HeadArgsOption = Annotated[
    list[str], typer.Option("--head-args", metavar="K=V", help="Any other option of the head.")
]
WarmStartOption = Annotated[
    bool, typer.Option("--warm-start", help="Start at the checkpoint's own predictions.")
]
CheckpointLayersOption = Annotated[
    bool,
    typer.Option(
        "--checkpoint-layers", help="Save memory: compute layers again for their gradients."
    ),
]
AmpOption = Annotated[bool, typer.Option("--amp", help="Mixed precision of the backbone (CUDA).")]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory to train in, libraries apart, such as 4GB; what is larger is read in batches.",
    ),
]

#: What the letters after a number of bytes stand for.
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def parse_size(text: str | None) -> int | None:
    """Return the bytes that `4GB` or `500M` stand for."""
    if text is None:
        return None
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    if found is None:
        raise typer.BadParameter(f"--memory-limit {text}: expected a size such as 4GB or 500MB")
    size = int(float(found[1]) * _UNITS[found[2]])
    if size < _UNITS["k"]:  # a unit was forgotten
        raise typer.BadParameter(f"--memory-limit {text}: found {size} bytes, expected 4GB or so")
    return size


def parse_seeds(text: str) -> list[int]:
    """Return the seeds that `0-4` or `0,3,7` stand for."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise typer.BadParameter(f"--seeds {text}: expected numbers such as 0-4 or 0,3,7")
        seeds += range(int(first), int(last or first) + 1)
    return list(dict.fromkeys(seeds))


def split_spec(splits: str | None, folds: int | None) -> str | None:
    """Return the split that is asked for; None is the cache's own."""
    if splits is not None and folds is not None:
        raise typer.BadParameter("give --folds or --splits, not both")
    return splits if folds is None else f"kfold:{folds}"


def say_beforehand(terminal: Terminal, experiment: Experiment, device: str) -> None:
    """Say what is known of the work before it begins.

    Its batches may not stay within `--memory-limit`; and the first epoch may have to wait for a
    compiler, or would be faster with one.
    """
    from histograph_post.heads.registry import build_head

    widths, task = experiment.caches[0].widths, experiment.task
    built = [
        build_head(head.name, widths, task.out_dim, task.level, **head.options)
        for head in experiment.heads
    ]
    notes = []
    if task.level != "graph" or not all(getattr(head, "reads_means", False) for head in built):
        notes.append(experiment.folds[0].loaded.batch_note(experiment.training.batch_size))
    for note in notes:
        if note is not None:
            terminal.say(f"note: {note}")


def run_and_show(
    terminal: Terminal,
    experiment: Stage,
    out: Path,
    *,
    chosen: str,
    device: str,
    overwrite: bool,
    ranked: bool = False,
) -> dict[str, Any]:
    """Run an experiment with a progress line per fit, print the table, return the JSON result."""
    from histograph_post.experiments.stage import run_experiment

    for note in experiment.notes():
        terminal.say(f"note: {note}")
    seconds: dict[str, list[float]] = {}
    with terminal.fit_progress(experiment.task.metric) as watch:

        def fit_done(fit: Fit, done: int, total: int) -> None:
            seconds.setdefault(fit.spec.name, []).append(fit.seconds_per_epoch)
            watch.fit_done(fit, done, total)

        run = run_experiment(
            experiment,
            out,
            chosen=chosen,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            on_epoch=watch.epoch_done,
            on_fit=fit_done,
        )
    medians = {name: median(values) for name, values in seconds.items()}
    show_results(terminal, run.results, medians, ranked=ranked)
    return {"run": str(out), **run.results, "seconds_per_epoch": medians}


def show_results(
    terminal: Terminal, results: Any, seconds: Mapping[str, float], *, ranked: bool = False
) -> None:
    """Print every readout: mean and deviation over folds and seeds, what it gained and costs.

    Args:
        terminal: Where to print.
        results: ``results.json`` of a run.
        seconds: Seconds per epoch of each readout; empty if they are not asked for.
        ranked: Number the readouts, the best first.
    """
    readouts = list(results["readouts"].items())
    if ranked:
        sign = 1 if results["higher_is_better"] else -1
        readouts.sort(key=lambda item: -sign * item[1]["test"]["mean"] if item[1]["test"] else inf)
    # A model without a readout of its own is compared with the last layer retrained.
    others = [row.get("versus_baseline") for _, row in readouts]
    baseline = next((other["baseline"] for other in others if other is not None), None)
    has_own = any(row["versus_own"] is not None for _, row in readouts)
    versus, against = ("versus_own", "own") if has_own else ("versus_baseline", baseline)
    rows = []
    for place, (name, row) in enumerate(readouts, start=1):
        test, difference = row["test"], row.get(versus)
        rows.append(
            [
                *([place] if ranked else []),
                name,
                _spread(test),
                "-" if difference is None else gain(difference),
                row["num_parameters"] or "-",
                *([f"{seconds[name]:.3f}" if name in seconds else "-"] if seconds else []),
            ]
        )
    columns = ["readout", "mean ± deviation", f"against {against or 'own'}", "parameters"]
    columns += ["s/epoch"] if seconds else []
    lower = "" if results["higher_is_better"] else "; lower is better"
    terminal.table(
        f"Test {results['metric']} over {_count(results)}{lower}",
        ["rank", *columns] if ranked else columns,
        rows,
    )
    chosen = results["versus_baseline"]
    if chosen is not None:
        words = f"{results['head']} against {chosen['baseline']}, retrained"
        terminal.say(f"{words}: {gain(chosen)}{lower}")


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
