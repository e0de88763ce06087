"""Threads that help with something while its caller does the rest of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from threading import Lock

#: Threads that help at a time, at most.
MOST_HELPERS = 16


def start_helper(work: Callable[..., None], *arguments: object) -> Future[None]:
    """Start something in a thread; do it at once where there is none and no new one can be had.

    Args:
        work: What to do, most of it without the interpreter's lock. It starts no helpers itself.
        arguments: What to call it with.
    """
    errand = _Errand(work, arguments)
    try:
        _pool().submit(errand.run)
    except RuntimeError:  # no pool any more; or no thread more, but others have it in their queue
        errand.run()
    return errand.done


class _Errand:
    """Something to do, which is done once, whoever comes to it first."""

    def __init__(self, work: Callable[..., None], arguments: tuple[object, ...]) -> None:
        self.done: Future[None] = Future()
        self._work = work
        self._arguments = arguments
        self._taken = Lock()

    def run(self) -> None:
        """Do it, unless somebody does it already or nobody wants it any more."""
        if not self._taken.acquire(blocking=False):
            return
        if not self.done.set_running_or_notify_cancel():  # from here on it cannot be cancelled
            return
        try:
            self._work(*self._arguments)
        except BaseException as error:
            self.done.set_exception(error)
        else:
            self.done.set_result(None)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_HELPERS, thread_name_prefix="helper")


# A process that is forked has the pool, but not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
