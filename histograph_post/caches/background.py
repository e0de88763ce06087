"""Work that goes on in a thread of its own while the caller computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self


class Background:
    """Runs jobs one after the other, in order, in one thread; a context manager.

    At most ``waiting`` jobs are under way: one more waits for the first of them. When a job fails,
    no later one runs, and its error is raised by the next :meth:`run` or :meth:`wait`, or at the
    end.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._jobs: deque[Future[None]] = deque()
        self._failed = False
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        # The thread is there before the first job: one that is interrupted as it starts is lost.
        self._pool.submit(_nothing).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failed = self._failed or error is not None
        interrupt = self._wait()
        self._pool.shutdown()  # at once: there is nothing left to do
        if error is None:
            if interrupt is not None:
                raise interrupt
            self._collect(0)

    def run(self, job: Callable[..., object], *arguments: Any) -> None:
        """Run a job after those that were given before it."""
        self._collect(self._waiting - 1)
        self._jobs.append(self._pool.submit(self._run, job, arguments))

    def wait(self) -> None:
        """Wait until all jobs are done."""
        self._collect(0)

    def _collect(self, left: int) -> None:
        """Wait until no more than ``left`` jobs are under way."""
        while len(self._jobs) > left:
            self._jobs.popleft().result()

    def _wait(self) -> KeyboardInterrupt | None:
        """Wait for the job in hand, which must not be left half done; return what came meanwhile.

        Not by joining the thread: Python takes one for ended whose join was interrupted.
        """
        interrupt = None
        while True:
            try:
                self._pool.submit(_nothing).result()  # comes after all others
            except KeyboardInterrupt as found:
                self._failed, interrupt = True, found
            else:
                return interrupt

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self._failed:
            return
        try:
            job(*arguments)
        except BaseException:
            self._failed = True
            raise


def _nothing() -> None:
    """Do nothing."""
