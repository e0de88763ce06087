"""A run of training, whatever the stage: fits over folds and seeds, and the folder they make.

The stages (a head on a cache, a backbone with its head, both from random weights) say what is
fitted and how; everything that makes their results comparable is here.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..metrics import Key
from ..runs.fits import Fit, FitSpec, find_fit
from ..runs.predictions import LabelRows
from ..runs.run import METRICS_NAME
from ..splits import Splits
from ..tasks import Task, label_summary
from ..training.loop import OnEpoch
from ..utils.files import write_text
from ..utils.text import plural
from .averaging import Averages, members_with, temperature_of
from .results import (
    best_by_validation,
    choose_fit,
    named,
    results,
    write_chosen_head,
    write_predictions,
)


@dataclass(frozen=True)
class Stage(ABC):
    """What a stage of training brings to a run.

    It is pickled for other processes, which do its fits: what they need large memory for is lent.
    """

    #: Whether a model of the user's runs, whose batches may be large.
    trains_backbone: ClassVar[bool] = False

    splits: Splits
    task: Task
    seeds: tuple[int, ...]

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""

    @abstractmethod
    def fits(self) -> list[FitSpec]:
        """Return every fit, a fold at a time: what is known early is known of all readouts."""

    @abstractmethod
    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Do one fit, or go on with it; the folder is the run's."""

    def place(self, spec: FitSpec) -> Path:
        """Return the folder of a fit inside the run's."""
        return spec.folder

    def find(self, spec: FitSpec, folder: Path) -> Fit | None:
        """Return a fit that is done; the folder is the run's.

        Raises:
            BrokenFitError: for one that has been changed, or is another run's.
        """
        return find_fit(spec, folder / self.place(spec))

    def fits_at_once(self) -> int:
        """Return how many fits there is memory for at the same time."""
        return sys.maxsize

    def folds_at_once(self) -> int:
        """Return of how many folds there can be fits at the same time."""
        return sys.maxsize

    def lend(self, spec: FitSpec) -> Any:
        """Return what a fit in another process reads, with memory that is shared, not copied."""
        return None

    @contextmanager
    def borrowing(self, spec: FitSpec, lent: Any) -> Iterator[None]:
        """Use what another process has lent for a fit."""
        yield

    @abstractmethod
    def label_rows(self) -> LabelRows:
        """Return what the predictions of the run are called, and the labels beside them."""

    @abstractmethod
    def write(self, folder: Path, fits: Sequence[Fit], chosen: str | None) -> dict[str, Any]:
        """Write what the run is made of, once all fits are done; return its results."""

    @property
    def num_planned(self) -> int:
        """The number of fits that the result is made of; some may be left to other calls."""
        return len(self.fits())

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot do what is asked for."""
        return None

    def notes(self) -> list[str]:
        """Return what the user should know: targets and parts of splits that cannot be scored."""
        rows = self.label_rows()
        said = label_summary(self.task, rows.labels, rows.target_names)
        for part, meaning in (
            ("valid", "the last epoch of a fit is its best"),
            ("test", "nothing is known of new rows"),
        ):
            empty = sum(not len(getattr(fold, part)) for fold in self.splits.folds)
            if empty:
                said.append(f"{plural(empty, 'fold')} without a {part} part: {meaning}")
        return said


@dataclass(frozen=True)
class ReadoutStage(Stage):
    """A stage whose fits are readouts, to be read beside each other.

    The run predicts with the best one, by validation, and all that share its backbone.
    """

    #: Whether probabilities are calibrated on the validation part.
    calibrate: bool = field(default=True, kw_only=True)

    @abstractmethod
    def own_scores(self, fits: Sequence[Fit]) -> dict[Key, float]:
        """Return the test score of the backbone's own readout, for every fold and seed."""

    @abstractmethod
    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return the outputs of the backbone's own readout for the test rows of each fold."""

    @abstractmethod
    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return what ``head.json`` of the run in that folder says of a fit's backbone."""

    def weights_of(self, fit: Fit) -> str:
        """Return the hash of the backbone that a fit reads: the one it was trained with."""
        assert fit.backbone is not None  # of a fit that trained one
        return str(fit.backbone["weights_sha256"])

    def earlier_fits(self) -> list[Fit]:
        """Return fits of another run that the results are to be read beside."""
        return []

    def keeps(self, fit: Fit) -> bool:
        """Whether a fit can be loaded from the run by its name, besides those that were chosen."""
        return False

    def finish(self, folder: Path, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
        """Write what else the stage leaves behind; return what it adds to the results."""
        return {}

    def write(self, folder: Path, fits: Sequence[Fit], chosen: str | None) -> dict[str, Any]:
        """Write metrics, the chosen head and its predictions; return scores and differences."""
        task, label_rows = self.task, self.label_rows()
        fits = [*self.earlier_fits(), *fits]
        _write_metrics(folder, fits)
        averages = Averages(task, label_rows.labels, fits, self.own_outputs(fits))
        chosen = chosen or best_by_validation(task, averages, fits)
        best = choose_fit(fits, chosen, task)
        members = members_with(best, fits, self.weights_of)
        kept = [fit for fit in fits if fit.spec.name == chosen or self.keeps(fit)]
        temperatures = {
            name: temperature_of(task, named(kept, name), label_rows, self.weights_of)
            if self.calibrate
            else 1.0
            for name in dict.fromkeys(fit.spec.name for fit in kept)
        }
        temperature = temperatures[chosen]
        backbone, targets = self.backbone(best, folder), label_rows.target_names
        given = {"temperature": temperature}
        write_chosen_head(folder, best, members, task, targets, backbone, **given)
        write_predictions(folder, fits, chosen, task, label_rows, **given)
        added = self.finish(folder, fits, chosen)
        found = results(task, fits, chosen, self.own_scores(fits), averages, temperatures)
        calibration = averages.calibration(chosen, temperature)
        own = self.weights_of(best)
        return {
            **found,
            "members": len(members),
            "left_out": sum(self.weights_of(fit) != own for fit in named(fits, chosen)),
            "calibration": calibration,
            **added,
        }


def _write_metrics(folder: Path, fits: Sequence[Fit]) -> None:
    lines = [
        json.dumps({"head": fit.spec.name, "fold": fit.spec.fold, "seed": fit.spec.seed, **entry})
        for fit in fits
        for entry in fit.log
    ]
    write_text(folder / METRICS_NAME, "\n".join(lines) + "\n")
