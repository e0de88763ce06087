"""Rows that are copied together by several threads are those of a plain concatenation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from histograph_post.storage.joining import THREAD_BYTES, join_rows


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "sizes",
    [
        [3],
        [0, 2, 0],
        [0, 0],
        [1] * 100,
        [THREAD_BYTES // 16],  # a part is not shared out
        [1, THREAD_BYTES // 4, 2, 0, 5],
        [THREAD_BYTES // 40] * 37,
    ],
)
@pytest.mark.parametrize("dtype", ["<f4", "<u2"])
def test_rows_are_joined_in_order(threads: int, sizes: list[int], dtype: str) -> None:
    stored = np.arange(sum(sizes) * 6).astype(dtype).reshape(-1, 2, 3)
    parts = np.split(stored, np.cumsum(sizes)[:-1])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        joined = join_rows(parts)
    finally:
        torch.set_num_threads(before)
    assert joined.dtype == stored.dtype
    assert not np.shares_memory(joined, stored)
    np.testing.assert_array_equal(joined, stored)
