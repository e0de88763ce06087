"""`histograph train-head`, `compare` and `tune`: readouts on a cache."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import histograph_post as hg
from histograph_post.runs.run import TUNED, split_name
from histograph_post.runs.verdict import gained
from histograph_post.utils.text import duration, plural, score, setting

from . import options as opt
from .flags import ArrayFlags, ExperimentFlags, HeadFlags, TrainingFlags, parse_seeds
from .guidance import next_command, report_command
from .progress import ExperimentWatch
from .results import show_results, show_run
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.experiments.trials import Trial


@dataclass(frozen=True)
class WideHeadFlags(HeadFlags):
    """The options of a head that is 64 wide by default, as is the baseline beside it."""

    dim: Annotated[int | None, typer.Option(min=1, help="Width of the head.")] = 64


def train_head(
    terminal: Terminal,
    cache: opt.CacheArgument,
    out: opt.RunOption,
    head: opt.HeadOption = "histograph",
    *,
    head_flags: WideHeadFlags,
    experiment: ArrayFlags,
    lr: opt.LrOption = None,
    training: TrainingFlags,
    warm_start: opt.WarmStartOption = False,
) -> None:
    """Train a readout on cached activations; the backbone is neither needed nor changed.

    A mean pool of the last layer is trained beside it, as the baseline to beat.
    """
    with terminal.watch_experiment() as watch:
        run = hg.train_head(
            cache,
            out,
            head=head,
            head_options=head_flags.options(),
            options=experiment.options(
                terminal, watch, training.options(lr), warm_start=warm_start
            ),
        )
    found = show_run(terminal, run, watch)
    terminal.result(found, next_command=next_command(run))


def compare(
    terminal: Terminal,
    cache: opt.CacheArgument,
    out: opt.RunOption,
    heads: Annotated[
        str,
        typer.Option(
            "--heads",
            metavar="NAMES",
            autocompletion=opt.complete_several_heads,
            help="The readouts, separated by commas: all, or any that train-head --head takes, "
            "and svm and boosting, which are compared only.",
        ),
    ] = "all",
    dim: Annotated[int, typer.Option(min=1, help="Width of every head.")] = 64,
    head_args: Annotated[
        list[str],
        typer.Option(
            "--head-args",
            metavar="K=V",
            help="An option of all readouts that have it, such as dropout=0.1, or of one of them, "
            "such as gmt.heads=2; repeatable.",
        ),
    ] = [],  # noqa: B006  # typer copies it
    *,
    experiment: ArrayFlags,
    lr: opt.LrOption = None,
    training: TrainingFlags,
) -> None:
    """Train every readout on the same cache in the same way, and rank them."""
    from histograph_post.models import parse_args

    with terminal.watch_experiment() as watch:
        run = hg.compare(
            cache,
            out,
            heads=None if heads == "all" else [name.strip() for name in heads.split(",")],
            head_options={"dim": dim, **parse_args(head_args, dotted=True)},
            options=experiment.options(terminal, watch, training.options(lr)),
        )
    found = show_run(terminal, run, watch, ranked=True)
    terminal.result(found, next_command=report_command(run) if run.is_finished else None)


#: Trials in the table at the end.
_SHOWN = 5


@dataclass(frozen=True)
class TuneFlags(ExperimentFlags):
    """The options of an experiment that ends with a comparison, over several seeds by default."""

    seeds: Annotated[
        str | None,
        typer.Option("--seeds", help="Seeds for the training after the search, such as 0-4."),
    ] = "0-4"


def tune(
    terminal: Terminal,
    cache: opt.CacheArgument,
    out: opt.RunOption,
    trials: Annotated[
        int,
        typer.Option("--trials", min=1, help="Number of trials; the first uses the defaults."),
    ] = 30,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Optuna storage, for several processes that search together."
        ),
    ] = None,
    head: opt.HeadOption = "histograph",
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML file with the search space.")
    ] = None,
    *,
    head_flags: HeadFlags,
    experiment: TuneFlags,
    trial_seeds: Annotated[
        str,
        typer.Option("--trial-seeds", help="Seeds of each trial; its score is their mean."),
    ] = "0",
    search_seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    lr: opt.LrOption = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune", help="Stop a trial early if it does worse than the median trial."
        ),
    ] = True,
    training: TrainingFlags,
) -> None:
    """Search the options of a readout by validation, and compare the best with the defaults.

    By default, the learning rate and weight decay (around --lr and --weight-decay) and the usual
    options of the readout (width, attention heads, dropout and the like) are searched. --space
    names others; those that are given (--dim, --attention-heads, --head-args) stay fixed. Then the
    best options and the defaults are trained with every seed and scored on the test part, which the
    search never sees. To extend a search, run the same command with more --trials.
    """
    with terminal.watch_experiment() as watch:
        run = hg.tune(
            cache,
            out,
            trials=trials,
            head=head,
            head_options=head_flags.options(),
            space=space,
            storage=storage,
            trial_seeds=parse_seeds(trial_seeds),
            search_seed=search_seed,
            prune=prune,
            on_trial=_TrialLines(terminal, watch),
            options=experiment.options(terminal, watch, training.options(lr)),
        )
    _show_trials(terminal, run.results)
    show_results(terminal, run.results, {})
    if gain := gained(run.results):
        terminal.info(gain)
    elif split_name(run.results["head"])[1] != TUNED:
        terminal.info(
            "No trial had a better validation score than the defaults, so these are kept."
        )
    terminal.result({"run": str(out), **run.results}, next_command=report_command(run))


class _TrialLines:
    """Prints a line after each trial, with the time that is left.

    Args:
        terminal: Where to print.
        watch: Knows the metric, and follows the fits after the search.
    """

    def __init__(self, terminal: Terminal, watch: ExperimentWatch) -> None:
        self._terminal = terminal
        self._watch = watch
        self._started = time.monotonic()
        self._seen = 0

    def __call__(self, trial: Trial, best: Trial | None, done: int, total: int) -> None:
        """Print the score of a trial."""
        self._seen += 1
        if trial.state == "complete":
            outcome = f"valid {self._watch.metric} {score(trial.score)}"
        elif trial.state == "pruned":
            outcome = "stopped early"
        else:
            outcome = f"failed: {trial.reason}"
        if best is not None:
            outcome += f", best {score(best.score)} of trial {best.number}"
        left = (time.monotonic() - self._started) / self._seen * (total - done)
        ending = f", {duration(left)} left" if done < total else ""
        self._terminal.info(f"[{done}/{total}] trial {trial.number}: {outcome}{ending}")


def _show_trials(terminal: Terminal, results: Any) -> None:
    """Print the best trials and what they had chosen."""
    from histograph_post.runs.summary import ranked_trials

    tuning = results["tuning"]
    names = list(tuning["values"])
    terminal.table(
        f"The best of {plural(len(tuning['trials']), 'trial')} by validation; trial 0 has the "
        "defaults, as far as the search space has them",
        ["trial", f"valid {results['metric']}", *names],
        [
            [
                trial["number"],
                score(trial["score"]),
                *(setting(trial["values"][name]) for name in names),
            ]
            for trial in ranked_trials(results)[:_SHOWN]
        ],
    )
