"""Training from random weights in one call: a backbone alone, or end to end with a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runs.run import Run
from .end_to_end import plan_end_to_end
from .head_training import HeadSpec
from .pretraining import plan_pretraining, run_pretraining
from .stage import run_experiment


def pretrain(
    model: str,
    data: str,
    out: str | Path,
    *,
    head: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    **options: Any,
) -> Run:
    """Train a backbone from random weights: with its own readout, or end to end with a head.

    Args:
        model: A built-in name, ``file.py:Name`` or ``package.module:Name``.
        data: A data specification, such as ``tu:PROTEINS``.
        out: Folder to write, with a checkpoint per fold.
        head: A readout over the history, such as ``histograph``, to train it with.
        device: Where to train.
        overwrite: Replace another run in that folder.
        options: Any argument of :func:`plan_pretraining`, and with a head any of
            :func:`~histograph_post.experiments.end_to_end.plan_end_to_end`.
    """
    if head is None:
        planned = plan_pretraining(model, data, **options)
        return run_pretraining(planned, out, device=device, overwrite=overwrite)
    head_spec = HeadSpec(head, options.pop("head_options", {}))
    stage = plan_end_to_end(model, data, head_spec, **options)
    return run_experiment(stage, out, chosen=stage.name, device=device, overwrite=overwrite)
