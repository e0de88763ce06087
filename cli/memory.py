"""How a command's process gets its memory from the system."""

from __future__ import annotations

import ctypes
import sys

#: Options of glibc's ``mallopt``: when to give memory back, and how many blocks may be mapped.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_NEVER, _NONE = -1, 0


def keep_memory() -> None:
    """Keep memory that is freed for the tensors to come, where the C library is glibc.

    It maps every block of 32 MB or more anew and gives it back at once; the batches of a model then
    spend half of their time on the page faults of such blocks.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        allocator = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    allocator(_TRIM_THRESHOLD, _NEVER)
    allocator(_MMAP_MAX, _NONE)
