"""Backbones from random weights: trained with a readout of their own, or end to end with a head."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import head_name
from ..runs.run import Run
from .end_to_end import plan_end_to_end
from .head_training import HeadSpec
from .options import ExperimentOptions, run_with_options, with_keywords
from .pretraining import FoldProgress, plan_pretraining, run_pretraining
from .results import OWN
from .stage import FitProgress
from .trained_folds import TrainedFold


def pretrain(
    model: str,
    data: str,
    out: str | Path,
    *,
    head: str | type[Readout] | None = None,
    head_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    only: Collection[int] = (),
    on_fold: Callable[[TrainedFold, int, int], None] | None = None,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train a backbone from random weights: with its own readout, or end to end with a head.

    Args:
        model: A built-in name, ``file.py:Name`` or ``package.module:Name``.
        data: A data specification, such as ``tu:PROTEINS``.
        out: Folder to write, with a checkpoint per fold.
        head: A readout over the history, such as ``histograph``, to train it with.
        head_options: Options of that readout, such as ``dim`` and ``heads``.
        seed: Seed of initial weights, batches and dropout; with a head, ``seeds`` can be several.
        only: Train these folds; all by default.
        on_fold: Without a head: called after every fold with the number done, and of all.
        options: Split, metric, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``split="kfold:10"``; any other argument of
            :func:`plan_pretraining`, such as ``model_args``; and with a head any of
            :func:`~histograph_post.experiments.end_to_end.plan_end_to_end`.
    """
    options, planning = with_keywords(options, keywords)
    options.refuse(
        *("task", "standardize", "warm_start", "memory_limit"),
        reason="a backbone that is trained from random weights has no such choice",
    )
    if head is not None:
        stage = plan_end_to_end(
            model,
            data,
            HeadSpec(head_name(head), head_options or {}),
            replace(options, seeds=options.seeds or (seed,)),
            only=only,
            **planning,
        )
        return run_with_options(stage, out, chosen=stage.name, options=options)
    if head_options:
        raise ConfigError(f"head_options: found {dict(head_options)}, but no head")
    options.refuse("seeds", reason="only a training with a head has several; give seed")
    planned = plan_pretraining(
        model,
        data,
        split=options.split,
        split_seed=options.split_seed,
        metric=options.metric,
        training=options.training_options(),
        seed=seed,
        **planning,
    )
    if options.on_start is not None:
        options.on_start(planned.task.metric, planned.dataset.notes)

    def epoch_done(progress: FoldProgress) -> None:
        if options.on_epoch is not None:
            done = progress.done + progress.trainer.share_done
            place = (OWN, progress.fold, seed, done, progress.total)
            options.on_epoch(FitProgress(*place, progress.trainer))

    return run_pretraining(
        planned,
        out,
        only=only,
        device=options.device,
        overwrite=options.overwrite,
        config=options.config,
        on_epoch=epoch_done,
        on_fold=on_fold,
    )
