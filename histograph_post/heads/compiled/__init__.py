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
