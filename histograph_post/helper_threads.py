"""Threads that help with something while its caller does the rest of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

#: Threads that help at a time, at most.
MOST_HELPERS = 16


def start_helper(work: Callable[..., None], *arguments: object) -> Future[None]:
    """Start something in a thread; do it at once at the end of a process, which has no new ones.

    Args:
        work: What to do, most of it without the interpreter's lock. It starts no helpers itself.
        arguments: What to call it with.
    """
    try:
        return _pool().submit(work, *arguments)
    except RuntimeError:
        work(*arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_HELPERS, thread_name_prefix="helper")


# A process that is forked has the pool, but not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
