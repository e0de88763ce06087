"""Fits in parallel, each with its share of the cores as threads: on this machine or a cluster.

How many fits run at once (``--jobs``) changes the time they take and nothing else. A fit is one
network in a folder of its own, with a seed of its own, and the number of its threads, on which the
last bits of a sum depend, follows from the plan and the machine.

On a cluster a fit is a task of Dask or Ray. It opens the cache by its path, does one fit and writes
the fit's own folder, from which the result is read. So all machines see the same files, at the
same paths. A task whose machine is lost is given to another one, which resumes from what was saved.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
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
from ..utils.machine import resolve_device
from ..utils.outputs import OutputLock
from .options import ExperimentOptions
from .workers import (
    CannotSendError,
    FitJob,
    StopTraining,
    Watcher,
    Worker,
    epoch_reporter,
    limited_threads,
    pickle_stage,
    portable,
    unpickle_stage,
)

if TYPE_CHECKING:
    from .stage import Stage

#: Seconds until a process has loaded PyTorch and can train. Without ``--jobs``, fits start in this
#: process and continue in others once that is known to save more time than it takes.
START_SECONDS = 6.0

#: Seconds of training from which the rest is estimated.
MEASURED_SECONDS = 1.0


def available_cores() -> int:
    """Return the cores for all fits together: what PyTorch would take, within the machine's limits.

    So ``OMP_NUM_THREADS`` limits them, as it does the threads of one process.
    """
    return max(1, min(torch.get_num_threads(), cpu_count()))


def threads_per_fit(planned: int) -> int:
    """Return the threads of each of the planned fits."""
    cores = available_cores()
    return cores // max(1, min(cores, planned))


class FitRunner:
    """Does the fits of a stage, in this process or several at once in others.

    Args:
        watcher: Follows them.
        planned: Fits that the result is made of, done or not; gives the threads of each.
        expected: Fits that this runner will be given.
    """

    def __init__(
        self,
        stage: Stage,
        watcher: Watcher,
        *,
        planned: int,
        options: ExperimentOptions,
        expected: int,
    ) -> None:
        self._stage, self._watcher, self._options = stage, watcher, options
        self._device = device = resolve_device(options.device)
        self._ranks = current_ranks()
        # Processes that train together do so in one fit after the other.
        self._asked = jobs = options.jobs if self._ranks is None else 1
        if jobs is None:
            jobs = min(available_cores(), stage.fits_at_once()) if device.type == "cpu" else 1
        self._jobs = min(jobs, planned)
        self._threads = threads_per_fit(planned)
        self._workers: list[Worker] = []
        self._expected = expected
        self._started = time.monotonic()
        #: The share that is done of each fit that has started in this process.
        self._shares: dict[FitJob, float] = {}

    def __enter__(self) -> FitRunner:
        # What this process computes for others must not depend on where a fit runs, either.
        self._limited = limited_threads(self._threads)
        self._limited.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._close()
        self._limited.__exit__(None, None, None)

    def run(self, jobs: Sequence[FitJob]) -> None:
        """Do these fits and return when all are over; those that are done already are only read."""
        left = []
        for job in jobs:
            found = None
            try:
                found = self._stage.find(job.spec, job.folder)
            except BrokenFitError as error:
                self._watcher.broken(job, str(error))
            if found is not None:
                self._watcher.done(job, found)
                self._expected -= 1
            else:
                left.append(job)
        if self._options.backend != "loky":
            run_on_cluster(self._stage, self._watcher, left, self._threads, self._options)
            return
        if self._asked is None and self._jobs > 1 and not self._workers:
            left = self._start_here(left)
        if self._workers or min(self._jobs, len(left)) > 1:
            left = self._run_in_workers(left)
        for job in left:
            self._run_here(job)

    # --- in this process ---------------------------------------------------------------------

    def _start_here(self, jobs: Sequence[FitJob]) -> list[FitJob]:
        """Do fits until it pays to start processes; return those that are left."""
        for number, job in enumerate(jobs):
            try:
                self._run_here(job, may_move=True)
            except StopTraining:
                return list(jobs[number:])  # this one is resumed from what is saved of it
        return []

    def _run_here(self, job: FitJob, *, may_move: bool = False) -> None:
        watcher = self._watcher

        def stops(share_done: float) -> bool:
            return not watcher.wanted(job) or (may_move and self._pays_to_move(job, share_done))

        if not watcher.begin(job):
            return
        if self._ranks is not None:
            self._ranks.from_first(job.spec)
        watch = epoch_reporter(partial(watcher.epoch_done, job), stops)
        try:
            fit = self._stage.fit(job.spec, job.folder, device=self._device, on_epoch=watch)
        except StopTraining:
            if watcher.wanted(job):
                raise
        except Exception as error:
            watcher.failed(job, error)
        else:
            watcher.done(job, fit)

    def _pays_to_move(self, job: FitJob, share_done: float) -> bool:
        """Whether the rest would be over sooner in several processes, which have to start first."""
        self._shares[job] = share_done
        seconds, done = time.monotonic() - self._started, sum(self._shares.values())
        saved = seconds / done * (self._expected - done) * (1 - 1 / self._jobs)
        return seconds > MEASURED_SECONDS and saved > START_SECONDS

    # --- in other processes ------------------------------------------------------------------

    def _run_in_workers(self, jobs: Sequence[FitJob]) -> list[FitJob]:
        """Do fits in parallel; return all of them if this process has to do them itself."""
        try:
            if not self._workers:
                self._start_workers(min(self._jobs, len(jobs)))
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
            if waiting and not self._watcher.wanted(waiting[0]):
                del waiting[0]
            elif waiting and idle is not None and self._has_memory_for(waiting[0]):
                job = waiting.pop(0)
                if self._watcher.begin(job):
                    self._start_in(idle, job)
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

    def _start_in(self, worker: Worker, job: FitJob) -> None:
        try:
            shared = self._stage.share(job.spec)
        except Exception as error:
            self._watcher.failed(job, error)
        else:
            worker.start(job, shared)

    def _start_workers(self, count: int) -> None:
        pickled = pickle_stage(self._stage)
        for _ in range(count):
            self._workers.append(Worker(self._threads, self._device, self._watcher))
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


def run_on_cluster(
    stage: Stage,
    watcher: Watcher,
    jobs: Sequence[FitJob],
    threads: int,
    options: ExperimentOptions,
) -> None:
    """Do fits on a cluster, with so many threads each, and return when all are over.

    A fit reports nothing before it is over: a trial that is to be pruned is trained to its end,
    with the same results, later.
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
            watcher.failed(job, failure)
        elif watcher.wanted(job):
            found = stage.find(job.spec, job.folder)
            if found is None:
                raise WorkerError(
                    f"{job.folder / stage.place(job.spec)}: found no fit where a machine of the "
                    "cluster wrote one, expected a folder that all of them share"
                )
            watcher.done(job, found)


#: The arguments of :func:`do_fit` after the stage.
_Task = tuple[FitSpec, Path, int, str]

#: The number of a task that is over, and its error.
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
            f"scheduler: found nothing at {address} ({error}), expected the address that "
            "`dask scheduler` prints"
        ) from None
    with client:
        # The result of a task, not scattered data, which would be lost with their workers.
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
        f"{task[0].label}: found that every worker that tried it ended, expected a result; they "
        "may need more memory"
    )


# --- on a machine of the cluster

#: Fits share the random numbers and the threads of a process: one at a time.
_one_at_a_time = threading.Lock()


def do_fit(
    pickled: bytes, spec: FitSpec, folder: Path, threads: int, device: str
) -> Exception | None:
    """Do a fit of a pickled stage, on a device as the user names it; return its error."""
    try:
        with _one_at_a_time, limited_threads(threads):
            stage, there = _last_stage(pickled), resolve_device(device)
            stage.check(there)
            # A machine that was taken for lost may still be writing it.
            with OutputLock(folder / stage.place(spec), wait=True):
                found = None
                with suppress(BrokenFitError):
                    found = stage.find(spec, folder)
                if found is None:
                    stage.fit(spec, folder, device=there)
    except Exception as error:
        return portable(error)
    return None


@lru_cache(maxsize=1)
def _last_stage(pickled: bytes) -> Stage:
    """Unpickle a stage, unless it is the one that this process was sent last."""
    return unpickle_stage(pickled)
