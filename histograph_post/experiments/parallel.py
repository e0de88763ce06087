"""Fits side by side, each with its share of the cores as threads: here, or on a cluster.

How many fits run at once (``--jobs``) changes the time they take and nothing else. A fit is one
network in a folder of its own, seeded by itself, and how many threads it has, on which the last
bits of a sum depend, follows from the plan and the machine.

On a cluster a fit is a task of Dask or Ray. It opens the cache by its path, does one fit and writes
the fit's own folder; what came out is read from there. So all machines see the same files, at the
same paths. A task whose machine is lost is given to another one, which resumes from what was saved.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from joblib import cpu_count

from ..errors import ConfigError, MissingExtraError, WorkerError
from ..runs.fits import FitSpec
from ..runs.folder import BrokenFitError
from ..training.ranks import Ranks, current_ranks
from ..utils.machine import keep_memory, resolve_device
from ..utils.outputs import OutputLock
from .options import ExperimentOptions
from .workers import (
    CannotSendError,
    FitJob,
    StopTraining,
    Worker,
    limited_threads,
    pickle_stage,
    portable,
    telling_epochs,
    unpickle_stage,
)

if TYPE_CHECKING:
    from .options import ExperimentOptions
    from .stage import Stage

#: Seconds until a process has loaded PyTorch and can train. Unless ``--jobs`` says otherwise, fits
#: begin in this process and continue in others once that is known to save more time than it takes.
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
        planned: Fits that the result is made of, done or not; gives the threads of each.
        expected: Fits that will be asked for.
    """

    def __init__(
        self, stage: Stage, *, planned: int, options: ExperimentOptions, expected: int
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
        self._clock = _Clock(expected, self._jobs)

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
                return list(jobs[done:])  # this one resumes from what is saved of it
        return []

    def _run_here(self, job: FitJob, clock: _Clock | None = None) -> None:
        def stops(share_done: float) -> bool:
            return not job.wanted or (clock is not None and clock.stops(job, share_done))

        if not job.begin():
            return
        if self._ranks is not None:
            self._ranks.from_first(job.spec)
        watch = telling_epochs(job.epoch_done, stops)
        try:
            fit = self._stage.fit(job.spec, job.folder, device=self._device, on_epoch=watch)
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


def run_on_cluster(
    stage: Stage, jobs: Sequence[FitJob], threads: int, options: ExperimentOptions
) -> None:
    """Do fits on a cluster, with so many threads each, and come back when all are over.

    Nothing is known of a fit before it is over: a trial that is worse than most is known to be
    so when it ends, which gives the same results, later.
    """
    if not jobs:
        return
    try:
        pickled = pickle_stage(stage)
    except CannotSendError as error:
        raise ConfigError(
            f"backend: found {options.backend}, expected loky with --jobs 1 for what cannot be "
            f"sent to another process ({error})"
        ) from error
    tasks = [(job.spec, job.folder.resolve(), threads, options.device) for job in jobs]
    done = _ray_tasks if options.backend == "ray" else _dask_tasks
    for number, failure in done(pickled, tasks, options.scheduler):
        job = jobs[number]
        if failure is not None:
            job.failed(failure)
        elif job.wanted:
            found = stage.find(job.spec, job.folder)
            if found is None:
                raise WorkerError(
                    f"{job.folder / stage.place(job.spec)}: found no fit where a machine of the "
                    "cluster wrote one, expected a folder that all of them share"
                )
            job.done(found)


#: A fit as :func:`do_fit` takes it.
_Task = tuple[FitSpec, Path, int, str]

#: The number of a fit that is over, and what went wrong.
_Outcome = tuple[int, Exception | None]


def _dask_tasks(pickled: bytes, tasks: Sequence[_Task], address: str | None) -> Iterator[_Outcome]:
    """Do the tasks on a Dask cluster; yield the number of each when it is over."""
    try:
        from distributed import CancelledError, Client, KilledWorker, as_completed
    except ImportError:
        raise MissingExtraError("--backend dask", extra="cluster") from None
    if address is None:
        raise ConfigError("scheduler: found none, expected an address, such as tcp://host:8786")
    try:
        client = Client(address, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"scheduler: found nobody at {address} ({error}), expected the address that "
            "`dask scheduler` prints"
        ) from None
    with client:
        # The result of a task, not data that are scattered: those are lost with their workers.
        stage = client.submit(bytes, pickled, pure=False)
        futures = {
            client.submit(do_fit, stage, *task, pure=False): number
            for number, task in enumerate(tasks)
        }
        for future in as_completed(list(futures), loop=client.loop):
            try:
                failure = future.result()
            except (KilledWorker, CancelledError):
                failure = _lost(tasks[futures[future]])
            yield futures[future], failure


def _ray_tasks(pickled: bytes, tasks: Sequence[_Task], address: str | None) -> Iterator[_Outcome]:
    """Do the tasks on a Ray cluster; yield the number of each when it is over."""
    try:
        import ray
    except ImportError:
        raise ConfigError("backend: found no Ray; pip install ray") from None
    try:
        ray.init(address=address or "auto", log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise ConfigError(
            f"scheduler: found no Ray cluster at {address or 'auto'} ({error}), expected one that "
            "`ray start` has made"
        ) from None
    try:
        stage, do_there = ray.put(pickled), ray.remote(do_fit)
        waiting = {do_there.remote(stage, *task): number for number, task in enumerate(tasks)}
        while waiting:
            (over, *_), _ = ray.wait(list(waiting))
            number = waiting.pop(over)
            try:
                failure = ray.get(over)
            except ray.exceptions.RayError:
                failure = _lost(tasks[number])
            yield number, failure
    finally:
        ray.shutdown()


def _lost(task: _Task) -> WorkerError:
    return WorkerError(
        f"{task[0].label}: found that one worker after the other ended while at it, expected a "
        "result; they may need more memory"
    )


# --- on a machine of the cluster

#: The stage that this process has last been sent, by its hash.
_stages: dict[str, Any] = {}

#: Fits share the random numbers and the threads of a process: one at a time.
_turn = threading.Lock()


def do_fit(
    pickled: bytes, spec: FitSpec, folder: Path, threads: int, device: str
) -> Exception | None:
    """Do a fit of a pickled stage, on a device as the user names it; return what ended it."""
    try:
        with _turn, limited_threads(threads):
            stage, there = _unpickled(pickled), resolve_device(device)
            stage.check(there)
            # A machine that was taken for lost may still be at it: one writer of a fit.
            with OutputLock(folder / stage.place(spec), wait=True):
                found = None
                with suppress(BrokenFitError):
                    found = stage.find(spec, folder)
                if found is None:
                    stage.fit(spec, folder, device=there)
    except Exception as error:
        return portable(error)
    return None


def _unpickled(pickled: bytes) -> Stage:
    key = hashlib.sha256(pickled).hexdigest()
    if key not in _stages:
        _stages.clear()
        _stages[key] = stage = unpickle_stage(pickled)
        if stage.trains_backbone:
            keep_memory()
    found: Stage = _stages[key]
    return found
