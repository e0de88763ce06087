"""Rows of several arrays, copied together as if they were rows of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..heads.ranges import ranges


class JoinedRows:
    """Arrays with rows of one shape, wherever in memory each of them is.

    PyTorch has threads that copy rows, but rows of one tensor only. So the arrays are seen as one
    that reaches from the first to the last of them in memory; nothing between them is ever read.

    Args:
        arrays: At least one, each in one piece, which differ in the number of their rows alone.
    """

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self._arrays = arrays  # for as long as their memory is looked at
        self._shape, self._dtype = arrays[0].shape[1:], arrays[0].dtype
        self._row_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        self._sizes = np.array([len(array) for array in arrays])
        places = np.array([array.__array_interface__["data"][0] for array in arrays])  # addresses
        first = int(places.min())
        last = int((places + self._sizes * self._row_bytes).max())
        self._places = places - first  # in bytes, [arrays]
        memory = torch.from_numpy(np.asarray(_Memory(first, last)))  # [bytes]
        # Every byte begins a row of this, [bytes - row_bytes + 1, row_bytes].
        starts = max(last - first - self._row_bytes + 1, 0)
        self._windows = memory.as_strided((starts, self._row_bytes), (1, 1))

    def take(self, numbers: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return a copy of rows ``starts[i]`` to ``stops[i]`` of array ``numbers[i]``, for each i.

        Args:
            numbers: Which array each run of rows is in, ``[runs]``.
            starts: First row of each run, ``[runs]``.
            stops: One past its last row, ``[runs]``.
        """
        if (starts < 0).any() or (stops > self._sizes[numbers]).any():
            raise IndexError(f"found rows outside of arrays with {self._sizes} rows")
        rows = ranges(starts, stops) * self._row_bytes  # from the start of an array, [rows]
        rows += np.repeat(self._places[numbers], stops - starts)
        copied = self._windows.index_select(0, torch.from_numpy(rows))  # [rows, row_bytes]
        return copied.numpy().view(self._dtype).reshape(-1, *self._shape)


class _Memory:
    """The memory between two addresses, for numpy to look at."""

    def __init__(self, first: int, last: int) -> None:
        self.__array_interface__ = {
            "data": (first, False),
            "shape": (last - first,),
            "typestr": "|u1",
            "version": 3,
        }
