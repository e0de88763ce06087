"""Fits: one readout, on one fold, with one seed each, as they are kept in a run.

A fit's folder holds ``state.pt`` while it is being trained and, once it is done, ``fit.json``
(written last), ``head.safetensors``, the outputs for the validation and the test rows and, where a
backbone was trained too, ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file as load_arrays

from ..training.loop import STATE_NAME
from ..training.options import TrainingOptions
from .run import HEAD_NAME as HEAD_NAME
from .run import fit_place, read_json

FIT_NAME = "fit.json"
#: Outputs for the test rows and for the validation rows; of earlier versions for the former only.
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
    def label(self) -> str:
        """What the fit is called among all others of a run."""
        return f"{self.name}, fold {self.fold}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where the fit is kept inside a run."""
        return fit_place(self.name, self.fold, self.seed)


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
    #: The same of the validation part, from which a temperature is fitted.
    valid_rows: np.ndarray
    valid_outputs: np.ndarray
    #: What was measured after every epoch; of a readout that is solved, for every strength.
    log: Sequence[Mapping[str, float]]
    #: Of the penalty, for a readout that is solved; its epochs are the strengths that were tried.
    strength: float | None = None
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
            **({} if self.strength is None else {"strength": self.strength}),
            "scores": {part: dict(scores) for part, scores in self.scores.items()},
            **({} if self.backbone is None else {"backbone": dict(self.backbone)}),
        }


def find_fit(spec: FitSpec, folder: Path) -> Fit | None:
    """Return the fit in that folder if it is done, else None."""
    if not (folder / FIT_NAME).exists():
        return None
    (folder / STATE_NAME).unlink(missing_ok=True)  # of a run killed just before its fit was done
    return load_fit(spec, folder)


def load_fit(spec: FitSpec, folder: Path) -> Fit:
    """Read a finished fit back."""
    stored = read_json(folder, FIT_NAME)
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
        valid_rows=arrays.get("valid_rows", np.empty(0, dtype=np.int64)),
        valid_outputs=arrays.get("valid_outputs", arrays["outputs"][:0]),
        log=stored["log"],
        strength=stored.get("strength"),
        backbone=stored.get("backbone"),
    )
