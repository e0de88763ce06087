"""Worker processes, each of which trains one fit after the other, and how they are talked to.

joblib's own pool reports nothing before a task ends; here every epoch is reported, and a fit can be
stopped after one. loky starts the processes: unlike those of ``multiprocessing`` they do not run
the user's script again, which then needs no ``if __name__ == "__main__"``. A worker ends with the
process that started it, however that ends.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import torch
from joblib.externals.loky.backend import resource_tracker as loky_tracker
from joblib.externals.loky.backend.context import get_context
from threadpoolctl import threadpool_limits
from torch import Tensor

from ..errors import WorkerError
from ..heads.registry import head_name, registered_heads
from ..runs.fits import Fit, FitSpec
from ..training.loop import OnEpoch, Progress
from ..utils.machine import keep_memory

if TYPE_CHECKING:
    from .stage import Stage

#: Environment variables that limit the threads of a library when it is loaded.
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS"),
)


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Limit the threads of PyTorch, and of the libraries under NumPy."""
    before = torch.get_num_threads()
    try:
        with threadpool_limits(threads):
            torch.set_num_threads(threads)
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class FitJob:
    """A fit to do; the folder is the run's."""

    spec: FitSpec
    folder: Path


class Watcher:
    """Follows the fits of a runner, and decides which of them are still wanted."""

    def wanted(self, job: FitJob) -> bool:
        """Whether a fit is still of use; one that is not is stopped after its epoch."""
        return True

    def begin(self, job: FitJob) -> bool:
        """Whether to do it now; called before it starts, and before it is resumed elsewhere."""
        return self.wanted(job)

    def epoch_done(
        self, job: FitJob, share_done: float, log: Sequence[Mapping[str, float]]
    ) -> None:
        """Called after every epoch.

        Args:
            share_done: The share of the fit's epochs that are over.
            log: What was measured since the last call, in epochs before a kill, too.
        """

    def done(self, job: FitJob, fit: Fit) -> None:
        """Called with the result."""

    def broken(self, job: FitJob, reason: str) -> None:
        """Called if a result is there that cannot be used: it is fitted again."""

    def failed(self, job: FitJob, error: Exception) -> None:
        """Called if there will be no result."""
        raise error


class StopTraining(Exception):
    """Ends a fit after an epoch; it can be resumed from what is saved."""


def epoch_reporter(
    report: Callable[[float, Sequence[Mapping[str, float]]], None], stops: Callable[[float], bool]
) -> OnEpoch:
    """Return a callback that reports every epoch of a fit once, and stops the fit when asked to.

    Args:
        report: See :meth:`Watcher.epoch_done`, of this fit.
        stops: Called with the share of the epochs that are over.
    """
    reported = 0

    def epoch_done(progress: Progress) -> None:
        nonlocal reported
        report(progress.share_done, progress.log[reported:])
        reported = len(progress.log)
        if stops(progress.share_done):
            raise StopTraining

    return epoch_done


class CannotSendError(Exception):
    """The stage cannot be pickled, or cannot be unpickled in another process."""


class Worker:
    """Another process that does fits, one after the other."""

    def __init__(self, threads: int, device: torch.device, watcher: Watcher) -> None:
        self._watcher = watcher
        #: The fit that it is training.
        self.job: FitJob | None = None
        context = get_context("loky")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work,
            args=(theirs, threads, str(device)),
            daemon=True,
            env=dict.fromkeys(_THREAD_VARIABLES, str(threads)),
        )
        with _interrupts_blocked():
            self._process.start()
        theirs.close()

    def send_stage(self, pickled: bytes) -> None:
        """Send what is trained, from :func:`pickle_stage`."""
        self._send(pickled)

    def check_stage(self) -> None:
        """Wait until the process can work."""
        reason = self._receive()
        if reason is not None:
            raise CannotSendError(reason)

    def start(self, job: FitJob, shared: Any) -> None:
        """Start a fit, with what the stage shares for it."""
        self.job = job
        self._send(pickle.dumps((job.spec, job.folder, shared)))

    def stop_if_unwanted(self) -> None:
        """Stop a fit that is no longer of use after its epoch."""
        if self.job is not None and not self._watcher.wanted(self.job):
            self._send(pickle.dumps(None))

    def receive(self) -> None:
        """Wait for the next report on the fit, and pass it on."""
        what, *values = self._receive()
        job = self.job
        assert job is not None  # an idle process reports nothing
        if what != "epoch_done":
            self.job = None
        if self._watcher.wanted(job) and what != "stopped":
            getattr(self._watcher, what)(job, *values)

    def close(self) -> None:
        """End the process, in the middle of a fit if need be: what is saved of that stays."""
        self._process.terminate()
        self._process.join()
        self.connection.close()

    def _send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            raise self._ended() from None

    def _receive(self) -> Any:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            raise self._ended() from None

    def _ended(self) -> WorkerError:
        self._process.join()
        code = self._process.exitcode or 0
        return process_ended("" if self.job is None else self.job.spec.label, code, "a result")


def process_ended(what: str, code: int, expected: str) -> WorkerError:
    """Return the error for a process that ended before it had done its work.

    Args:
        what: It was to do; may be empty.
        code: Its exit code; minus the number of the signal that ended it.
        expected: Of it.
    """
    how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    return WorkerError(
        f"{what}{what and ': '}found that its process ended ({how}), expected {expected}; if "
        "memory ran out, run the same command again with fewer --jobs"
    )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C, which a terminal sends to all of them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    for tracker in (resource_tracker, loky_tracker):
        tracker.ensure_running()  # first, since starting them unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- in the other process ------------------------------------------------------------------------


def _work(connection: Connection, threads: int, device: str) -> None:
    """Do fits until the process that asks for them ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout = sys.stderr  # what a user's model prints must not mix with the result
    requests: SimpleQueue[Any] = SimpleQueue()
    unwanted = threading.Event()
    threading.Thread(target=_listen, args=(connection, requests, unwanted), daemon=True).start()

    def send(message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    try:
        with limited_threads(threads):
            reason = None
            try:
                stage = unpickle_stage(requests.get())
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            send(reason)
            while True:
                # Nothing here keeps the shared memory of a fit that is over.
                send(_fit(stage, requests.get(), torch.device(device), send, unwanted))
    except OSError:  # the other end of the pipe is closed
        os._exit(1)


def _listen(connection: Connection, requests: SimpleQueue[Any], unwanted: threading.Event) -> None:
    """Receive requests; end this process with the one that sends them."""
    try:
        requests.put(connection.recv_bytes())  # the stage, which may be code: not for this thread
        while True:
            message = pickle.loads(connection.recv_bytes())
            if message is None:
                unwanted.set()
            else:
                unwanted.clear()
                requests.put(message)
    finally:
        os._exit(1)


def _fit(
    stage: Stage,
    request: tuple[FitSpec, Path, Any],
    device: torch.device,
    send: Callable[[Any], None],
    unwanted: threading.Event,
) -> tuple[Any, ...]:
    """Do a fit; return the name of the :class:`Watcher` method to call, and its arguments."""
    spec, folder, shared = request
    watch = epoch_reporter(
        lambda share_done, log: send(("epoch_done", share_done, log)), lambda _: unwanted.is_set()
    )
    try:
        with stage.using(spec, shared):
            return "done", stage.fit(spec, folder, device=device, on_epoch=watch)
    except StopTraining:
        return ("stopped",)
    except Exception as error:
        return "failed", portable(error)


def portable(error: Exception) -> Exception:
    """Return an error that can be sent to another process, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        found: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # some can be pickled and not be unpickled
        found = RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note(f"in another process:\n{trace}")
    return found


# --- sending a stage -----------------------------------------------------------------------------

#: Dtypes that NumPy has, too.
_NUMPY_TYPES = {torch.from_numpy(np.empty(0, kind)).dtype for kind in "efdbhilqB?"}


class _StagePickler(cloudpickle.Pickler):
    """Pickles classes of a script or notebook, too, and many small tensors in little time."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle a tensor as an array: torch takes ten times as long over a small one."""
        if (
            type(value) is Tensor
            and value.dtype in _NUMPY_TYPES
            and value.device.type == "cpu"
            and value.layout is torch.strided
            and not value.requires_grad
        ):
            return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def pickle_stage(stage: Stage) -> bytes:
    """Return a stage, and the user's own readouts, as bytes for :meth:`Worker.send_stage`.

    Raises:
        CannotSendError: for a model or data that cannot be pickled.
    """
    # A readout from a file is imported again there; one of a script or notebook is sent itself.
    heads = {info.name: info.code or info.location for info in registered_heads()}
    buffer = io.BytesIO()
    try:
        _StagePickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump((heads, stage))
    except Exception as error:
        raise CannotSendError(f"{type(error).__name__}: {error}") from error
    return buffer.getvalue()


def unpickle_stage(pickled: bytes) -> Stage:
    """Return what :func:`pickle_stage` was given, in another process."""
    heads, stage = pickle.loads(pickled)
    for name, head in heads.items():
        head_name(head, name)
    found: Stage = stage
    if found.trains_backbone:
        keep_memory()
    return found
