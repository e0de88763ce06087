"""How the loops are compiled, and how graphs are shared out among threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

#: In single precision: a Python number would make a sum double.
ZERO, ONE = np.float32(0), np.float32(1)

_Loop = TypeVar("_Loop", bound=Callable[..., object])

#: Sums may be made in any order and products fused with them, which is what makes vectors of them;
#: infinite values and NaN stay what they are.
REASSOCIATED = {"reassoc", "contract", "nsz", "arcp"}

#: Multiplications of a part that is given to a thread, about: a millisecond's worth.
PART_WORK = 10_000_000

#: Parts at most; each has gradients of its own, which are added up in the end.
MOST_PARTS = 8


def loop(function: _Loop) -> _Loop:
    """Compile a function when it is first called, and keep the code for the next process."""
    options = {"nogil": True, "fastmath": REASSOCIATED, "error_model": "numpy"}
    try:
        return cast(_Loop, numba.njit(cache=True, **options)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(_Loop, numba.njit(**options)(function))


class Shares:
    """How the graphs of a batch are shared out among threads.

    The parts depend on the graphs alone, so that a result is the same for any number of threads;
    which thread takes a part depends on which of them is free.

    Args:
        costs: Multiplications of each graph, about: ``[num_graphs]``.
    """

    def __init__(self, costs: Integers) -> None:
        total = np.cumsum(costs)  # [num_graphs]
        parts = min(MOST_PARTS, int(total[-1]) // PART_WORK + 1)
        goals = total[-1] * np.arange(1, parts) / parts  # [parts - 1]
        bounds = np.unique([0, *(np.searchsorted(total, goals) + 1), len(costs)]).tolist()
        self._parts = [(part, *own) for part, own in enumerate(pairwise(bounds))]

    def __len__(self) -> int:
        return len(self._parts)

    def run(self, work: Callable[[int, int, int], None]) -> None:
        """Call ``work(part, first, stop)`` for the graphs of every part, in several threads.

        As many threads take part as PyTorch uses.

        Args:
            work: Does what is to be done without the interpreter's lock.
        """
        waiting = iter(self._parts)  # each part is handed out once: next() is atomic

        def take() -> None:
            for part in waiting:
                work(*part)

        helpers = min(torch.get_num_threads(), len(self)) - 1
        coming = [_pool(helpers).submit(take) for _ in range(helpers)]
        try:
            take()
        finally:
            for part in coming:
                part.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="graphs")


# A process that is forked has the pool, but not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
