"""The threads that PyTorch itself computes in, for loops that are not PyTorch's.

After an operation its OpenMP threads keep their cores for milliseconds, waiting for the next one.
A thread of our own has to share a core with one that waits: where they take turns with PyTorch's
operations, loops in such threads took up to twice the time. The waiting threads have it at once.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import torch


def team_address() -> int:
    """Return the address of what a compiler calls for ``#pragma omp parallel``.

    It is ``GOMP_parallel(function, data, threads, flags)`` of the library that PyTorch uses: calls
    a function with the data in each of so many threads, this one among them. Zero where PyTorch has
    no such threads, or where this process is a fork of one that had them.
    """
    return _address()


@cache
def _address() -> int:
    # A library is searched with all that it was linked with.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):  # another system, or another kind of OpenMP
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _leave_team() -> None:
    global _address

    _address = cache(lambda: 0)


# A process that is forked does not have the threads, but OpenMP believes it has.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)
