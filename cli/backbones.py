"""`histograph pretrain` and `finetune`: backbones that are trained, alone or with a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import histograph_post as hg
from histograph_post.runs.verdict import gained
from histograph_post.utils.text import score

from . import options as opt
from .flags import ArrayFlags, HeadFlags, TrainingFlags, parse_seeds, parse_share, split_spec
from .guidance import cache_command, next_command
from .results import show_folds, show_run
from .terminal import Terminal

if TYPE_CHECKING:
    from histograph_post.experiments.options import FitProgress
    from histograph_post.runs.fits import Fit


def pretrain(
    terminal: Terminal,
    model: opt.ModelOption,
    data: opt.DataOption,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    model_args: opt.ModelArgsOption = [],  # noqa: B006  # typer copies it
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006
    folds: opt.FoldsOption = None,
    split: opt.SplitOption = None,
    split_seed: opt.SplitSeedOption = 0,
    only: Annotated[
        list[int], typer.Option("--only", metavar="K", help="Train only fold K; repeatable.")
    ] = [],  # noqa: B006
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            autocompletion=opt.complete_heads,
            help="Train end to end with this readout: histograph, mean, ..., or your own, as "
            "file.py:Class.",
        ),
    ] = None,
    *,
    head_flags: HeadFlags,
    layers: opt.LayersOption = "auto",
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            help="With --head: seeds, such as 0-4, one fit per seed and fold.",
            rich_help_panel=opt.HEAD,
        ),
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline",
            help="With --head: also train the backbone with its own readout, as the baseline.",
            rich_help_panel=opt.HEAD,
        ),
    ] = True,
    standardize: Annotated[
        bool,
        typer.Option(
            "--standardize/--no-standardize",
            help="With --head: standardize each layer's activations, node by node.",
            rich_help_panel=opt.HEAD,
        ),
    ] = True,
    normalize: Annotated[
        bool,
        typer.Option(
            "--normalize/--no-normalize", hidden=True, help="The earlier name of --standardize."
        ),
    ] = True,
    checkpoint_layers: opt.CheckpointLayersOption = False,
    amp: opt.AmpOption = False,
    metric: opt.MetricOption = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the weights, batches and dropout.")
    ] = 0,
    lr: Annotated[
        float,
        typer.Option("--lr", help="Peak learning rate.", rich_help_panel=opt.TRAINING),
    ] = 1e-3,
    training: TrainingFlags,
    device: opt.DeviceOption = "auto",
    jobs: opt.JobsOption = None,
    backend: opt.BackendOption = "loky",
    scheduler: opt.SchedulerOption = None,
    fits: opt.FitsOption = None,
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a backbone from random weights on every fold, if there is no checkpoint.

    It is trained with its own readout, or end to end with a head. `histograph cache DIR` continues
    from there.
    """
    from histograph_post.models import parse_args

    given: dict[str, Any] = {
        "model_args": parse_args(model_args),
        "data_args": parse_args(data_args),
        "data_root": data_root,
        "only": only,
        "split": split_spec("--split", split, folds),
        "split_seed": split_seed,
        "metric": metric,
        "seed": seed,
        "training": training.options(lr),
        "device": device,
        "jobs": jobs,
        "backend": backend,
        "scheduler": scheduler,
        "fits": parse_share("--fits", fits),
        "overwrite": overwrite,
        "config": terminal.options,
        "on_note": terminal.note,
    }
    if head is not None:
        with terminal.watch_experiment() as watching:
            run = hg.pretrain(
                model,
                data,
                out,
                head=head,
                head_options=head_flags.options(),
                layers=layers,
                seeds=None if seeds is None else parse_seeds(seeds),
                baseline=baseline,
                standardize=standardize and normalize,
                checkpoint_layers=checkpoint_layers,
                amp=amp,
                on_start=watching.started,
                on_epoch=watching.epoch_done,
                on_fit=watching.fit_done,
                **given,
            )
        found = show_run(terminal, run, watching)
        terminal.result(found, next_command=next_command(run))
        return
    for name, value in (
        *((f"--{name.replace('_', '-')}", value) for name, value in vars(head_flags).items()),
        *(("--checkpoint-layers", checkpoint_layers), ("--amp", amp), ("--seeds", seeds)),
        *(("--no-baseline", not baseline), ("--no-standardize", not standardize)),
        ("--layers", layers != "auto"),
    ):
        if value:
            raise typer.BadParameter(f"{name}: only with --head")
    with terminal.progress("training epochs") as update:
        watch = _FoldWatch(terminal, update, training.epochs)
        run = hg.pretrain(
            model,
            data,
            out,
            on_start=watch.started,
            on_epoch=watch.epoch_done,
            on_fit=watch.fold_done,
            **given,
        )
    if not run.is_finished:
        terminal.result({"folder": str(out), "complete": False})
        return
    show_folds(terminal, run.results)
    following = cache_command(out, model=model, data=data)
    terminal.result({"folder": str(out), **run.results}, next_command=following)


class _FoldWatch:
    """Prints what pretraining reports: its notes, a line per fold, how far it is.

    Args:
        terminal: Where to print.
        update: Sets the bar to an epoch, of so many.
        epochs: Of a fold.
    """

    def __init__(self, terminal: Terminal, update: Callable[[int, int], None], epochs: int) -> None:
        self._terminal, self._update, self._epochs = terminal, update, epochs
        self._metric = ""

    def started(self, metric: str, notes: Sequence[str]) -> None:
        """Print the notes; the lines to come are about this metric."""
        self._metric = metric
        for note in notes:
            self._terminal.note(note)

    def epoch_done(self, progress: FitProgress) -> None:
        """Advance the bar."""
        self._terminal.epoch_done(f"fold-{progress.fold}", progress.measured)
        self._update(round(progress.done * self._epochs), progress.total * self._epochs)

    def fold_done(self, fit: Fit, done: int, total: int) -> None:
        """Print the line of a fold."""
        valid = fit.scores.get("valid", {}).get(self._metric)
        self._terminal.info(
            f"[{done}/{total}] fold {fit.spec.fold}: valid {self._metric} {score(valid)} "
            f"at epoch {fit.best_epoch}{', then diverged' * fit.diverged}"
        )


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
    ] = "frozen",
    checkpoint_layers: opt.CheckpointLayersOption = False,
    amp: opt.AmpOption = False,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            autocompletion=opt.complete_heads,
            help="Readout to train on a cache, histograph by default; of a run, the code of your "
            "own one, as file.py:Class.",
        ),
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
            autocompletion=opt.complete_data,
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
            bn=bn,
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
    terminal.result(found, next_command=f"{next_command(run)}, or {caching}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _show_changes(terminal: Terminal, results: Any) -> None:
    """Print the gain over the frozen backbone, and what training changed for it."""
    from histograph_post.experiments.unfreezing import ParameterCounts

    if gain := gained(results):
        terminal.info(gain)
    moved = [fit["backbone"]["moved"] for fit in results["fits"] if "backbone" in fit]
    most = ParameterCounts(**{name: max(fit[name] for fit in moved) for name in moved[0]})
    terminal.info(f"training changed {most}")
