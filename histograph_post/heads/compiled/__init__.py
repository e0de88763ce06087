"""The inner loops of HistoGraph in machine code, for a CPU with numba installed.

A graph of a batch is small: its history and its attention fit a processor's cache, and what takes
time is to go through memory once per operation and to call hundreds of them. These loops do all
that is to be done with one graph before they turn to the next, and read its history once. They
share nothing between graphs, so they run on any number of threads with the same result.

Without numba, on another device or in another precision the head takes its other path, which
gives the same values up to rounding.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

#: The loops are used where they can be; set it to False to do without them.
enabled = find_spec("numba") is not None


def usable(*tensors: Tensor) -> bool:
    """Say whether loops may run on these: in single precision, in the memory of this process."""
    return (
        enabled
        and not torch.compiler.is_exporting()
        and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    )


def note() -> str | None:
    """Say what a user may want to know before a head is trained on a CPU, if anything."""
    if not enabled:
        return (
            "on a CPU this head trains about twice as fast with pip install 'histograph-post[fast]'"
        )
    from .graph_loops import read_graphs_back

    folder = read_graphs_back.stats.cache_path  # type: ignore[attr-defined]
    if folder is not None and any(Path(folder).glob("graph_loops.read_graphs_back-*.nbi")):
        return None
    return "compiling the head's loops, which takes about ten seconds, once"
