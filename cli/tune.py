"""`histograph tune`: search the options of a readout."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from histograph_post.utils.text import setting

from . import heads as opt_heads
from . import options as opt
from .formatting import duration
from .formatting import metric as score_text
from .heads import gain, parse_seeds, parse_size, say_beforehand, show_results, split_spec
from .progress import FitWatch
from .terminal import Terminal
from .training_flags import TrainingFlags

if TYPE_CHECKING:
    from histograph_post.experiments.search import Trial

#: Trials in the table at the end.
_SHOWN = 5


def tune(
    terminal: Terminal,
    cache: opt_heads.CacheArgument,
    out: opt_heads.RunOption,
    trials: Annotated[
        int, typer.Option("--trials", min=1, help="Choices to try, the defaults among them.")
    ] = 30,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of an optuna storage that several searches share."),
    ] = None,
    head: Annotated[
        str, typer.Option("--head", help="histograph, mean, linear, concat, gmt, ...")
    ] = "histograph",
    head_args: opt_heads.HeadArgsOption = [],  # noqa: B006  # typer copies it
    space: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TOML: what to search, and between what.")
    ] = None,
    task: opt_heads.TaskOption = opt.TaskKind.AUTO,
    metric: opt_heads.MetricOption = None,
    folds: opt_heads.FoldsOption = None,
    splits: opt_heads.SplitsOption = None,
    split_seed: opt.SplitSeedOption = 0,
    seeds: Annotated[
        str, typer.Option("--seeds", help="Of the fits after the search, such as 0-4.")
    ] = "0-4",
    trial_seeds: Annotated[
        str, typer.Option("--trial-seeds", help="Of the fits of a trial, whose mean counts.")
    ] = "0",
    search_seed: Annotated[int, typer.Option(min=0, help="Of the choices.")] = 0,
    lr: opt_heads.LrOption = None,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="Give up trials below the median early.")
    ] = True,
    *,
    training: TrainingFlags,
    standardize: opt_heads.StandardizeOption = True,
    memory_limit: opt_heads.MemoryOption = None,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Search the options of a readout by validation, and compare the best with the defaults.

    Learning rate and weight decay, around --lr and --weight-decay, and what the readout is made of
    are searched, unless --space says otherwise; what --head-args gives stays. The best options and
    the defaults are then trained with every seed and scored on the test part, which the search does
    not look at. The same command with more --trials goes on.
    """
    from histograph_post.experiments.folds import open_caches
    from histograph_post.experiments.search import plan_search, read_space
    from histograph_post.experiments.tuning import run_search
    from histograph_post.models import parse_args

    search = plan_search(
        cache,
        head=head,
        options=parse_args(head_args),
        space=None if space is None else read_space(space, head),
        seeds=parse_seeds(seeds),
        trial_seeds=parse_seeds(trial_seeds),
        search_seed=search_seed,
        prune=prune,
        training=training.options_on(open_caches(cache)[0], lr),
        split=split_spec(splits, folds),
        split_seed=split_seed,
        task=task.value,
        metric=metric,
        standardize=standardize,
        memory_limit=parse_size(memory_limit),
    )
    say_beforehand(terminal, search.experiment, device)
    for note in search.experiment.notes():
        terminal.say(f"note: {note}")
    tracked = search.experiment.task.metric
    with terminal.fit_progress(tracked) as watch:
        run = run_search(
            search,
            out,
            trials=trials,
            storage=storage,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            on_epoch=watch.epoch_done,
            on_trial=_TrialLines(terminal, tracked, watch),
            on_fit=watch.fit_done,
        )
    _show_trials(terminal, run.results)
    show_results(terminal, run.results, {})
    versus = run.results["versus_default"]
    if versus is not None:
        terminal.say(f"{run.results['head']} against {head} with its defaults: {gain(versus)}")
    elif run.results["tuning"]["trial"] == 0:
        terminal.say("no trial was better than the defaults by validation: they were kept")
    terminal.result({"run": str(out), **run.results}, next_command=f"histograph report {out}")


class _TrialLines:
    """Says a line after each trial, with the time that is left.

    Args:
        terminal: Where to say it.
        metric: The metric that is tracked.
        watch: Of the fits after the search.
    """

    def __init__(self, terminal: Terminal, metric: str, watch: FitWatch) -> None:
        self._terminal = terminal
        self._metric = metric
        self._watch = watch
        self._started = time.monotonic()
        self._seen = 0

    def __call__(self, trial: Trial, best: Trial | None, done: int, total: int) -> None:
        """Say what a trial gave."""
        self._seen += 1
        if trial.state == "complete":
            said = f"valid {self._metric} {score_text(trial.score)}"
        elif trial.state == "pruned":
            said = "given up early"
        else:
            said = f"failed: {trial.reason}"
        if best is not None:
            said += f", best {score_text(best.score)} of trial {best.number}"
        left = (time.monotonic() - self._started) / self._seen * (total - done)
        ending = f", {duration(left)} left" if done < total else ""
        self._terminal.say(f"[{done}/{total}] trial {trial.number}: {said}{ending}")
        self._watch.restart()


def _show_trials(terminal: Terminal, results: Any) -> None:
    """Print the best trials and what they had chosen."""
    from histograph_post.runs.summary import ranked_trials

    tuning = results["tuning"]
    names = list(tuning["values"])
    terminal.table(
        f"The best of {len(tuning['trials'])} trials, by validation; trial 0 has the defaults",
        ["trial", f"valid {results['metric']}", *names],
        [
            [
                trial["number"],
                score_text(trial["score"]),
                *(setting(trial["values"][name]) for name in names),
            ]
            for trial in ranked_trials(results)[:_SHOWN]
        ],
    )
