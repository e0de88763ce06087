"""`histograph pretrain`: train a backbone to start from, a checkpoint per fold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import heads as opt_heads
from . import options as opt
from .heads import parse_seeds, run_and_show
from .next_commands import cache_command, predict_command
from .terminal import Terminal
from .terminal import metric as shown
from .training_flags import TrainingFlags

if TYPE_CHECKING:
    from histograph_post.experiments.pretraining import FoldProgress
    from histograph_post.experiments.trained_folds import TrainedFold


def pretrain(
    terminal: Terminal,
    model: opt.ModelOption,
    data: opt.DataOption,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    model_args: opt.ModelArgsOption = [],  # noqa: B006  # typer copies it
    data_root: opt.DataRootOption = None,
    data_args: opt.DataArgsOption = [],  # noqa: B006
    folds: opt_heads.FoldsOption = None,
    split: opt.SplitOption = None,
    split_seed: opt.SplitSeedOption = 0,
    only: Annotated[
        list[int], typer.Option("--only", metavar="K", help="Train this fold only; repeatable.")
    ] = [],  # noqa: B006
    head: Annotated[
        str | None,
        typer.Option("--head", help="Train end to end with this readout: histograph, mean, ..."),
    ] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Width of the head.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads of it.")] = None,
    head_args: opt_heads.HeadArgsOption = [],  # noqa: B006
    layers: opt.LayersOption = "auto",
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="With --head: such as 0-4; a fit for each.")
    ] = None,
    baseline: Annotated[
        bool,
        typer.Option(
            "--baseline/--no-baseline", help="With --head: train the own readout beside it."
        ),
    ] = True,
    normalize: Annotated[
        bool,
        typer.Option(
            "--normalize/--no-normalize", help="With --head: bring each layer's rows to one scale."
        ),
    ] = True,
    checkpoint_layers: opt_heads.CheckpointLayersOption = False,
    amp: opt_heads.AmpOption = False,
    metric: opt_heads.MetricOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, batches and dropout.")] = 0,
    lr: Annotated[float, typer.Option("--lr", help="Highest learning rate.")] = 1e-3,
    *,
    training: TrainingFlags,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a backbone from random weights on every fold, when there is no checkpoint.

    With its own readout, or end to end with a head. `histograph cache DIR` takes it from there.
    """
    from histograph_post.models import parse_args

    if split is not None and folds is not None:
        raise typer.BadParameter("give --folds or --split, not both")
    planning: dict[str, Any] = {
        "model_args": parse_args(model_args),
        "data_args": parse_args(data_args),
        "data_root": data_root,
        "split": split if folds is None else f"kfold:{folds}",
        "split_seed": split_seed,
        "metric": metric,
        "training": training.options(lr),
    }
    if head is None:
        for name, given in (
            *(("--dim", dim), ("--heads", heads), ("--head-args", head_args), ("--seeds", seeds)),
            *(("--checkpoint-layers", checkpoint_layers), ("--amp", amp)),
            *(("--no-baseline", not baseline), ("--no-normalize", not normalize)),
            ("--layers", layers != "auto"),
        ):
            if given:
                raise typer.BadParameter(f"{name}: only with --head")
        _pretrain(terminal, model, data, out, only, seed, planning, device, overwrite)
        return
    sizes = {name: value for name, value in (("dim", dim), ("heads", heads)) if value is not None}
    planning |= {
        "seeds": [seed] if seeds is None else parse_seeds(seeds),
        "layers": layers,
        "baseline": baseline,
        "normalize": normalize,
        "only": only,
        "checkpoint_layers": checkpoint_layers,
        "amp": amp,
    }
    options = {**sizes, **parse_args(head_args)}
    _train_end_to_end(terminal, model, data, out, head, options, planning, device, overwrite)


def _train_end_to_end(
    terminal: Terminal,
    model: str,
    data: str,
    out: Path,
    head: str,
    options: dict[str, Any],
    planning: dict[str, Any],
    device: str,
    overwrite: bool,
) -> None:
    """Train backbone and head together, and show them beside the backbone's own readout."""
    from histograph_post.experiments.end_to_end import plan_end_to_end
    from histograph_post.experiments.head_training import HeadSpec

    stage = plan_end_to_end(model, data, HeadSpec(head, options), **planning)
    for note in (*stage.pretraining.dataset.notes, *stage.capture.notes):
        terminal.say(f"note: {note}")
    found = run_and_show(
        terminal, stage, out, chosen=stage.name, device=device, overwrite=overwrite
    )
    terminal.result(
        found,
        next_command=predict_command(out),
    )


def _pretrain(
    terminal: Terminal,
    model: str,
    data: str,
    out: Path,
    only: list[int],
    seed: int,
    planning: dict[str, Any],
    device: str,
    overwrite: bool,
) -> None:
    """Train a backbone with its own readout, and show every fold."""
    from histograph_post.experiments.pretraining import plan_pretraining, run_pretraining

    pretraining = plan_pretraining(model, data, seed=seed, **planning)
    epochs = pretraining.training.epochs
    for note in pretraining.dataset.notes:
        terminal.say(f"note: {note}")
    tracked = pretraining.task.metric
    with terminal.progress("training epochs") as update:

        def epoch_done(progress: FoldProgress) -> None:
            terminal.epoch_done(f"fold-{progress.fold}", progress.trainer)
            update(
                progress.done * epochs + progress.trainer.progress.epoch, progress.total * epochs
            )

        def fold_done(trained: TrainedFold, done: int, total: int) -> None:
            valid = trained.scores.get("valid", {}).get(tracked)
            terminal.say(
                f"[{done}/{total}] fold {trained.fold}: valid {tracked} {shown(valid)} "
                f"at epoch {trained.best_epoch}"
            )

        run = run_pretraining(
            pretraining,
            out,
            only=only,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            on_epoch=epoch_done,
            on_fold=fold_done,
        )
    show_folds(terminal, run.results)
    terminal.result(
        {"folder": str(out), **run.results}, next_command=cache_command(out, model, data)
    )


def show_folds(terminal: Terminal, results: Any) -> None:
    """Print the score of every fold, and their mean and deviation."""
    parts = ("valid", "test")
    rows = [
        [
            f"fold {fold['fold']}",
            fold["best_epoch"],
            *(shown(fold["scores"].get(part, {}).get(results["metric"])) for part in parts),
        ]
        for fold in results["folds"]
    ]
    summaries = [results[part] for part in parts]
    rows.append(
        [
            "mean ± deviation",
            "-",
            *("-" if s is None else f"{s['mean']:.4f} ± {s['deviation']:.4f}" for s in summaries),
        ]
    )
    terminal.table(
        f"{results['model']} on {results['data']}: {results['metric']}",
        ["", "best epoch", *parts],
        rows,
    )
