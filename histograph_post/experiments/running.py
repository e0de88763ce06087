"""Running an experiment: its fits, done or gone on with, and the folder that they make."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ..errors import OutputInUseError
from ..runs.fits import Fit, FitSpec
from ..runs.folder import BrokenFitError, finish_run, open_run_folder
from ..runs.run import RESULTS_NAME, SPLITS_NAME, Run
from ..training.ranks import Ranks
from ..utils.decoding import json_sha256
from ..utils.machine import resolve_device
from ..utils.outputs import OutputFolder, OutputLock
from ..utils.text import plural
from .options import ExperimentOptions, FitProgress
from .parallel import FitRunner, follow_first
from .stage import Stage
from .workers import FitJob


def run_experiment(
    stage: Stage, out: str | Path, *, chosen: str | None, options: ExperimentOptions
) -> Run:
    """Train every readout on every fold with every seed; go on with what a killed run left.

    Args:
        stage: What there is to fit, planned.
        out: The run folder.
        chosen: The fits whose best (by validation) becomes the run's head; None for those of the
            readout that is best by validation.
        options: Where and how many at once; what was planned before this says the rest.
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
        run = finish_experiment(stage, output, chosen=chosen, options=options, shared=shared)
    if ranks is not None:
        ranks.from_first()  # nothing: there are no more fits
    return run


def finish_experiment(
    stage: Stage,
    output: OutputFolder,
    *,
    chosen: str | None,
    options: ExperimentOptions,
    shared: bool = False,
) -> Run:
    """Do what is left of a run, in its folder.

    Args:
        stage: As in :func:`run_experiment`, like the rest.
        output: The folder.
        chosen: What the run predicts with.
        options: Where, how many at once, and which share of the fits.
        shared: Whether other calls may do fits of it at the same time.
    """
    folder, plan = output.folder, json_sha256(stage.plan(), "run")
    stage.splits.save(folder / SPLITS_NAME)
    planned = [replace(spec, plan=plan) for spec in stage.fits()]
    number, count = options.fits or (0, 1)
    mine = planned[number::count]
    with ExitStack() as stack:
        on_epoch = stack.enter_context(options.watching())
        watched = _Watched(stage, len(mine), replace(options, on_epoch=on_epoch))
        runner = FitRunner(stage, planned=stage.num_planned, options=options, expected=len(mine))
        locks = stack.enter_context(ExitStack()) if shared else None
        stack.enter_context(runner)
        runner.run([_WatchedJob(spec, folder, watched, locks) for spec in mine])
    left = watched.look_for(planned, folder)
    if left:
        options.note(
            f"{plural(left, 'fit')} of {len(planned)} left to other jobs; the one that finds all "
            "fits done, or the same command without --fits, writes the results"
        )
        return Run(output.target)
    if options.fits is not None:
        output.alone()  # others have nothing left to do but this
    fits = [watched.fits[spec.folder] for spec in planned]
    with OutputLock(folder / RESULTS_NAME, wait=True):  # of whoever does another part of it
        finish_run(folder, stage.write(folder, fits, chosen))
    output.finish()
    return Run.open(output.target)


class _Watched:
    """The fits of an experiment, done and under way, in whatever order they come.

    Args:
        stage: What is trained.
        total: Fits in all.
        options: Say who is told.
    """

    def __init__(self, stage: Stage, total: int, options: ExperimentOptions) -> None:
        self.stage, self.skips = stage, options.fits is not None
        self._total, self.note = total, options.note
        self._on_epoch, self._on_fit = options.on_epoch, options.on_fit
        self._shares: dict[Path, float] = {}
        #: Those that are done, by their folder.
        self.fits: dict[Path, Fit] = {}

    def epoch_done(self, spec: FitSpec, share_done: float, measured: Mapping[str, float]) -> None:
        """Take note of an epoch."""
        self._shares[spec.folder] = share_done
        if self._on_epoch is not None:
            place = (spec.name, spec.fold, spec.seed, sum(self._shares.values()), self._total)
            self._on_epoch(FitProgress(*place, share_done, measured))

    def done(self, fit: Fit) -> None:
        """Take note of a fit that is done."""
        self._shares[fit.spec.folder] = 1.0
        self.fits[fit.spec.folder] = fit
        if self._on_fit is not None:
            self._on_fit(fit, len(self.fits), self._total)

    def look_for(self, planned: Sequence[FitSpec], folder: Path) -> int:
        """Read the fits that other jobs have done; return how many are left."""
        left = 0
        for spec in planned:
            if spec.folder not in self.fits:
                try:
                    found = self.stage.find(spec, folder)
                except BrokenFitError:  # the job whose share it is does it again
                    found = None
                if found is None:
                    left += 1
                else:
                    self.fits[spec.folder] = found
        return left


class _WatchedJob(FitJob):
    """A fit of an experiment that is to be done.

    Args:
        spec: What is fitted.
        folder: The run.
        watched: Told what becomes of it.
        locks: Where its lock is kept, if other processes may do the same fit.
    """

    def __init__(
        self, spec: FitSpec, folder: Path, watched: _Watched, locks: ExitStack | None
    ) -> None:
        super().__init__(spec, folder)
        self._watched, self._locks = watched, locks
        self._lock: OutputLock | None = None

    def begin(self) -> bool:
        """Be its only writer; one that another process is at, or has done meanwhile, is left."""
        if self._locks is None or self._lock is not None:
            return True
        stage = self._watched.stage
        lock = OutputLock(self.folder / stage.place(self.spec))
        try:
            self._locks.enter_context(lock)
        except OutputInUseError:
            if self._watched.skips:
                return False
            raise
        self._lock = lock
        with contextlib.suppress(BrokenFitError):
            found = stage.find(self.spec, self.folder)
            if found is not None:
                self.done(found)
                return False
        return True

    def epoch_done(self, share_done: float, log: Sequence[Mapping[str, float]]) -> None:
        """Take note of an epoch."""
        self._watched.epoch_done(self.spec, share_done, log[-1])

    def done(self, fit: Fit) -> None:
        """Take note of the result."""
        if self._lock is not None:
            self._lock.__exit__()
        self._watched.done(fit)

    def broken(self, reason: str) -> None:
        """Tell that what is there cannot be used."""
        self._watched.note(f"{reason}; fitted again")
