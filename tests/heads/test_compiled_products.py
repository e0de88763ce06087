"""Products of small matrices and attention in vectors: against numpy, for any shape."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from histograph_post.heads.compiled.attention_columns import LOG2_E, row_length
from histograph_post.heads.compiled.attention_loops import (
    BLOCK,
    give_all,
    give_all_back,
    turn_columns,
)
from histograph_post.heads.compiled.products import (
    add_dots,
    add_product,
    add_product_ahead,
    fetch_rows,
    sum_pieces,
    write_product,
)
from histograph_post.heads.compiled.vector_code import vectors_of

Floats = npt.NDArray[np.float32]

#: Around the ends of vectors and of tiles.
LENGTHS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 33, 47, 63, 64, 65, 130])


def draw_values(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_near(found: Floats, expected: npt.NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


@settings(max_examples=80, deadline=None)
@given(rows=LENGTHS, inner=LENGTHS | st.just(0), width=LENGTHS, turned=st.booleans())
def test_products_are_added_and_nothing_else_is_touched(
    rows: int, inner: int, width: int, turned: bool
) -> None:
    left = draw_values(inner, rows).T if turned else draw_values(rows, inner)
    right, result = draw_values(inner, width + 5, seed=1), draw_values(rows, width + 3, seed=2)
    expected = result.astype(np.float64)
    expected[:, 2 : 2 + width] += left.astype(np.float64) @ right[:, 4 : 4 + width]
    add_product(left, right, 4, result, 2, width)
    assert_near(result, expected)
    before_and_after = [0, 1, width + 2]
    assert (result[:, before_and_after] == expected[:, before_and_after]).all()


@settings(max_examples=80, deadline=None)
@given(rows=LENGTHS, inner=LENGTHS | st.just(0), width=LENGTHS, turned=st.booleans())
def test_products_replace_what_is_there_and_nothing_else(
    rows: int, inner: int, width: int, turned: bool
) -> None:
    left = draw_values(inner, rows).T if turned else draw_values(rows, inner)
    right, result = draw_values(inner, width + 5, seed=1), draw_values(rows, width + 3, seed=2)
    expected = result.astype(np.float64)
    expected[:, 2 : 2 + width] = left.astype(np.float64) @ right[:, 4 : 4 + width]
    result[:, 2 : 2 + width] = np.nan
    write_product(left, right, 4, result, 2, width)
    assert_near(result, expected)


@settings(max_examples=40, deadline=None)
@given(rows=LENGTHS, inner=LENGTHS, width=LENGTHS, lines=st.integers(0, 300))
def test_fetching_ahead_changes_no_product_and_stops_in_time(
    rows: int, inner: int, width: int, lines: int
) -> None:
    left, right = draw_values(rows, inner), draw_values(inner, width, seed=1)
    result, expected = (draw_values(rows, width, seed=2) for _ in range(2))
    values = draw_values(lines * 16)
    start, stop = values.ctypes.data, values.ctypes.data + values.nbytes
    ahead = np.array([start, stop])
    add_product_ahead(left, right, 0, result, 0, width, ahead)
    add_product(left, right, 0, expected, 0, width)
    assert (result == expected).all()
    assert start <= ahead[0] <= stop == ahead[1]
    many = np.ones((64, 300), np.float32)
    add_product_ahead(many[:, :64], many, 0, many.copy(), 0, 300, ahead)
    assert ahead[0] == stop  # after thousands of steps


@settings(max_examples=80, deadline=None)
@given(count=LENGTHS, lefts=LENGTHS, rights=LENGTHS, width=LENGTHS)
@example(count=130, lefts=4, rights=33, width=64)  # more than is handled at a time
def test_products_of_pieces(count: int, lefts: int, rights: int, width: int) -> None:
    left, right = draw_values(count, lefts * width), draw_values(count, rights * width, seed=1)
    result = draw_values(lefts, rights, seed=2)
    pieces = left.reshape(count, lefts, width), right.reshape(count, rights, width)
    expected = result + np.einsum("nid,njd->ij", *pieces, dtype=np.float64)
    fetch_rows(right)
    add_dots(left, right, width, result)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@settings(max_examples=80, deadline=None)
@given(count=LENGTHS, sums=LENGTHS, pieces=LENGTHS, width=LENGTHS)
def test_sums_of_pieces(count: int, sums: int, pieces: int, width: int) -> None:
    weights, values = draw_values(sums, pieces), draw_values(count, pieces * width, seed=1)
    result = np.full((count, sums * width), np.nan, np.float32)
    sum_pieces(weights, values, result)
    expected = np.einsum(
        "il,nld->nid", weights, values.reshape(count, pieces, width), dtype=np.float64
    )
    assert_near(result, expected.reshape(count, -1))


def softmax(scores: Floats) -> npt.NDArray[np.float64]:
    raised = np.exp(scores.astype(np.float64) - scores.max(axis=0))
    attention: npt.NDArray[np.float64] = raised / raised.sum(axis=0)
    return attention


def as_scores(values: Floats) -> Floats:
    """Return scores as the loops have them; columns past the last are not looked at."""
    result = np.full((len(values), BLOCK), 1e30, np.float32)
    result[:, : values.shape[1]] = values * LOG2_E
    return result


#: Nodes whose attention is made at a time: what ends within a vector, at its end, or after it.
GIVERS = st.sampled_from(sorted({1, BLOCK // 2 - 1, BLOCK // 2, BLOCK // 2 + 1, BLOCK}))


@settings(max_examples=60, deadline=None)
@given(count=LENGTHS, givers=GIVERS, size=st.sampled_from([1.0, 30.0, 1e4]))
def test_attention_and_its_gradient_are_those_of_a_softmax(
    count: int, givers: int, size: float
) -> None:
    scores, grad = draw_values(count, givers) * np.float32(size), draw_values(count, seed=1)
    attention = softmax(as_scores(scores)[:, :givers] / np.float64(LOG2_E))
    received = np.zeros(count, np.float32)
    give_all(as_scores(scores), givers, received)
    np.testing.assert_allclose(received, attention.sum(1), rtol=1e-5, atol=1e-6)
    factor, received, turned = np.float32(0.25), np.zeros(count, np.float32), as_scores(scores)
    give_all_back(turned, givers, factor, grad, received)
    np.testing.assert_allclose(received, attention.sum(1), rtol=1e-5, atol=1e-6)
    expected = 0.25 * attention * (grad[:, None] - grad @ attention)
    np.testing.assert_allclose(turned[:, :givers], expected, rtol=1e-4, atol=1e-6)


#: All of these are NaN: the usual one, and some that other programs leave.
BROKEN = np.array([0x7FC00000, 0xFFFFFFFF, 0x7FC00001, 0x7FC00080], np.uint32).view(np.float32)


@pytest.mark.parametrize("count", [3, 16, 20])
@pytest.mark.parametrize("givers", [1, 4, BLOCK])
def test_attention_with_a_broken_score_is_broken(givers: int, count: int) -> None:
    for place in (0, count - 1):
        for broken in BROKEN:
            scores, received = draw_values(count, givers), np.zeros(count, np.float32)
            scores[place, -1] = broken
            give_all(as_scores(scores), givers, received)
            assert np.isnan(received).all()
            turned, grad = as_scores(scores), np.ones(count, np.float32)
            give_all_back(turned, givers, np.float32(1), grad, received)
            assert np.isnan(turned[:, givers - 1]).all()


@settings(max_examples=60, deadline=None)
@given(rows=LENGTHS, width=LENGTHS)
def test_columns_become_rows(rows: int, width: int) -> None:
    values = draw_values(rows, width + 3)
    result = np.full((row_length(width), row_length(rows)), np.nan, np.float32)
    turn_columns(values, 2, width, np.float32(0.5), result)
    assert (result[:width, :rows] == values[:, 2 : 2 + width].T * np.float32(0.5)).all()


def test_processors_have_vectors_of_their_own() -> None:
    assert vectors_of("+avx2,+avx512f,+fma") == (16, 4)
    assert vectors_of("+avx2,+fma,-avx512f") == (8, 2)
    assert vectors_of("+neon") == (4, 2)


OTHER_VECTORS = """
import numpy as np
from histograph_post.heads.compiled.attention_columns import row_length
from histograph_post.heads.compiled.attention_loops import BLOCK, give_all, turn_columns
from histograph_post.heads.compiled.products import add_dots, add_product, sum_pieces
from histograph_post.heads.compiled.products import add_product_ahead
from histograph_post.heads.compiled.vector_code import LANES

def draw(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)

for n, m, k, width in [(1, 1, 1, 1), (5, 3, 7, 6), (9, 4, 6, 33), (30, 5, 9, 8), (7, 2, 3, 70)]:
    left, right, result = draw(n, k), draw(k, width), np.zeros((n, width), np.float32)
    add_product(left, right, 0, result, 0, width)
    np.testing.assert_allclose(result, left @ right, rtol=1e-4, atol=1e-4)
    add_product_ahead(left, right, 0, result, 0, width, np.zeros(2, np.int64))
    np.testing.assert_allclose(result, 2 * (left @ right), rtol=1e-4, atol=1e-4)
    left, right, result = draw(n, m * width), draw(n, k * width), np.zeros((m, k), np.float32)
    add_dots(left, right, width, result)
    expected = np.einsum("nid,njd->ij", left.reshape(n, m, -1), right.reshape(n, k, -1))
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    weights, result = draw(m, k), np.empty((n, m * width), np.float32)
    sum_pieces(weights, right, result)
    expected = np.einsum("il,nld->nid", weights, right.reshape(n, k, -1)).reshape(n, -1)
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
    scores, received = np.zeros((n, BLOCK), np.float32), np.zeros(n, np.float32)
    k = min(k, BLOCK)
    scores[:, :k] = draw(n, k)
    expected = np.exp2(scores[:, :k])
    give_all(scores, k, received)
    expected = (expected / expected.sum(0)).sum(1)
    np.testing.assert_allclose(received, expected, rtol=1e-4, atol=1e-5)
    result = np.empty((row_length(width), row_length(n)), np.float32)
    turn_columns(left, 0, width, np.float32(2), result)
    assert (result[:width, :n] == 2 * left[:, :width].T).all()
print(LANES)
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of this kind")
@pytest.mark.parametrize(
    ("name", "features", "lanes"),
    [("haswell", "+avx,+avx2,+fma,+sse4.2", 8), ("x86-64", "+sse2", 4)],
)
def test_processors_with_shorter_vectors(
    tmp_path: Path, name: str, features: str, lanes: int
) -> None:
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", OTHER_VECTORS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == [str(lanes)], result.stderr
