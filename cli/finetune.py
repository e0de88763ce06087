"""`histograph finetune`: train a cached backbone and its head together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import histograph_post as hg

from . import options as opt
from .flags import ArrayFlags, HeadFlags, TrainingFlags
from .guidance import cache_command, predict_command
from .results import gain, show_run
from .terminal import Terminal


@dataclass(frozen=True)
class FinetuneFlags(ArrayFlags):
    """The options of an experiment that may continue a run, with the seeds of that run."""

    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            help="Seeds, such as 0-4: one fit per seed and fold; by default the run's, or 0.",
        ),
    ] = None


def finetune(
    terminal: Terminal,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|CACHE",
            help="A run of train-head, to train its heads further; or a cache, or a folder of "
            "per-fold caches, to train a new head.",
        ),
    ],
    out: opt.RunOption,
    backbone_lr: Annotated[
        float, typer.Option("--backbone-lr", min=0, help="Peak learning rate of the backbone.")
    ] = 1e-4,
    head_lr: Annotated[
        float, typer.Option("--head-lr", help="Peak learning rate of the head.")
    ] = 1e-3,
    unfreeze: Annotated[
        str | None,
        typer.Option(
            "--unfreeze",
            metavar="NAMES",
            help="Train only these modules or parameters of the backbone: names or globs, "
            "separated by commas; '' for none. By default all are trained.",
        ),
    ] = None,
    unfreeze_last: Annotated[
        int | None,
        typer.Option("--unfreeze-last", min=1, help="Train only the backbone's last N layers."),
    ] = None,
    unfreeze_every: Annotated[
        int,
        typer.Option(
            "--unfreeze-every",
            min=0,
            help="Train the head alone at first, then one more layer every N epochs, from the last "
            "to the first; 0 trains all layers from the start.",
        ),
    ] = 0,
    bn: Annotated[
        opt.Statistics,
        typer.Option(
            "--bn",
            metavar="NAME",
            help="Running statistics of the batch norms that are trained: frozen keeps those of "
            "the checkpoint, train updates them.",
        ),
    ] = opt.Statistics.FROZEN,
    checkpoint_layers: opt.CheckpointLayersOption = False,
    amp: opt.AmpOption = False,
    head: Annotated[
        str | None,
        typer.Option("--head", help="Readout to train on a cache; histograph by default."),
    ] = None,
    *,
    head_flags: HeadFlags,
    experiment: FinetuneFlags,
    training: TrainingFlags,
    warm_start: opt.WarmStartOption = False,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="CACHE", help="Where the run's cache is, if it was moved."),
    ] = None,
    checkpoint: opt.MovedCheckpointOption = None,
    model: opt.MovedModelOption = None,
    key_map: opt.KeyMapOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            metavar="SPEC",
            help="The cached data, if they come from your own code (file.py:function) or were "
            "moved.",
        ),
    ] = None,
    data_root: opt.DataRootOption = None,
    trust_checkpoint: opt.TrustOption = False,
) -> None:
    """Train a cached backbone and its head together, with gradients through the captured layers.

    The result is compared with the heads on the frozen backbone, and can be cached again.
    """
    with terminal.watch_experiment() as watch:
        run = hg.finetune(
            source,
            out,
            head=head,
            head_options=head_flags.options(),
            backbone_lr=backbone_lr,
            unfreeze=None if unfreeze is None else _names(unfreeze),
            unfreeze_last=unfreeze_last,
            unfreeze_every=unfreeze_every,
            bn=bn.value,
            checkpoint_layers=checkpoint_layers,
            amp=amp,
            options=experiment.options(
                terminal, watch, training.options(head_lr), warm_start=warm_start
            ),
            cache=cache,
            data=data,
            data_root=data_root,
            model=model,
            checkpoint=checkpoint,
            key_map=key_map,
            trust=trust_checkpoint,
        )
    found = show_run(terminal, run, watch)
    if not run.is_finished:
        terminal.result(found)
        return
    _show_changes(terminal, found)
    caching = cache_command(out, model=model, data=data)
    terminal.result(found, next_command=f"{predict_command(out)}, or {caching}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _show_changes(terminal: Terminal, results: Any) -> None:
    """Print the gain over the frozen backbone, and what training changed for it."""
    from histograph_post.experiments.backbones import ParameterCounts

    versus = results["versus_frozen"]
    if versus is not None:
        terminal.info(f"{results['head']} against {versus['baseline']}: {gain(versus)}")
    moved = [fit["backbone"]["moved"] for fit in results["fits"] if "backbone" in fit]
    most = ParameterCounts(**{name: max(fit[name] for fit in moved) for name in moved[0]})
    terminal.info(f"training changed {most}")
