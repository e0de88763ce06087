"""Whether the process keeps memory that is freed, or gives it back to the system.

glibc maps every block of 32 MB or more anew and gives it back at once. The batches of a model then
spend up to half of their time on page faults: such a block has thousands.
"""

from __future__ import annotations

import ctypes
import sys

#: Options of glibc's ``mallopt``: how much may be free at the end of the heap, from which size on
#: blocks are mapped, and how many at most.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4


def keep_memory() -> None:
    """Keep what is freed for the tensors to come, where the C library is glibc.

    This is for a process of one's own: the commands that run models do it.
    """
    _set({_TRIM_THRESHOLD: -1, _MMAP_MAX: 0})


def give_memory_back() -> None:
    """Do again what glibc comes to do by itself once large blocks were freed."""
    _set({_TRIM_THRESHOLD: 64 << 20, _MMAP_THRESHOLD: 32 << 20, _MMAP_MAX: 1 << 16})


def _set(options: dict[int, int]) -> None:
    if not sys.platform.startswith("linux"):
        return
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    for option, value in options.items():
        set_option(option, value)
