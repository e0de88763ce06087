"""Fits: one readout, on one fold, with one seed each; resumable, and saved when they are done.

A fit's folder holds ``state.pt`` while it is being trained and, once it is done, ``fit.json``
(written last), ``head.safetensors``, the outputs for the test rows and, where a backbone was
trained too, ``model.safetensors``. Fits that may be trained together keep their states, those of
all seeds, in a folder of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file as save_tensors
from torch import Tensor, nn

from .files import atomic_path, write_json
from .heads.registry import head_config
from .heads.standardize import EachLayerNorm, Standardizer
from .resuming import STATE_NAME, train_resumably
from .splits import PARTS, Split
from .training import Trainer
from .training_options import TrainingOptions

FIT_NAME = "fit.json"
HEAD_NAME = "head.safetensors"
OUTPUTS_NAME = "test.safetensors"


@dataclass(frozen=True)
class FitSpec:
    """What to fit: all that decides the result, besides the cache."""

    head: str
    options: Mapping[str, Any]
    training: TrainingOptions
    fold: int
    seed: int
    standardize: bool = True
    #: Start where the checkpoint's own readout stands (heads that can).
    warm_start: bool = False
    #: What is trained besides the head, in a word; empty for the head alone.
    stage: str = ""

    @property
    def name(self) -> str:
        """What the fit is called in tables and results."""
        return f"{self.head}-{self.stage}" if self.stage else self.head

    @property
    def folder(self) -> Path:
        """Where the fit is kept inside a run."""
        return self.states_folder.with_name(f"fold-{self.fold}-seed-{self.seed}")

    @property
    def states_folder(self) -> Path:
        """Where the states of all seeds are kept while they may be trained together."""
        return Path("fits") / self.name.replace(" ", "-") / f"fold-{self.fold}"


@dataclass(frozen=True)
class Fit:
    """A finished fit."""

    spec: FitSpec
    #: Scores per part of the split: ``train``, ``valid`` and ``test``.
    scores: Mapping[str, Mapping[str, float]]
    best_epoch: int
    num_epochs: int
    num_parameters: int
    seconds_per_epoch: float
    #: Label rows of the test part, and the outputs for them, in the units of the labels.
    test_rows: np.ndarray
    test_outputs: np.ndarray
    #: What was measured after every epoch.
    log: Sequence[Mapping[str, float]]
    #: What moved in the backbone and the hash of its weights; None for a frozen one.
    backbone: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is the same on every run with the same seed on the same machine."""
        return {
            "head": self.spec.name,
            "fold": self.spec.fold,
            "seed": self.spec.seed,
            "best_epoch": self.best_epoch,
            "epochs": self.num_epochs,
            "scores": {part: dict(scores) for part, scores in self.scores.items()},
            **({} if self.backbone is None else {"backbone": dict(self.backbone)}),
        }


def train_fit(
    spec: FitSpec,
    trainer: Trainer,
    folder: Path,
    *,
    head: nn.Module | None,
    standardizer: nn.Module | None = None,
    on_epoch: Callable[[Trainer], None] | None = None,
    save_backbone: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Fit:
    """Train to the end, going on with what is in the folder; score every part and save the fit.

    Args:
        spec: What is fitted.
        trainer: Made just as it was when the fit was begun.
        folder: Of the fit.
        head: The part of the trainer's network that is the head; None for a model's own readout.
        standardizer: What brings the layers to one scale before the head.
        on_epoch: Told after every epoch.
        save_backbone: Writes the backbone, with the weights of the best epoch, into the folder
            and says what moved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seconds = train_resumably([trainer], folder, on_epoch=on_epoch)
    fit = save_fit(
        spec,
        trainer,
        folder,
        seconds=seconds,
        head=head,
        standardizer=standardizer,
        save_backbone=save_backbone,
    )
    (folder / STATE_NAME).unlink(missing_ok=True)
    return fit


def save_fit(
    spec: FitSpec,
    trainer: Trainer,
    folder: Path,
    *,
    seconds: float,
    head: nn.Module | None,
    standardizer: nn.Module | None = None,
    save_backbone: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Fit:
    """Score every part with the weights of the best epoch, and save what was fitted.

    Args:
        spec: What was fitted.
        trainer: It has finished.
        folder: Of the fit.
        seconds: What an epoch took.
        head: As for :func:`train_fit`, like all that follows.
        standardizer: What brings the layers to one scale before the head.
        save_backbone: Writes the backbone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task, split, labels = trainer.task, trainer.split, trainer.source.labels
    outputs = {part: trainer.predict(rows) for part, rows in _parts(split)}
    fit = Fit(
        spec=spec,
        scores={part: task.scores(outputs[part], labels[rows]) for part, rows in _parts(split)},
        best_epoch=trainer.progress.best_epoch,
        num_epochs=trainer.progress.epoch,
        num_parameters=trainer.num_parameters,
        seconds_per_epoch=seconds,
        test_rows=split.test,
        test_outputs=outputs.get("test", np.empty((0, task.out_dim))),
        log=trainer.progress.log,
        backbone=None if save_backbone is None else save_backbone(folder),
    )
    _save(fit, trainer, head, standardizer, folder)
    return fit


def _parts(split: Split) -> list[tuple[str, np.ndarray]]:
    return [(part, rows) for part, rows in zip(PARTS, split.parts, strict=True) if len(rows)]


def _save(
    fit: Fit,
    trainer: Trainer,
    head: nn.Module | None,
    standardizer: nn.Module | None,
    folder: Path,
) -> None:
    tensors: dict[str, Tensor] = {}
    for name, module in (("head", head), ("standardizer", standardizer)):
        if module is not None:
            tensors |= {f"{name}.{key}": value for key, value in module.state_dict().items()}
    if head is not None:
        with atomic_path(folder / HEAD_NAME) as partial:
            save_tensors({k: value.contiguous().clone() for k, value in tensors.items()}, partial)
    with atomic_path(folder / OUTPUTS_NAME) as partial:
        save_arrays({"rows": fit.test_rows.copy(), "outputs": fit.test_outputs}, partial)
    write_json(
        folder / FIT_NAME,
        {
            **fit.to_json(),
            "config": {} if head is None else head_config(fit.spec.head, head),
            "standardize": isinstance(standardizer, Standardizer),
            "layer_norm": isinstance(standardizer, EachLayerNorm),
            "target_scale": {
                "mean": list(trainer.scale.mean),
                "deviation": list(trainer.scale.deviation),
            },
            "num_parameters": fit.num_parameters,
            "seconds_per_epoch": fit.seconds_per_epoch,
            "log": list(fit.log),
        },
    )


def load_fit(spec: FitSpec, folder: Path) -> Fit:
    """Read a finished fit back."""
    stored = json.loads((folder / FIT_NAME).read_text(encoding="utf-8"))
    arrays = load_arrays(folder / OUTPUTS_NAME)
    return Fit(
        spec=spec,
        scores=stored["scores"],
        best_epoch=stored["best_epoch"],
        num_epochs=stored["epochs"],
        num_parameters=stored["num_parameters"],
        seconds_per_epoch=stored["seconds_per_epoch"],
        test_rows=arrays["rows"],
        test_outputs=arrays["outputs"],
        log=stored["log"],
        backbone=stored.get("backbone"),
    )
