"""Fits on the machines of a cluster: tasks of Dask or Ray.

A task opens the cache by its path, does one fit and writes the fit's own folder; what came out is
read from there. So all machines see the same files, at the same paths. A
task whose machine is lost is given to another one, which goes on with what was saved.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingExtraError, WorkerError
from ..runs.fits import FitSpec
from ..runs.folder import BrokenFitError
from ..utils.machine import keep_memory, resolve_device
from ..utils.outputs import OutputLock
from .workers import (
    CannotSendError,
    FitJob,
    limited_threads,
    pickle_stage,
    portable,
    unpickle_stage,
)

if TYPE_CHECKING:
    from .options import ExperimentOptions
    from .stage import Stage


def run_on_cluster(
    stage: Stage, jobs: Sequence[FitJob], threads: int, options: ExperimentOptions
) -> None:
    """Do fits on a cluster and come back when all are over.

    Nothing is known of a fit before it is over: a trial that is worse than most is known to be
    so when it ends, which gives the same results, later.

    Args:
        stage: What is trained.
        jobs: The fits.
        threads: Of each.
        options: Name the cluster, and where its machines train.
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
    """Do a fit; return the error that ended it.

    Args:
        pickled: The stage, from :func:`~.workers.pickle_stage`.
        spec: What is fitted.
        folder: The run.
        threads: Of the fit.
        device: Where to train, as the user names it.
    """
    try:
        with _turn, limited_threads(threads):
            stage, there = _unpickled(pickled), resolve_device(device)
            stage.check(there)
            # A machine that was taken for lost may still be at it: one writer of a fit.
            with OutputLock(folder / stage.place(spec), wait=True):
                if not _is_done(stage, spec, folder):
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


def _is_done(stage: Stage, spec: FitSpec, folder: Path) -> bool:
    try:
        return stage.find(spec, folder) is not None
    except BrokenFitError:
        return False
