"""What `histograph cache` is to cache: one checkpoint, or one per fold of a pretraining."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from histograph_post.data import DataSpec
    from histograph_post.models import ModelSpec


@dataclass(frozen=True)
class CacheJob:
    """One checkpoint and where its cache goes."""

    model: ModelSpec
    data: DataSpec
    split: str | None
    out: Path
    #: What the user should know of the checkpoint.
    note: str | None = None


def find_jobs(
    folder: Path | None,
    checkpoint: Path | None,
    out: Path,
    *,
    model: str | None,
    data: str | None,
    split: str | None,
    model_args: dict[str, Any],
    data_args: dict[str, Any],
    data_root: Path | None,
    key_map: Path | None,
    state: str | None,
    trust: bool,
) -> list[CacheJob]:
    """Return one job for a checkpoint that is named in full, or one per fold of a folder.

    A fold has recorded its model and data, unless they are code; what is given wins.
    """
    from histograph_post.data import DataSpec
    from histograph_post.experiments.trained_backbones import fold_checkpoints
    from histograph_post.models import ModelSpec
    from histograph_post.models.spec import weights_in

    if folder is not None and checkpoint is not None:
        raise typer.BadParameter("give a folder or --checkpoint, not both")
    if folder is not None and folder.is_file():
        raise typer.BadParameter(
            f"{folder} is a file; a checkpoint is named with its model and data: "
            f"--checkpoint {folder} --model SPEC --data SPEC"
        )
    place = folder or checkpoint
    alone = place is not None and (not place.is_dir() or weights_in(place) is not None)
    if place is None or (folder is None and alone):
        for name, value in {"model": model, "checkpoint": checkpoint, "data": data}.items():
            if value is None:
                raise typer.BadParameter(
                    f"--{name} is missing; only a folder that histograph pretrain wrote needs none"
                )
        assert model is not None  # both are among those that are needed
        assert data is not None
        model_spec = ModelSpec(model, model_args, checkpoint, key_map, trust, state=state)
        return [CacheJob(model_spec, DataSpec(data, data_args, data_root), split, out)]
    found = fold_checkpoints(place, model=model, data=data)
    several = found[0].folder != place
    if several and split is not None:
        raise typer.BadParameter(f"--split: every fold of {place} brings its own")
    return [
        CacheJob(
            replace(
                fold.model, args={**fold.model.args, **model_args}, key_map=key_map, trust=trust
            ),
            replace(
                fold.data,
                args={**fold.data.args, **data_args},
                root=data_root or fold.data.root,
            ),
            split or str(fold.split),
            out / f"{fold.folder.name}.cache" if several else out,
            None
            if fold.head is None
            else f"{fold.folder.name} was trained with the readout {fold.head!r}; its own readout "
            "was not trained, so its score means little",
        )
        for fold in found
    ]
