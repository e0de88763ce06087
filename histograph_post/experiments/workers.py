"""A process that trains one fit after the other, and what it and the process that asks tell.

loky starts the processes. Unlike those of ``multiprocessing`` they leave the user's script alone,
which then needs no ``if __name__ == "__main__"``. A process ends with the one that started it,
whatever ends that.
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
from functools import partial
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
from ..heads.registry import head_name, register_head, registered_heads
from ..runs.fits import Fit, FitSpec
from ..training.loop import OnEpoch, Trainer
from ..utils.machine import keep_memory

if TYPE_CHECKING:
    from .stage import Stage

#: What tells a library how many threads it has, when it is loaded.
_THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "NUMBA_NUM_THREADS"),
)


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """Let PyTorch, and the libraries under NumPy, use so many threads."""
    before = torch.get_num_threads()
    try:
        with threadpool_limits(threads):
            torch.set_num_threads(threads)
            yield
    finally:
        torch.set_num_threads(before)


class FitJob:
    """A fit to do, and what to call with its outcome; the folder is the run's."""

    def __init__(self, spec: FitSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder

    @property
    def wanted(self) -> bool:
        """Whether it is still of use; one that is not is stopped after its epoch."""
        return True

    def begin(self) -> bool:
        """Whether to do it now; called before it is begun, and before it is gone on with."""
        return self.wanted

    def epoch_done(self, share_done: float, log: Sequence[Mapping[str, float]]) -> None:
        """Take note of an epoch.

        Args:
            share_done: The share of the fit's epochs that are over.
            log: What was measured since the last call; also in the epochs before a kill.
        """

    def done(self, fit: Fit) -> None:
        """Take note of the result."""

    def broken(self, reason: str) -> None:
        """Take note that what is there of it is of no use: it is done again."""

    def failed(self, error: Exception) -> None:
        """Take note that there will be no result."""
        raise error


class StopTraining(Exception):
    """Ends a fit after an epoch; what is saved of it can be picked up again."""


def telling_epochs(
    tell: Callable[[float, Sequence[Mapping[str, float]]], None], stops: Callable[[float], bool]
) -> OnEpoch:
    """Return what tells of every epoch of a fit once, and ends the fit where it is to stop."""
    told = 0

    def epoch_done(trainer: Trainer) -> None:
        nonlocal told
        share_done, log = trainer.share_done, trainer.progress.log
        tell(share_done, log[told:])
        told = len(log)
        if stops(share_done):
            raise StopTraining

    return epoch_done


class CannotSendError(Exception):
    """The stage cannot be pickled, or not be unpickled in another process."""


class Worker:
    """Another process that does fits, one after the other."""

    def __init__(self, threads: int, device: torch.device) -> None:
        #: The fit it is at.
        self.job: FitJob | None = None
        self._stopped = False
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
        """Hand over what is trained, from :func:`pickle_stage`."""
        self._send(pickled)

    def check_stage(self) -> None:
        """Wait until the process can work."""
        reason = self._receive()
        if reason is not None:
            raise CannotSendError(reason)

    def give(self, job: FitJob, lent: Any) -> None:
        """Let it do a fit, with what the stage lends for it."""
        self.job, self._stopped = job, False
        self._send(pickle.dumps((job.spec, job.folder, lent)))

    def stop_if_unwanted(self) -> None:
        """Stop a fit that has become of no use, after its epoch."""
        if self.job is not None and not self.job.wanted and not self._stopped:
            self._stopped = True
            self._send(pickle.dumps(None))

    def receive(self) -> None:
        """Wait for what the process has to tell of its fit, and pass it on."""
        what, *values = self._receive()
        job = self.job
        assert job is not None  # a process without one says nothing
        if what != "epoch_done":
            self.job = None
        if job.wanted and what != "stopped":
            getattr(job, what)(*values)

    def close(self) -> None:
        """End the process, in the middle of a fit if need be: what is saved of it stays."""
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
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        fit = "" if self.job is None else f"{self.job.spec.label}: "
        return WorkerError(
            f"{fit}found that its process ended ({how}), expected a result; if memory ran out, "
            "run the same command again with fewer --jobs"
        )


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that leave Ctrl-C, which the terminal sends to all of them, to this one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    for tracker in (resource_tracker, loky_tracker):
        tracker.ensure_running()  # before: what starts them lets interrupts through again
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
    asked: SimpleQueue[Any] = SimpleQueue()
    unwanted = threading.Event()
    threading.Thread(target=_listen, args=(connection, asked, unwanted), daemon=True).start()

    def tell(*message: Any) -> None:
        connection.send_bytes(pickle.dumps(message))

    try:
        with limited_threads(threads):
            try:
                stage = unpickle_stage(asked.get())
            except Exception as error:
                connection.send_bytes(pickle.dumps(f"{type(error).__name__}: {error}"))
            else:
                if stage.trains_backbone:
                    keep_memory()
                connection.send_bytes(pickle.dumps(None))
            while True:
                # Nothing here keeps what was lent for a fit that is over.
                tell(*_fit(stage, asked.get(), torch.device(device), tell, unwanted))
    except OSError:  # nobody listens any more
        os._exit(1)


def _listen(connection: Connection, asked: SimpleQueue[Any], unwanted: threading.Event) -> None:
    """Receive what is asked for; end this process with the one that asks."""
    try:
        asked.put(connection.recv_bytes())  # the stage, which may be code: not for this thread
        while True:
            message = pickle.loads(connection.recv_bytes())
            if message is None:
                unwanted.set()
            else:
                unwanted.clear()
                asked.put(message)
    finally:
        os._exit(1)


def _fit(
    stage: Stage,
    asked: tuple[FitSpec, Path, Any],
    device: torch.device,
    tell: Callable[..., None],
    unwanted: threading.Event,
) -> tuple[Any, ...]:
    """Do a fit; return the name of the :class:`FitJob` method to call, and its arguments."""
    spec, folder, lent = asked
    watch = telling_epochs(partial(tell, "epoch_done"), lambda _: unwanted.is_set())
    try:
        with stage.borrowing(spec, lent):
            return "done", stage.fit(spec, folder, device=device, on_epoch=watch)
    except StopTraining:
        return ("stopped",)
    except Exception as error:
        return "failed", portable(error)


def portable(error: Exception) -> Exception:
    """Return an error as it can be raised in another process."""
    trace = "".join(traceback.format_exception(error))
    try:
        found: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # some can be pickled and not be unpickled
        found = RuntimeError(f"{type(error).__name__}: {error}")
    found.add_note(f"in another process:\n{trace}")
    return found


# --- sending a stage -----------------------------------------------------------------------------

#: Types of values that NumPy has, too.
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
    # A readout from a file is imported there again; one of a script or notebook is sent itself.
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
        if isinstance(head, str):
            head_name(head)
        else:
            register_head(name)(head)
    found: Stage = stage
    return found
