"""`histograph finetune`: train a cached backbone and its head together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import heads as opt_heads
from . import options as opt
from .heads import parse_seeds, run_and_show, split_spec
from .next_commands import cache_command, predict_command
from .terminal import Terminal
from .training_flags import TrainingFlags


def finetune(
    terminal: Terminal,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CACHE",
            help="A run of train-head, whose heads go on learning; or a cache, or a folder of "
            "per-fold caches, for a fresh head.",
        ),
    ],
    out: opt_heads.RunOption,
    backbone_lr: Annotated[
        float, typer.Option("--backbone-lr", min=0, help="Highest learning rate of the backbone.")
    ] = 1e-4,
    head_lr: Annotated[
        float, typer.Option("--head-lr", help="Highest learning rate of the head.")
    ] = 1e-3,
    unfreeze: Annotated[
        str | None,
        typer.Option(
            "--unfreeze",
            metavar="NAMES",
            help="Modules or parameters that move, names or globs separated by commas; "
            "'' for none. All by default.",
        ),
    ] = None,
    unfreeze_last: Annotated[
        int | None, typer.Option("--unfreeze-last", min=1, help="Move the last K layers only.")
    ] = None,
    unfreeze_every: Annotated[
        int,
        typer.Option(
            "--unfreeze-every",
            min=0,
            help="Start with the head, and let one more layer move every K epochs; 0: all at once.",
        ),
    ] = 0,
    bn: Annotated[
        opt.Statistics, typer.Option("--bn", help="What running statistics of what moves do.")
    ] = opt.Statistics.FROZEN,
    checkpoint_layers: opt_heads.CheckpointLayersOption = False,
    amp: opt_heads.AmpOption = False,
    head: Annotated[
        str | None, typer.Option("--head", help="A fresh head, for a cache; histograph.")
    ] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Width of a fresh head.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads of it.")] = None,
    head_args: opt_heads.HeadArgsOption = [],  # noqa: B006  # typer copies it
    task: opt_heads.TaskOption = opt.TaskKind.AUTO,
    metric: opt_heads.MetricOption = None,
    folds: opt_heads.FoldsOption = None,
    splits: opt_heads.SplitsOption = None,
    split_seed: opt.SplitSeedOption = 0,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="Such as 0-4; 0, or those of the run.")
    ] = None,
    *,
    training: TrainingFlags,
    standardize: opt_heads.StandardizeOption = True,
    warm_start: opt_heads.WarmStartOption = False,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="The run's cache, if it was moved.")
    ] = None,
    checkpoint: opt.MovedCheckpointOption = None,
    model: opt.MovedModelOption = None,
    key_map: opt.KeyMapOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SPEC",
            help="The cached data, if they come from code (file.py:function) or were moved.",
        ),
    ] = None,
    data_root: opt.DataRootOption = None,
    trust_checkpoint: opt.TrustOption = False,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a cached backbone and its head together, with gradients through the captured layers.

    The result is read beside the heads on the frozen backbone, and can be cached again.
    """
    from histograph_post.experiments.finetuning import plan_finetuning
    from histograph_post.experiments.head_training import HeadSpec
    from histograph_post.experiments.unfreezing import BackboneOptions
    from histograph_post.models import parse_args

    sizes = {name: value for name, value in (("dim", dim), ("heads", heads)) if value is not None}
    options = {**sizes, **parse_args(head_args)}
    planned = plan_finetuning(
        source,
        head=HeadSpec(head or "histograph", options) if head is not None or options else None,
        options=BackboneOptions(
            lr=backbone_lr,
            unfreeze=None if unfreeze is None else _names(unfreeze),
            unfreeze_last=unfreeze_last,
            unfreeze_every=unfreeze_every,
            bn=bn.value,
            checkpoint_layers=checkpoint_layers,
            autocast=amp,
        ),
        training=training.options(head_lr),
        seeds=None if seeds is None else parse_seeds(seeds),
        split=split_spec(splits, folds),
        split_seed=split_seed,
        task=task.value,
        metric=metric,
        standardize=standardize,
        warm_start=warm_start,
        cache=cache,
        data=data,
        data_root=data_root,
        model=model,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust_checkpoint,
    )
    found = run_and_show(
        terminal, planned, out, chosen=planned.name, device=device, overwrite=overwrite
    )
    _show_moved(terminal, found)
    used = planned.backbones
    caching = cache_command(out, used.model.spec, used.data.spec)
    terminal.result(found, next_command=f"{predict_command(out)}, or {caching}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _show_moved(terminal: Terminal, results: Any) -> None:
    """Say what the gain over the frozen backbone is, and what moved for it."""
    from histograph_post.experiments.unfreezing import Movement

    versus = results["versus_frozen"]
    if versus is not None:
        terminal.say(f"{results['head']} against {versus['baseline']}: {opt_heads.gain(versus)}")
    moved = [fit["backbone"]["moved"] for fit in results["fits"] if "backbone" in fit]
    most = Movement(**{name: max(fit[name] for fit in moved) for name in moved[0]})
    terminal.say(f"training moved {most}")
