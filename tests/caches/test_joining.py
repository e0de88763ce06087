"""Rows that are copied together are those of a plain concatenation, wherever they lie."""

from __future__ import annotations

import numpy as np
import pytest

from histograph_post.caches.joining import JoinedRows


def _join(arrays: list[np.ndarray], runs: list[tuple[int, int, int]]) -> np.ndarray:
    columns = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    return JoinedRows(arrays).take(*columns)


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2"])
@pytest.mark.parametrize("shape", [(2, 3), (5,), (64, 17)])
def test_runs_come_in_the_order_asked_for(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 1000, (size, *shape)).astype(dtype) for size in (40, 0, 1, 700, 13)]
    runs = []
    for number in rng.permutation(np.repeat(np.arange(5), 20)):
        first, last = np.sort(rng.integers(0, len(arrays[number]) + 1, 2))
        runs.append((int(number), int(first), int(last)))
    joined = _join(arrays, runs)
    assert joined.dtype == np.dtype(dtype)
    expected = np.concatenate([arrays[number][first:last] for number, first, last in runs])
    np.testing.assert_array_equal(joined, expected)


def test_what_is_copied_is_a_copy() -> None:
    array = np.arange(6.0).reshape(3, 2)
    joined = _join([array], [(0, 0, 3)])
    joined[:] = -1
    assert array.min() == 0


def test_values_need_not_be_aligned() -> None:
    buffer = bytes(range(1, 100))
    array = np.frombuffer(buffer, "<f4", 12, offset=3).reshape(6, 2)
    np.testing.assert_array_equal(
        _join([array], [(0, 4, 6), (0, 1, 2)]).view("<u4"), array.view("<u4")[[4, 5, 1]]
    )


@pytest.mark.parametrize("runs", [[], [(0, 2, 2)], [(1, 0, 0), (0, 3, 3)]])
def test_no_rows_are_an_empty_array(runs: list[tuple[int, int, int]]) -> None:
    arrays = [np.ones((3, 4), np.float32), np.ones((0, 4), np.float32)]
    assert _join(arrays, runs).shape == (0, 4)


@pytest.mark.parametrize("run", [(0, -1, 2), (0, 0, 4), (1, 0, 1), (1, 5, 6)])
def test_rows_outside_of_their_array_are_refused(run: tuple[int, int, int]) -> None:
    arrays = [np.ones((3, 4), np.float32), np.ones((0, 4), np.float32)]
    with pytest.raises(IndexError, match="outside"):
        _join(arrays, [(0, 0, 1), run])
