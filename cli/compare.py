"""`histograph compare`: every readout on the same cache, ranked."""

from __future__ import annotations

from typing import Annotated

import typer

from . import heads as opt_heads
from . import options as opt
from .heads import parse_seeds, parse_size, run_and_show, say_beforehand, split_spec
from .terminal import Terminal
from .training_flags import TrainingFlags


def compare(
    terminal: Terminal,
    cache: opt_heads.CacheArgument,
    out: opt_heads.RunOption,
    heads: Annotated[
        str, typer.Option("--heads", help="all, or names separated by commas.")
    ] = "all",
    dim: Annotated[int, typer.Option(min=1, help="Width of every head.")] = 64,
    task: opt_heads.TaskOption = opt.TaskKind.AUTO,
    metric: opt_heads.MetricOption = None,
    folds: opt_heads.FoldsOption = None,
    splits: opt_heads.SplitsOption = None,
    split_seed: opt.SplitSeedOption = 0,
    seeds: opt_heads.SeedsOption = "0",
    lr: opt_heads.LrOption = None,
    *,
    training: TrainingFlags,
    standardize: opt_heads.StandardizeOption = True,
    memory_limit: opt_heads.MemoryOption = None,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train every readout on the same cache with the same budget and rank them."""
    from histograph_post.experiments.folds import open_caches
    from histograph_post.experiments.head_training import HeadSpec, plan_experiment
    from histograph_post.heads.registry import head_names

    first = open_caches(cache)[0]
    level = first.manifest.layout.level
    names = head_names(level) if heads == "all" else [name.strip() for name in heads.split(",")]
    names = list(dict.fromkeys(names))
    experiment = plan_experiment(
        cache,
        [HeadSpec(name, {"dim": dim}) for name in names],
        training=training.options_on(first, lr),
        seeds=parse_seeds(seeds),
        split=split_spec(splits, folds),
        split_seed=split_seed,
        task=task.value,
        metric=metric,
        standardize=standardize,
        memory_limit=parse_size(memory_limit),
    )
    say_beforehand(terminal, experiment, device)
    chosen = "histograph" if "histograph" in names else names[0]
    result = run_and_show(
        terminal,
        experiment,
        out,
        chosen=chosen,
        device=device,
        overwrite=overwrite,
        ranked=True,
    )
    terminal.result(result, next_command=f"histograph report {out}")
