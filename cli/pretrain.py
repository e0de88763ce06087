"""`histograph pretrain`: train a backbone to start from, a checkpoint per fold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import heads as opt_heads
from . import options as opt
from .terminal import Terminal
from .terminal import metric as shown

if TYPE_CHECKING:
    from histograph_post.pretraining import FoldProgress
    from histograph_post.trained_folds import TrainedFold


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
    metric: opt_heads.MetricOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of weights, batches and dropout.")] = 0,
    epochs: opt_heads.EpochsOption = 100,
    lr: opt_heads.LrOption = 1e-3,
    batch_size: opt_heads.BatchSizeOption = 64,
    weight_decay: opt_heads.DecayOption = 1e-4,
    schedule: opt_heads.ScheduleOption = "cosine",
    warmup: opt_heads.WarmupOption = 2.0,
    clip: opt_heads.ClipOption = 1.0,
    patience: opt_heads.PatienceOption = 30,
    balance: opt_heads.BalanceOption = False,
    device: opt.DeviceOption = "auto",
    overwrite: opt.OverwriteOption = False,
) -> None:
    """Train a backbone with a readout of its own on every fold, when there is no checkpoint.

    `histograph cache DIR` takes it from there.
    """
    from histograph_post.backbone import parse_args
    from histograph_post.pretraining import plan_pretraining
    from histograph_post.pretraining import pretrain as train
    from histograph_post.training import TrainingOptions

    if split is not None and folds is not None:
        raise typer.BadParameter("give --folds or --split, not both")
    pretraining = plan_pretraining(
        model,
        data,
        model_args=parse_args(model_args),
        data_args=parse_args(data_args),
        data_root=data_root,
        split=split if folds is None else f"kfold:{folds}",
        split_seed=split_seed,
        metric=metric,
        training=TrainingOptions(
            epochs=epochs,
            batch_size=batch_size,
            lr=lr,
            weight_decay=weight_decay,
            schedule=schedule,
            warmup=warmup,
            clip=clip,
            patience=patience,
            balance=balance,
        ),
        seed=seed,
    )
    for note in pretraining.dataset.notes:
        terminal.say(f"note: {note}")
    tracked = pretraining.task.metric
    with terminal.progress("training epochs") as update:

        def epoch_done(progress: FoldProgress) -> None:
            update(
                progress.done * epochs + progress.trainer.progress.epoch, progress.total * epochs
            )

        def fold_done(trained: TrainedFold, done: int, total: int) -> None:
            valid = trained.scores.get("valid", {}).get(tracked)
            terminal.say(
                f"[{done}/{total}] fold {trained.fold}: valid {tracked} {shown(valid)} "
                f"at epoch {trained.best_epoch}"
            )

        run = train(
            pretraining,
            out,
            only=only,
            device=device,
            overwrite=overwrite,
            config=terminal.options,
            on_epoch=epoch_done,
            on_fold=fold_done,
        )
    _show(terminal, run.results)
    terminal.result(
        {"folder": str(out), **run.results}, next_command=f"histograph cache {out} -o CACHES"
    )


def _show(terminal: Terminal, results: Any) -> None:
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
