"""The inner loops of HistoGraph in machine code, for a CPU with numba installed.

A graph of a batch is small: its history and its attention fit a processor's cache, and what takes
time is to go through memory once per operation and to call hundreds of them. These loops do all
that is to be done with one graph before they turn to the next, and read its history once. They
share nothing between graphs, so they run on any number of threads with the same result.

Without numba, on another device or in another precision the head takes its other path, which
gives the same values up to rounding.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

#: The oldest numba that the extra takes.
OLDEST = (0, 62)

#: The loops are used where they can be; set it to False to do without them.
enabled = True


@cache
def available() -> bool:
    """Say whether there is a numba that works with everything else that is installed."""
    try:
        import numba
    except ImportError:  # also of a numba that does not like this numpy
        return False
    return numba.version_info.short >= OLDEST and not numba.config.DISABLE_JIT


def usable(history: Tensor) -> bool:
    """Say whether loops may run on this: in single precision, in the memory of this process."""
    return (
        enabled
        and not torch.compiler.is_compiling()
        and history.dtype == torch.float32
        and history.device.type == "cpu"
        and available()
    )


def note() -> str | None:
    """Say what a user may want to know before a head is trained on a CPU, if anything."""
    if not available():
        return "pip install 'histograph-post[fast]' makes this head train more than twice as fast"
    from .loops import code_folder

    folder, version = code_folder(), f"py{sys.version_info.major}{sys.version_info.minor}"
    pattern = f"graph_gradients.read_graphs_back-*.{version}.nbi"
    if folder is not None and any(Path(folder).glob(pattern)):
        return None
    return "compiling the head's loops, which takes about half a minute, once"
