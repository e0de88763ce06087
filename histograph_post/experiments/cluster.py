"""Fits on the machines of a cluster: tasks of joblib's Dask or Ray backend.

A task opens the cache by its path, does one fit, writes the fit's own folder, and returns its
number; what it found is read from there. So all machines see the same files, at the same paths. A
task whose machine is lost is given to another one, which goes on with what was saved.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from joblib import Parallel, delayed, parallel_config

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
    tasks = (
        delayed(do_fit)(pickled, number, job.spec, job.folder.resolve(), threads, options.device)
        for number, job in enumerate(jobs)
        if job.wanted  # its lock is taken where it is done
    )
    with _cluster(options.backend, options.scheduler, pickled):
        # One at a time: a batch of tasks would be told of, and lost, together.
        run = Parallel(n_jobs=-1, batch_size=1, return_as="generator_unordered")
        for number, failure in run(tasks):
            job = jobs[number]
            if failure is not None:
                job.failed(failure)
            elif job.wanted:
                found = stage.find(job.spec, job.folder)
                if found is None:
                    raise WorkerError(
                        f"{job.folder / stage.place(job.spec)}: found no fit where a machine of "
                        "the cluster wrote one, expected a folder that all of them share"
                    )
                job.done(found)


@contextmanager
def _cluster(backend: str, scheduler: str | None, pickled: bytes) -> Iterator[None]:
    """Let joblib give its tasks to the workers of a cluster, which get the stage once."""
    if backend == "ray":
        with _ray(scheduler), parallel_config("ray"):
            yield
        return
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("--backend dask", extra="cluster") from None
    if scheduler is None:
        raise ConfigError("scheduler: found none, expected an address, such as tcp://host:8786")
    try:
        client = Client(scheduler, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"scheduler: found nobody at {scheduler} ({error}), expected the address that "
            "`dask scheduler` prints"
        ) from None
    with client, parallel_config("dask", client=client, scatter=[pickled]):
        yield


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    try:
        import ray
        from ray.util.joblib import register_ray
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
        register_ray()
        yield
    finally:
        ray.shutdown()


# --- on a machine of the cluster

#: The stage that this process has last been sent, by its hash.
_stages: dict[str, Any] = {}

#: Fits share the random numbers and the threads of a process: one at a time.
_turn = threading.Lock()


def do_fit(
    pickled: bytes, number: int, spec: FitSpec, folder: Path, threads: int, device: str
) -> tuple[int, Exception | None]:
    """Do a fit; return its number, and the error that ended it.

    Args:
        pickled: The stage, from :func:`~.workers.pickle_stage`.
        number: Of the fit.
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
        return number, portable(error)
    return number, None


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
