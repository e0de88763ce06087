"""A stage of training: what is fitted over folds and seeds, and the run folder that it makes.

The stages (a head on a cache, a backbone with its head, both from random weights) define what is
fitted and how; everything that makes their results comparable is here.
"""

from __future__ import annotations

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..errors import OutputInUseError
from ..metrics import Key
from ..runs.fits import Fit, FitSpec, find_fit, members_with, named
from ..runs.folder import BrokenFitError, finish_run, open_run_folder
from ..runs.predictions import LabelRows
from ..runs.run import METRICS_NAME, RESULTS_NAME, SPLITS_NAME, Run
from ..splits import Splits
from ..tasks import Task, label_summary
from ..training.loop import OnEpoch
from ..training.ranks import Ranks
from ..utils.decoding import json_sha256
from ..utils.files import write_text
from ..utils.machine import resolve_device
from ..utils.outputs import OutputFolder, OutputLock
from ..utils.text import plural
from .options import ExperimentOptions, FitProgress
from .parallel import FitRunner, follow_first
from .results import (
    Averages,
    best_by_validation,
    choose_fit,
    results,
    temperature_of,
    write_chosen_head,
    write_predictions,
)
from .workers import FitJob, Watcher


@dataclass(frozen=True)
class Stage(ABC):
    """What a stage of training brings to a run.

    It is pickled for the processes that do its fits, with which large arrays are shared instead.
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
        """Return every fit, a fold at a time, so that early results compare all readouts."""

    @abstractmethod
    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Do one fit, or resume it; the folder is the run's."""

    def place(self, spec: FitSpec) -> Path:
        """Return the folder of a fit inside the run's."""
        return spec.folder

    def find(self, spec: FitSpec, folder: Path) -> Fit | None:
        """Return a fit if it is done; the folder is the run's.

        Raises:
            BrokenFitError: for one that has been changed, or is another run's.
        """
        return find_fit(spec, folder / self.place(spec))

    def fits_at_once(self) -> int:
        """Return how many fits fit into memory at the same time."""
        return sys.maxsize

    def folds_at_once(self) -> int:
        """Return from how many folds fits may run at the same time."""
        return sys.maxsize

    def share(self, spec: FitSpec) -> Any:
        """Return what a fit in another process reads; its memory is shared, not copied."""
        return None

    def using(self, spec: FitSpec, shared: Any) -> AbstractContextManager[None]:
        """Use what another process shares for a fit, from :meth:`share`."""
        return nullcontext()

    @abstractmethod
    def label_rows(self) -> LabelRows:
        """Return the names of the rows that are predicted, and their labels."""

    @abstractmethod
    def write(self, folder: Path, fits: Sequence[Fit], chosen: str | None) -> dict[str, Any]:
        """Write what the run is made of, once all fits are done; return its results."""

    @property
    def num_planned(self) -> int:
        """The number of fits of the result; some may be left to other calls."""
        return len(self.fits())

    def check(self, device: torch.device) -> None:
        """Refuse a device that cannot do what is asked for."""
        return None

    def notes(self) -> list[str]:
        """Return what the user should know: targets and parts of splits that cannot be scored."""
        rows = self.label_rows()
        notes = label_summary(self.task, rows.labels, rows.target_names)
        for part, meaning in (
            ("valid", "the last epoch of a fit is its best"),
            ("test", "nothing is known of new rows"),
        ):
            empty = sum(not len(getattr(fold, part)) for fold in self.splits.folds)
            if empty:
                notes.append(f"{plural(empty, 'fold')} without a {part} part: {meaning}")
        return notes


@dataclass(frozen=True)
class ReadoutStage(Stage):
    """A stage whose fits are readouts that are compared.

    The run predicts with the best fit, by validation, and all others that share its backbone.
    """

    #: Whether probabilities are calibrated on the validation part.
    calibrate: bool = field(default=True, kw_only=True)

    def own_scores(self, fits: Sequence[Fit], labels: np.ndarray) -> dict[Key, float]:
        """Return the test score of the backbone's own readout, for every fold and seed."""
        found: dict[Key, float] = {}
        for fold, outputs in self.own_outputs(fits).items():
            score = self.task.score(outputs, labels[self.splits.folds[fold].test])
            if score == score:
                found |= {(fold, seed): score for seed in self.seeds}
        return found

    @abstractmethod
    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return the outputs of the backbone's own readout for the test rows of each fold."""

    @abstractmethod
    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return the entry ``backbone`` of ``head.json``, for a fit of the run in that folder."""

    def weights_of(self, fit: Fit) -> str:
        """Return the hash of the backbone that a fit was trained with."""
        assert fit.backbone is not None  # of a fit that trained one
        return str(fit.backbone["weights_sha256"])

    def earlier_fits(self) -> list[Fit]:
        """Return fits of another run that the results are compared with."""
        return []

    def keeps(self, fit: Fit) -> bool:
        """Whether a fit can be loaded from the run by its name, besides the chosen ones."""
        return False

    def finish(self, folder: Path, averages: Averages, chosen: str) -> dict[str, Any]:
        """Write the other files of the stage; return what it adds to the results."""
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
        temperatures = dict.fromkeys((fit.spec.name for fit in kept), 1.0)
        if self.calibrate:
            for name in temperatures:
                temperatures[name] = temperature_of(
                    task, named(kept, name), label_rows.labels, self.weights_of
                )
        temperature, targets = temperatures[chosen], label_rows.target_names
        backbone = self.backbone(best, folder)
        write_chosen_head(folder, best, members, task, targets, backbone, temperature)
        write_predictions(folder, fits, chosen, task, label_rows, temperature)
        added = self.finish(folder, averages, chosen)
        own, own_scores = self.weights_of(best), self.own_scores(fits, label_rows.labels)
        return {
            **results(task, fits, chosen, own_scores, averages, temperatures),
            "members": len(members),
            "left_out": sum(self.weights_of(fit) != own for fit in named(fits, chosen)),
            "calibration": averages.calibration(chosen, temperature),
            **added,
        }


def _write_metrics(folder: Path, fits: Sequence[Fit]) -> None:
    lines = [
        json.dumps({"head": fit.spec.name, "fold": fit.spec.fold, "seed": fit.spec.seed, **entry})
        for fit in fits
        for entry in fit.log
    ]
    write_text(folder / METRICS_NAME, "\n".join(lines) + "\n")


def run_experiment(
    stage: Stage,
    out: str | Path,
    *,
    chosen: str | None,
    options: ExperimentOptions,
    first: Callable[[Path], Stage] | None = None,
) -> Run:
    """Train every readout on every fold with every seed; resume what a killed run left.

    Args:
        out: The run folder.
        chosen: The readout whose fits the run predicts with; None for the best by validation.
        options: Where the fits run and how many at once; the rest is part of the stage.
        first: Does what decides which fits these are, in the run's folder, and returns the stage
            that has them: a search tries its options there.
    """
    options.start(stage)
    if options.backend == "loky":
        stage.check(resolve_device(options.device))
    ranks = Ranks.start(resolve_device(options.device)) if stage.trains_backbone else None
    if ranks is not None and not ranks.is_first:
        follow_first(stage, ranks, resolve_device(options.device))
        return Run(Path(out))
    shared = options.fits is not None or len(stage.fits()) < stage.num_planned
    with open_run_folder(
        out, stage.plan(), config=options.config, overwrite=options.overwrite, shared=shared
    ) as output:
        decided = stage if first is None else first(output.folder)
        run = _finish(decided, output, chosen=chosen, options=options, shared=shared)
    if ranks is not None:
        ranks.from_first()  # None: there are no more fits
    return run


def _finish(
    stage: Stage,
    output: OutputFolder,
    *,
    chosen: str | None,
    options: ExperimentOptions,
    shared: bool,
) -> Run:
    """Do what is left of a run, in its folder; the arguments are those of :func:`run_experiment`.

    Args:
        shared: Whether other calls may do fits of it at the same time.
    """
    folder, plan = output.folder, json_sha256(stage.plan(), "run")
    stage.splits.save(folder / SPLITS_NAME)
    planned = [replace(spec, plan=plan) for spec in stage.fits()]
    number, count = options.fits or (0, 1)
    mine = planned[number::count]
    with ExitStack() as stack:
        on_epoch = stack.enter_context(options.watching())
        locks = stack.enter_context(ExitStack()) if shared else None
        watched = _Watched(stage, mine, replace(options, on_epoch=on_epoch), locks)
        planned_fits, expected = stage.num_planned, len(mine)
        runner = FitRunner(stage, watched, planned=planned_fits, options=options, expected=expected)
        stack.enter_context(runner).run([FitJob(spec, folder) for spec in mine])
    for spec in planned:
        if spec.folder not in watched.fits:
            with suppress(BrokenFitError):  # fitted again by the job whose share it is
                found = stage.find(spec, folder)
                if found is not None:
                    watched.fits[spec.folder] = found
    left = len(planned) - len(watched.fits)
    if left:
        options.note(
            f"{plural(left, 'fit')} of {len(planned)} left to other jobs; the one that finds all "
            "fits done, or the same command without --fits, writes the results"
        )
        return Run(output.target)
    if options.fits is not None:
        output.alone()  # wait for other jobs, which have no fits left
    fits = [watched.fits[spec.folder] for spec in planned]
    with OutputLock(folder / RESULTS_NAME, wait=True):  # of whoever does another part of it
        finish_run(folder, stage.write(folder, fits, chosen))
    output.finish()
    return Run.open(output.target)


class _Watched(Watcher):
    """The fits of an experiment that are done or running, and the callbacks that report them.

    Args:
        locks: Holds the locks of fits, if other processes may do the same ones.
    """

    def __init__(
        self,
        stage: Stage,
        planned: list[FitSpec],
        options: ExperimentOptions,
        locks: ExitStack | None,
    ) -> None:
        self._stage, self._options, self._locks = stage, options, locks
        self._planned, self._total = planned, len(planned)
        self._shares: dict[Path, float] = {}
        self._locked: dict[Path, OutputLock] = {}
        #: Those that are done, by their folder.
        self.fits: dict[Path, Fit] = {}

    def begin(self, job: FitJob) -> bool:
        """Lock a fit; whether to do it, and not another process that has it or has done it."""
        place = job.spec.folder
        if self._locks is None or place in self._locked:
            return True
        lock = OutputLock(job.folder / self._stage.place(job.spec))
        try:
            self._locks.enter_context(lock)
        except OutputInUseError:
            if self._options.fits is not None:
                return False
            raise
        self._locked[place] = lock
        with suppress(BrokenFitError):
            found = self._stage.find(job.spec, job.folder)
            if found is not None:
                self.done(job, found)
                return False
        return True

    def epoch_done(
        self, job: FitJob, share_done: float, log: Sequence[Mapping[str, float]]
    ) -> None:
        """Report an epoch."""
        spec = job.spec
        self._shares[spec.folder] = share_done
        if self._options.on_epoch is not None:
            place = (spec.name, spec.fold, spec.seed, sum(self._shares.values()), self._total)
            self._options.on_epoch(FitProgress(*place, share_done, self._left(), log[-1]))

    def _left(self) -> dict[str, float]:
        left: dict[str, float] = {}
        for spec in self._planned:
            left[spec.name] = left.get(spec.name, 0.0) + 1 - self._shares.get(spec.folder, 0.0)
        return left

    def done(self, job: FitJob, fit: Fit) -> None:
        """Record and report a fit that is done."""
        place = job.spec.folder
        if place in self._locked:
            self._locked[place].__exit__()
        self._shares[place] = 1.0
        self.fits[place] = fit
        if self._options.on_fit is not None:
            self._options.on_fit(fit, len(self.fits), self._total)

    def broken(self, job: FitJob, reason: str) -> None:
        self._options.note(f"{reason}; fitted again")
