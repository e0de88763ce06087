"""Copying rows together, in several threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import numpy as np
import torch

#: Bytes that are worth a thread.
THREAD_BYTES = 1 << 20

#: Threads that copy at most: more of them do not make memory any faster.
MOST_THREADS = 8


def join_rows(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of some arrays as one array.

    As many threads copy as PyTorch uses. It has threads of its own for this, but only for rows of
    one tensor.

    Args:
        parts: At least one, which differ in the number of their rows alone.
    """
    ends = np.cumsum([len(part) for part in parts])  # [parts]
    joined = np.empty((int(ends[-1]), *parts[0].shape[1:]), parts[0].dtype)
    threads = min(torch.get_num_threads(), MOST_THREADS, max(joined.nbytes // THREAD_BYTES, 1))
    goals = np.arange(1, threads) * (len(joined) / threads)
    bounds = np.unique([0, *np.searchsorted(ends, goals), len(parts)]).tolist()
    rows = [0, *ends.tolist()]

    def copy(first: int, stop: int) -> None:
        np.concatenate(parts[first:stop], out=joined[rows[first] : rows[stop]])

    own, *others = pairwise(bounds)
    coming = [_started(copy, *other) for other in others]
    copy(*own)
    for helper in coming:
        helper.result()
    return joined


def _started(work: Callable[[int, int], None], *bounds: int) -> Future[None]:
    """Start something in a thread; do it here at the end of a process, which has no new ones."""
    try:
        return _pool().submit(work, *bounds)
    except RuntimeError:
        work(*bounds)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="join")


# A process that is forked has the pool, but not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
