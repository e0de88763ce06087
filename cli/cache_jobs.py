"""What `histograph cache` is to cache: one checkpoint, or one per fold of a pretraining."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from histograph_post.models.pretrained import PretrainedSpec


@dataclass(frozen=True)
class CacheJob:
    """One checkpoint and where its cache goes."""

    spec: PretrainedSpec
    split: str | None
    out: Path
    #: What the user should know of the checkpoint.
    note: str | None = None


def find_jobs(
    folder: Path | None,
    checkpoint: Path | None,
    out: Path,
    *,
    split: str | None,
    model_args: dict[str, Any],
    data_args: dict[str, Any],
    **named: Any,
) -> list[CacheJob]:
    """Return one job for a checkpoint that is named in full, or one per fold of a folder.

    A fold says itself which model and data it belongs to, unless that is code; what is given wins.
    """
    from histograph_post.experiments.trained_folds import fold_checkpoints
    from histograph_post.models.pretrained import PretrainedSpec

    given = {name: value for name, value in named.items() if value is not None}
    if folder is not None and checkpoint is not None:
        raise typer.BadParameter("give a folder or --checkpoint, not both")
    place = folder or checkpoint
    if place is None or (folder is None and not place.is_dir()):
        needed = {"model": named["model"], "checkpoint": checkpoint, "data": named["data"]}
        for name, value in needed.items():
            if value is None:
                raise typer.BadParameter(
                    f"--{name} is missing; only a folder that histograph pretrain wrote needs none"
                )
        assert checkpoint is not None  # it is among those that are needed
        spec = PretrainedSpec(
            checkpoint=checkpoint, model_args=model_args, data_args=data_args, **given
        )
        return [CacheJob(spec, split, out)]
    found = fold_checkpoints(place, model=given.pop("model", None), data=given.pop("data", None))
    several = found[0].folder != place
    if several and split is not None:
        raise typer.BadParameter(f"--split: every fold of {place} brings its own")
    return [
        CacheJob(
            replace(
                fold.spec,
                model_args={**fold.spec.model_args, **model_args},
                data_args={**fold.spec.data_args, **data_args},
                **given,
            ),
            split or str(fold.split),
            out / f"{fold.folder.name}.cache" if several else out,
            None
            if fold.head is None
            else f"{fold.folder.name} was trained with the readout {fold.head!r}, its own readout "
            "was not: the score of that says little",
        )
        for fold in found
    ]
