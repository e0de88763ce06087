"""A run of training, whatever the stage: fits over folds and seeds, and the folder they make.

The stages (a head on a cache, a backbone with its head, both from random weights) say what is
fitted and how; everything that makes their results comparable is here.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..metrics import Key
from ..runs.fits import Fit, FitSpec
from ..runs.predictions import LabelRows
from ..runs.run import METRICS_NAME, RUN_NAME, SPLITS_NAME, Run, open_run_folder, write_results
from ..splits import Splits
from ..tasks import Task, label_summary
from ..training.loop import Trainer
from ..utils.devices import resolve_device
from ..utils.files import write_text
from ..utils.text import plural
from .results import choose_fit, results, write_chosen_head, write_predictions
from .trained_folds import remove_folds


@dataclass(frozen=True)
class FitProgress:
    """Where an experiment stands, told after every epoch."""

    #: What is fitted.
    head: str
    fold: int
    seed: int
    #: Fits that are done, one that is not by the share of its epochs; and fits in all.
    done: float
    total: int
    trainer: Trainer


@dataclass(frozen=True)
class Stage(ABC):
    """What a stage of training brings to a run."""

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
        self,
        spec: FitSpec,
        folder: Path,
        *,
        device: torch.device,
        on_epoch: Callable[[Trainer], None] | None = None,
    ) -> Fit:
        """Do one fit, or go on with it, or return it if it is done; the folder is the run's."""

    @abstractmethod
    def own_scores(self, fits: Sequence[Fit]) -> dict[Key, float]:
        """Return the test score of the backbone's own readout, for every fold and seed."""

    @abstractmethod
    def label_rows(self) -> LabelRows:
        """Return what the predictions of the run are called, and the labels beside them."""

    @abstractmethod
    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return what ``head.json`` of the run in that folder says of a fit's backbone."""

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot do what is asked for."""
        return None

    def earlier_fits(self) -> list[Fit]:
        """Return fits of another run that the results are to be read beside."""
        return []

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

    def finish(self, folder: Path, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
        """Write what else the stage leaves behind; return what it adds to the results."""
        return {}


def run_experiment(
    experiment: Stage,
    out: str | Path,
    *,
    chosen: str,
    device: str = "auto",
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    on_epoch: Callable[[FitProgress], None] | None = None,
    on_fit: Callable[[Fit, int, int], None] | None = None,
) -> Run:
    """Train every readout on every fold with every seed; go on with what a killed run left.

    Args:
        experiment: The stage, planned.
        out: The run folder.
        chosen: The fits whose best (by validation) becomes the run's head.
        device: Where to train.
        overwrite: Replace another run in that folder.
        config: The options this came from, saved beside it.
        on_epoch: Told after every epoch.
        on_fit: Told after every fit, with the number done and the number in all.
    """
    folder, where = Path(out), resolve_device(device)
    experiment.check(where)
    if overwrite and (folder / RUN_NAME).is_file():
        remove_folds(folder)
    open_run_folder(folder, experiment.plan(), config=config, overwrite=overwrite)
    experiment.splits.save(folder / SPLITS_NAME)
    planned = experiment.fits()
    fits = experiment.earlier_fits()
    for done, spec in enumerate(planned):

        def epoch_done(trainer: Trainer, spec: FitSpec = spec, before: int = done) -> None:
            if on_epoch is not None:
                reached = before + trainer.share_done
                place = (spec.name, spec.fold, spec.seed, reached, len(planned))
                on_epoch(FitProgress(*place, trainer))

        fits.append(experiment.fit(spec, folder, device=where, on_epoch=epoch_done))
        if on_fit is not None:
            on_fit(fits[-1], done + 1, len(planned))
    task, label_rows = experiment.task, experiment.label_rows()
    _write_metrics(folder, fits)
    best = choose_fit(fits, chosen, task)
    backbone = experiment.backbone(best, folder)
    write_chosen_head(folder, best, task, label_rows.target_names, backbone)
    write_predictions(folder, fits, chosen, task, label_rows)
    added = experiment.finish(folder, fits, chosen)
    write_results(folder, results(task, fits, chosen, experiment.own_scores(fits)) | added)
    return Run.open(folder)


def _write_metrics(folder: Path, fits: Sequence[Fit]) -> None:
    lines = [
        json.dumps({"head": fit.spec.name, "fold": fit.spec.fold, "seed": fit.spec.seed, **entry})
        for fit in fits
        for entry in fit.log
    ]
    write_text(folder / METRICS_NAME, "\n".join(lines) + "\n")
