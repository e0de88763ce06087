"""Fits: one readout on one fold with one seed, trained, scored, saved and read back.

A fit's folder holds ``state.pt`` while it is being trained and, once it is done, ``fit.json``
(written last), ``head.safetensors``, the outputs for the validation and the test rows and, where a
backbone was trained too, ``model.safetensors``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.registry import head_config, head_info
from ..heads.standardize import EachLayerNorm, Standardizer
from ..splits import PARTS, Split
from ..tasks import TargetScale, Task
from ..training.loop import STATE_NAME, OnEpoch, Progress, Trainer, train_resumably
from ..training.options import TrainingOptions
from ..utils.files import load_arrays, save_arrays, save_tensors, write_json
from .folder import BrokenFitError, check_seal, require_sealed, seal
from .records import HeadRecord, Scale, check_fit
from .run import HEAD_NAME as HEAD_NAME
from .run import MODEL_NAME, fit_place, read_json, staged_name

FIT_NAME = "fit.json"
#: Outputs for the test and the validation rows; earlier versions have the former only.
OUTPUTS_NAME = "test.safetensors"

#: The other files of a fit, written before ``fit.json``.
FIT_FILES = (HEAD_NAME, OUTPUTS_NAME, MODEL_NAME)


@dataclass(frozen=True)
class FitSpec:
    """What to fit: all that the result depends on, besides the cache."""

    head: str
    options: Mapping[str, Any]
    training: TrainingOptions
    fold: int
    seed: int
    standardize: bool = True
    #: Start at the checkpoint's own predictions (heads that can).
    warm_start: bool = False
    #: :data:`~.run.TUNED`, ...; empty for a head on a frozen backbone.
    stage: str = ""
    #: Hash of all that the run depends on, which tells its fits from those of another run.
    plan: str = ""

    @property
    def name(self) -> str:
        """The name of the fit in tables and results."""
        return staged_name(self.head, self.stage)

    @property
    def label(self) -> str:
        """The name of the fit among all fits of a run."""
        return f"{self.name}, fold {self.fold}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Where the fit is kept inside a run."""
        return fit_place(self.name, self.fold, self.seed)


_no_rows = partial(np.empty, 0, np.int64)  # [0]
_no_outputs = partial(np.empty, (0, 1))  # [0, out_dim]


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
    #: What was measured after every epoch; for a solved readout, for every strength.
    log: Sequence[Mapping[str, float]]
    #: Label rows of the test part, and the outputs for them, in the units of the labels.
    test_rows: np.ndarray = field(default_factory=_no_rows)
    test_outputs: np.ndarray = field(default_factory=_no_outputs)
    #: The same for the validation part, on which a temperature is fitted.
    valid_rows: np.ndarray = field(default_factory=_no_rows)
    valid_outputs: np.ndarray = field(default_factory=_no_outputs)
    #: Of the penalty of a solved readout, whose epochs are the strengths that were tried.
    strength: float | None = None
    #: Whether training stopped because the loss was not finite; the best epoch is before that,
    #: or the weights are the initial ones.
    diverged: bool = False
    #: What changed in the backbone and the hash of its weights; None for a frozen one.
    backbone: Mapping[str, Any] | None = None

    @classmethod
    def of_json(cls, spec: FitSpec, stored: Mapping[str, Any], **others: Any) -> Fit:
        """Return a fit from the file of its results, and what that file does not hold."""
        return cls(
            spec=spec,
            scores=stored["scores"],
            best_epoch=stored["best_epoch"],
            num_epochs=stored["epochs"],
            num_parameters=stored["num_parameters"],
            diverged=stored.get("diverged", False),
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values, the same on every run with the same seed on the same machine."""
        return {
            "head": self.spec.name,
            "fold": self.spec.fold,
            "seed": self.spec.seed,
            "best_epoch": self.best_epoch,
            "epochs": self.num_epochs,
            **({} if self.strength is None else {"strength": self.strength}),
            **({"diverged": True} if self.diverged else {}),
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
    on_epoch: OnEpoch | None = None,
    save_backbone: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Fit:
    """Train to the end, resuming what is in the folder; score every part and save the fit.

    Args:
        trainer: Built as it was when the fit was started.
        head: See :func:`save_fit`, as for ``standardizer`` and ``save_backbone``.
        on_epoch: Called after every epoch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    seconds = train_resumably(trainer, folder, plan=spec.plan, on_epoch=on_epoch)
    return save_fit(
        spec,
        Trained.of(trainer),
        folder,
        seconds=seconds,
        head=head,
        standardizer=standardizer,
        save_backbone=save_backbone,
    )


@dataclass(frozen=True)
class Trained:
    """A training that is over, as :func:`save_fit` needs it.

    Args:
        split: Of the fold.
        labels: Of all rows, ``[rows, targets]``.
        scale: Of the targets.
        progress: Its log, and the best of it.
        num_parameters: Of what was trained.
        predict: From label rows to outputs in the units of the labels, ``[rows, out_dim]``.
    """

    task: Task
    split: Split
    labels: np.ndarray
    scale: TargetScale
    progress: Progress
    num_parameters: int
    predict: Callable[[np.ndarray], np.ndarray]

    @classmethod
    def of(cls, trainer: Trainer) -> Trained:
        """Return the training of a trainer."""
        return cls(
            trainer.task,
            trainer.split,
            trainer.source.labels,
            trainer.scale,
            trainer.progress,
            trainer.num_parameters,
            trainer.predict,
        )


def save_fit(
    spec: FitSpec,
    trained: Trained,
    folder: Path,
    *,
    seconds: float,
    head: nn.Module | None,
    standardizer: nn.Module | None = None,
    strength: float | None = None,
    save_backbone: Callable[[Path], Mapping[str, Any]] | None = None,
) -> Fit:
    """Score every part of the split, and save the fit as done.

    Args:
        seconds: Of an epoch.
        head: The part of the network that is the head; None for a model's own readout.
        standardizer: What brings the layers to one scale before the head.
        strength: Of the penalty, if the head was solved.
        save_backbone: Writes the backbone, with the weights of the best epoch, into the folder
            and returns what changed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task, split, labels = trained.task, trained.split, trained.labels
    parts = {part: rows for part, rows in zip(PARTS, split.parts, strict=True) if len(rows)}
    outputs = {part: trained.predict(rows) for part, rows in parts.items()}
    for part, values in outputs.items():
        if not np.isfinite(values).all():
            raise ConfigError(
                f"{spec.label}: found outputs that are not finite on the {part} part, expected "
                "numbers; look at the activations with histograph verify, or lower --lr"
            )
    none = np.empty((0, task.out_dim))
    fit = Fit(
        spec=spec,
        scores={part: task.scores(outputs[part], labels[rows]) for part, rows in parts.items()},
        best_epoch=trained.progress.best_epoch,
        num_epochs=trained.progress.epoch,
        num_parameters=trained.num_parameters,
        seconds_per_epoch=seconds,
        test_rows=split.test,
        test_outputs=outputs.get("test", none),
        valid_rows=split.valid,
        valid_outputs=outputs.get("valid", none),
        log=trained.progress.log,
        strength=strength,
        diverged=trained.progress.diverged,
        backbone=None if save_backbone is None else save_backbone(folder),
    )
    if head is not None:
        tensors: dict[str, Tensor] = {}
        for name, module in (("head", head), ("standardizer", standardizer)):
            stored = {} if module is None else module.state_dict()
            tensors |= {f"{name}.{key}": value for key, value in stored.items()}
        save_tensors(folder / HEAD_NAME, tensors)
    arrays = {
        "rows": fit.test_rows,
        "outputs": fit.test_outputs,
        "valid_rows": fit.valid_rows,
        "valid_outputs": fit.valid_outputs,
    }
    save_arrays(folder / OUTPUTS_NAME, arrays)
    record = HeadRecord(
        fold=spec.fold,
        seed=spec.seed,
        config={} if head is None else head_config(spec.head, head),
        source="" if head is None else head_info(spec.head).source,
        standardize=isinstance(standardizer, Standardizer),
        layer_norm=isinstance(standardizer, EachLayerNorm),
        target_scale=Scale(mean=trained.scale.mean, deviation=trained.scale.deviation),
    )
    write_json(
        folder / FIT_NAME,
        {
            **fit.to_json(),
            **asdict(record),
            "num_parameters": fit.num_parameters,
            "seconds_per_epoch": fit.seconds_per_epoch,
            "log": list(fit.log),
            **seal(folder, FIT_FILES, spec.plan),
        },
    )
    (folder / STATE_NAME).unlink(missing_ok=True)
    return fit


def find_fit(spec: FitSpec, folder: Path) -> Fit | None:
    """Return the fit in that folder if it is done, else None.

    Raises:
        BrokenFitError: for one that is another run's, or has been changed.
    """
    if not (folder / FIT_NAME).exists():
        return None
    try:
        stored = read_fit(folder)
    except ConfigError as error:
        raise BrokenFitError(str(error)) from None
    check_seal(folder, stored, spec.plan)
    found = tuple(stored[name] for name in ("head", "fold", "seed"))
    if found != (spec.name, spec.fold, spec.seed):
        raise BrokenFitError(f"{folder}: found the fit {found}, expected {spec.label}")
    (folder / STATE_NAME).unlink(missing_ok=True)  # of a run killed just before its fit was done
    return load_fit(spec, folder)


def read_fit(folder: Path) -> dict[str, Any]:
    """Read ``fit.json`` of a finished fit, its types checked."""
    stored = read_json(folder, FIT_NAME)
    check_fit(stored, str(folder / FIT_NAME))
    return {"layer_norm": False, "source": "", **stored}


def read_outputs(folder: Path) -> dict[str, np.ndarray]:
    """Read what a finished fit said: ``rows``, ``[rows]``, and ``outputs``, ``[rows, width]``."""
    arrays = load_arrays(folder / OUTPUTS_NAME, "the outputs of a fit")
    rows, outputs = (arrays.get(name, np.empty(())) for name in ("rows", "outputs"))
    if rows.ndim != 1 or outputs.ndim != 2 or len(rows) != len(outputs):
        raise ConfigError(f"{folder / OUTPUTS_NAME}: found no output per row, expected one")
    return arrays


def load_fit(spec: FitSpec, folder: Path) -> Fit:
    """Read a finished fit back."""
    stored = read_fit(folder)
    require_sealed(folder, stored)
    arrays = read_outputs(folder)
    return Fit.of_json(
        spec,
        stored,
        seconds_per_epoch=stored["seconds_per_epoch"],
        test_rows=arrays["rows"],
        test_outputs=arrays["outputs"],
        valid_rows=arrays.get("valid_rows", _no_rows()),
        valid_outputs=arrays.get("valid_outputs", arrays["outputs"][:0]),
        log=stored["log"],
        strength=stored.get("strength"),
        backbone=stored.get("backbone"),
    )


# --- the fits of a readout that predict together


@dataclass(frozen=True)
class FoldOutputs:
    """The outputs of the fits of one fold for the rows of a part."""

    fold: int
    #: Label rows of the part, ``[rows]``.
    rows: np.ndarray
    #: Outputs of every fit, in the units of the labels: ``[fits, rows, out_dim]``.
    each: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """The mean over the fits: ``[rows, out_dim]``."""
        return self.each.mean(axis=0)


def outputs_by_fold(fits: Sequence[Fit], part: str = "test") -> list[FoldOutputs]:
    """Return the outputs of the seeds of each fold for a part, ``test`` or ``valid``."""
    found = []
    for fold in dict.fromkeys(fit.spec.fold for fit in fits):
        parts = [
            (getattr(fit, f"{part}_rows"), getattr(fit, f"{part}_outputs"))
            for fit in fits
            if fit.spec.fold == fold
        ]
        rows = parts[0][0]
        # A fit of an earlier version lacks the validation part.
        each = [outputs for own_rows, outputs in parts if np.array_equal(own_rows, rows)]
        if len(rows):
            found.append(FoldOutputs(fold, rows, np.stack(each)))
    return found


def members_with(best: Fit, fits: Sequence[Fit], weights_of: Callable[[Fit], str]) -> list[Fit]:
    """Return the fits that predict together with the best one, those of a fold together.

    They are the fits of its readout on exactly its backbone, by the hash of its weights: others
    would need another backbone to run as well.
    """
    own = weights_of(best)
    members = [fit for fit in named(fits, best.spec.name) if weights_of(fit) == own]
    members.sort(key=lambda fit: fit is not best)
    return sorted(distinct(members), key=lambda fit: (fit.spec.fold, fit.spec.seed))


def distinct(fits: Sequence[Fit]) -> list[Fit]:
    """Return distinct fits of one readout: a solution does not depend on the seed."""
    solved = {fit.spec.fold: fit for fit in reversed(fits)}
    return [fit for fit in fits if fit.strength is None or solved[fit.spec.fold] is fit]


def named(fits: Sequence[Fit], name: str) -> list[Fit]:
    """Return the fits of that name."""
    return [fit for fit in fits if fit.spec.name == name]
