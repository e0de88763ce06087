"""`histograph train-head`: train a readout on a cache."""

from __future__ import annotations

from typing import Annotated

import typer

from . import heads as opt_heads
from . import options as opt
from .heads import parse_seeds, parse_size, run_and_show, say_beforehand, split_spec
from .next_commands import predict_command
from .terminal import Terminal
from .training_flags import TrainingFlags


def train_head(
    terminal: Terminal,
    cache: opt_heads.CacheArgument,
    out: opt_heads.RunOption,
    head: Annotated[
        str, typer.Option("--head", help="histograph, mean, linear, concat, gmt, ...")
    ] = "histograph",
    dim: Annotated[int, typer.Option(min=1, help="Width of the head.")] = 64,
    heads: Annotated[
        int | None, typer.Option(min=1, help="Attention heads, for heads that have them.")
    ] = None,
    head_args: opt_heads.HeadArgsOption = [],  # noqa: B006  # typer copies it
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
    warm_start: opt_heads.WarmStartOption = False,
    memory_limit: opt_heads.MemoryOption = None,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a readout on cached activations; the backbone is not needed and does not change.

    The last layer's mean pool is retrained beside it, as the readout to beat.
    """
    from histograph_post.experiments.folds import open_caches
    from histograph_post.experiments.head_training import HeadSpec, plan_experiment, with_baseline
    from histograph_post.models import parse_args

    options = {"dim": dim, **parse_args(head_args)}
    if heads is not None:
        options["heads"] = heads
    first = open_caches(cache)[0]
    level = first.manifest.layout.level
    experiment = plan_experiment(
        cache,
        with_baseline(HeadSpec(head, options), level),
        training=training.options_on(first, lr),
        seeds=parse_seeds(seeds),
        split=split_spec(splits, folds),
        split_seed=split_seed,
        task=task.value,
        metric=metric,
        standardize=standardize,
        warm_start=warm_start,
        memory_limit=parse_size(memory_limit),
    )
    say_beforehand(terminal, experiment, device)
    result = run_and_show(
        terminal, experiment, out, chosen=head, device=device, overwrite=overwrite
    )
    terminal.result(result, next_command=predict_command(out))
