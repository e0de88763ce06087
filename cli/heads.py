"""`histograph train-head` and `histograph compare`: readouts on one cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.head_training import Experiment
    from histograph_post.run import Run

CacheArgument = Annotated[
    Path, typer.Argument(metavar="CACHE", help="A cache, or a folder of per-fold caches.")
]
RunOption = Annotated[Path, typer.Option("-o", "--out", metavar="RUN", help="Folder to write.")]
SplitsOption = Annotated[
    str | None,
    typer.Option("--splits", metavar="FILE|SPEC", help="Another split than the cache's own."),
]
FoldsOption = Annotated[
    int | None, typer.Option("--folds", min=2, help="Split into so many folds instead.")
]
SeedsOption = Annotated[str, typer.Option("--seeds", help="Such as 0-4 or 0,3,7; a fit for each.")]
TaskOption = Annotated[
    str, typer.Option("--task", help="auto, binary, multiclass, multilabel or regression.")
]
MetricOption = Annotated[str | None, typer.Option("--metric", help="The metric to track.")]
EpochsOption = Annotated[int, typer.Option("--epochs", min=1, help="Epochs at most.")]
LrOption = Annotated[float, typer.Option("--lr", help="Highest learning rate.")]
BatchSizeOption = Annotated[int, typer.Option("--batch-size", min=1, help="Graphs per batch.")]
DecayOption = Annotated[float, typer.Option("--weight-decay", min=0, help="Of AdamW.")]
ScheduleOption = Annotated[str, typer.Option("--schedule", help="cosine, plateau or none.")]
WarmupOption = Annotated[float, typer.Option("--warmup", min=0, help="Epochs of rising rate.")]
ClipOption = Annotated[float, typer.Option("--clip", min=0, help="Largest gradient norm; 0: any.")]
PatienceOption = Annotated[
    int, typer.Option("--patience", min=0, help="Epochs without a better score before stopping.")
]
BalanceOption = Annotated[
    bool, typer.Option("--balance", help="Weigh classes by how rare they are.")
]
StandardizeOption = Annotated[
    bool, typer.Option("--standardize/--no-standardize", help="Bring layers to one scale.")
]


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


def run_and_show(
    terminal: Terminal,
    experiment: Experiment,
    out: Path,
    *,
    chosen: str,
    device: str,
    overwrite: bool,
) -> Run:
    """Run an experiment with a progress line per fit, and print the table."""
    from histograph_post.head_training import run_experiment

    for note in experiment.notes():
        terminal.say(f"note: {note}")
    with terminal.fit_progress(experiment.task.metric) as watch:
        run = run_experiment(
            experiment,
            out,
            chosen=chosen,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            on_epoch=watch.epoch_done,
            on_fit=watch.fit_done,
        )
    show_results(terminal, run.results)
    return run


def show_results(terminal: Terminal, results: Any) -> None:
    """Print every readout: mean and deviation over folds and seeds, and what it gained."""
    rows = []
    for name, row in results["readouts"].items():
        test, gain = row["test"], row["versus_own"]
        rows.append(
            [
                name,
                "-" if test is None else f"{test['mean']:.4f} ± {test['deviation']:.4f}",
                "-" if gain is None else f"{gain['mean']:+.4f}{_interval(gain)}",
                row["num_parameters"] or "-",
            ]
        )
    terminal.table(
        f"Test {results['metric']} over {_count(results)}",
        ["readout", "mean ± deviation", "gain over the own readout", "parameters"],
        rows,
    )
    versus = results["versus_baseline"]
    if versus is not None:
        terminal.say(
            f"{results['head']} against {versus['baseline']}, retrained: "
            f"{versus['mean']:+.4f}{_interval(versus)}"
        )


def _interval(gain: Any) -> str:
    return "" if gain["low"] is None else f" [{gain['low']:+.4f}, {gain['high']:+.4f}]"


def _count(results: Any) -> str:
    folds = {fit["fold"] for fit in results["fits"]}
    seeds = {fit["seed"] for fit in results["fits"]}
    return f"{_plural(len(folds), 'fold')} and {_plural(len(seeds), 'seed')}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
