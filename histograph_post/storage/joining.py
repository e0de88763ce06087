"""Copying rows together, in several threads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from ..helper_threads import start_helper

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
    coming = [start_helper(copy, *other) for other in others]
    copy(*own)
    for helper in coming:
        helper.result()
    return joined
