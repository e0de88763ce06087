"""The threads that PyTorch itself computes in, for loops that are not PyTorch's.

After an operation its OpenMP threads keep their cores for milliseconds, waiting for the next one.
A thread of our own has to share a core with one that waits: where they take turns with PyTorch's
operations, loops in such threads took up to twice the time. The waiting threads have it at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch

_Work = ctypes.CFUNCTYPE(None)


def run_in_team(work: Callable[[], None], threads: int) -> bool:
    """Call something in each of so many threads, this one among them, and wait for all of them.

    Args:
        work: What to do, most of it without the interpreter's lock.
        threads: How many, as PyTorch has them: a team of another size is slow to come together.

    Returns:
        Whether it was done: nothing is where PyTorch has no such threads, or this process is a fork
        of one that had them.
    """
    parallel = _parallel()
    if parallel is None:
        return False
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # whoever called this must see it, in this very thread
            errors.append(error)

    parallel(_Work(run), None, threads, 0)
    for error in errors:
        raise error
    return True


@cache
def _parallel() -> Callable[..., None] | None:
    """Return what a compiler calls for ``#pragma omp parallel``, of the library PyTorch uses."""
    # A library is searched with all that it was linked with.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function: Any = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):  # another system, or another kind of OpenMP
        return None
    function.argtypes = [_Work, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return cast(Callable[..., None], function)


def _leave_team() -> None:
    global _parallel

    _parallel = cache(lambda: None)


# A process that is forked does not have the threads, but OpenMP believes it has.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)
