"""Fits side by side, each with its share of the cores as threads.

How many fits run at once (``--jobs``) changes the time they take and nothing else. A fit is one
network in a folder of its own, seeded by itself, and how many threads it has, on which the last
bits of a sum depend, follows from the plan and the machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from joblib import cpu_count

from ..errors import ConfigError
from ..runs.folder import BrokenFitError
from ..training.loop import Trainer
from ..training.ranks import Ranks, current_ranks
from ..utils.machine import resolve_device
from .cluster import run_on_cluster
from .options import ExperimentOptions
from .workers import CannotSendError, FitJob, StopTraining, Worker, limited_threads, pickle_stage

if TYPE_CHECKING:
    from .stage import Stage

#: Seconds until a process has loaded PyTorch and can train. Unless ``--jobs`` says otherwise, fits
#: begin in this process and go on in others once that is known to save more time than it takes.
START_SECONDS = 6.0

#: Seconds of training that say how long the rest will take.
MEASURED_SECONDS = 1.0


def available_cores() -> int:
    """Return the cores for all fits together: what PyTorch would take, within the machine's limits.

    So ``OMP_NUM_THREADS`` limits them, as it does the threads of one process.
    """
    return max(1, min(torch.get_num_threads(), cpu_count()))


def threads_per_fit(planned: int) -> int:
    """Return the threads of each fit, of so many that are planned."""
    cores = available_cores()
    return cores // max(1, min(cores, planned))


class FitRunner:
    """Does the fits of a stage, in this process or several at once in others.

    Args:
        stage: What is trained.
        planned: Fits that the result is made of, done or not; gives the threads of each.
        options: Where to train, and how many at once or on which cluster.
        expected: Fits that will be asked for, if that is known to be another number.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        planned: int,
        options: ExperimentOptions,
        expected: int | None = None,
    ) -> None:
        self._stage, self._options = stage, options
        self._device = device = resolve_device(options.device)
        self._ranks = current_ranks()
        # Processes that train together do so in one fit after the other.
        self._asked = jobs = options.jobs if self._ranks is None else 1
        if jobs is None:
            jobs = min(available_cores(), stage.fits_at_once()) if device.type == "cpu" else 1
        self._jobs = min(jobs, planned)
        self._threads = threads_per_fit(planned)
        self._workers: list[Worker] = []
        self._clock = _Clock(planned if expected is None else expected, self._jobs)

    def __enter__(self) -> FitRunner:
        # What this process makes ready for others must not depend on where a fit runs, either.
        self._limited = limited_threads(self._threads)
        self._limited.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self._limited.__exit__(None, None, None)

    def run(self, jobs: Sequence[FitJob]) -> None:
        """Do these fits and come back when all are over; those that are done are just told."""
        left = []
        for job in jobs:
            found = None
            try:
                found = self._stage.find(job.spec, job.folder)
            except BrokenFitError as error:
                job.broken(str(error))
            if found is not None:
                job.done(found)
                self._clock.total -= 1
            else:
                left.append(job)
        if self._options.backend != "loky":
            run_on_cluster(self._stage, left, self._threads, self._options)
            return
        if self._asked is None and self._jobs > 1 and not self._workers:
            left = self._begin_here(left)
        if self._workers or min(self._jobs, len(left)) > 1:
            left = self._run_in_workers(left)
        for job in left:
            self._run_here(job)

    # --- in this process ---------------------------------------------------------------------

    def _begin_here(self, jobs: Sequence[FitJob]) -> list[FitJob]:
        """Do fits until it pays to start processes; return those that are left."""
        for done, job in enumerate(jobs):
            try:
                self._run_here(job, self._clock)
            except StopTraining:
                return list(jobs[done:])  # this one goes on with what is saved of it
        return []

    def _run_here(self, job: FitJob, clock: _Clock | None = None) -> None:
        told = 0

        def epoch_done(trainer: Trainer) -> None:
            nonlocal told
            log = trainer.progress.log
            job.epoch_done(trainer.share_done, log[told:])
            told = len(log)
            if not job.wanted or (clock is not None and clock.stops(job, trainer.share_done)):
                raise StopTraining

        if not job.begin():
            return
        if self._ranks is not None:
            self._ranks.from_first(job.spec)
        try:
            fit = self._stage.fit(job.spec, job.folder, device=self._device, on_epoch=epoch_done)
        except StopTraining:
            if job.wanted:
                raise
        except Exception as error:
            job.failed(error)
        else:
            job.done(fit)

    # --- in others ---------------------------------------------------------------------------

    def _run_in_workers(self, jobs: Sequence[FitJob]) -> list[FitJob]:
        """Do fits side by side; return all of them if this process has to do them itself."""
        try:
            if not self._workers:
                self._start(min(self._jobs, len(jobs)))
        except CannotSendError as error:
            if self._asked is not None:
                raise ConfigError(
                    f"jobs: found {self._asked}, expected 1 for what cannot be sent to another "
                    f"process ({error})"
                ) from error
            self._close()
            self._jobs = 1
            return list(jobs)
        waiting = list(jobs)
        while True:
            busy = {worker.connection: worker for worker in self._workers if worker.job is not None}
            idle = next((worker for worker in self._workers if worker.job is None), None)
            if waiting and not waiting[0].wanted:
                del waiting[0]
            elif waiting and idle is not None and self._has_memory_for(waiting[0]):
                job = waiting.pop(0)
                if job.begin():
                    self._give(idle, job)
            elif busy:
                for connection in wait(list(busy)):
                    busy[cast(Any, connection)].receive()
                for worker in busy.values():
                    worker.stop_if_unwanted()
            else:
                return []

    def _has_memory_for(self, job: FitJob) -> bool:
        folds = {worker.job.spec.fold for worker in self._workers if worker.job is not None}
        return len(folds | {job.spec.fold}) <= max(1, self._stage.folds_at_once())

    def _give(self, worker: Worker, job: FitJob) -> None:
        try:
            lent = self._stage.lend(job.spec)
        except Exception as error:
            job.failed(error)
        else:
            worker.give(job, lent)

    def _start(self, count: int) -> None:
        pickled = pickle_stage(self._stage)
        for _ in range(count):
            self._workers.append(Worker(self._threads, self._device))
        for worker in self._workers:
            worker.send_stage(pickled)
        for worker in self._workers:
            worker.check_stage()

    def _close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []


def follow_first(stage: Stage, ranks: Ranks, device: torch.device) -> None:
    """Do the fits that the first rank does, until it has none left; it alone keeps the results."""
    while (spec := ranks.from_first()) is not None:
        with TemporaryDirectory() as folder:
            stage.fit(spec, Path(folder), device=device)


class _Clock:
    """Says when fits in this process have taken long enough for others to be worth their start."""

    def __init__(self, total: int, jobs: int) -> None:
        self.total, self._jobs = total, jobs
        self._shares: dict[FitJob, float] = {}
        self._started = time.monotonic()

    def stops(self, job: FitJob, share_done: float) -> bool:
        """Whether the rest, shared out among processes that have to start, would be over sooner."""
        self._shares[job] = share_done
        seconds, done = time.monotonic() - self._started, sum(self._shares.values())
        saved = seconds / done * (self.total - done) * (1 - 1 / self._jobs)
        return seconds > MEASURED_SECONDS and saved > START_SECONDS
