"""Runs of neighbouring numbers, one after the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def ranges(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return all numbers from ``starts[i]`` to ``stops[i] - 1``, for each i in turn."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
