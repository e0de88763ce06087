"""Means, deviations and paired intervals, against hand-computed values and scipy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from histograph_post.metrics import (
    expected_calibration_error,
    paired_difference,
    reliability,
    resampled_interval,
    resampled_rows,
    summarize,
)


def test_mean_and_sample_deviation() -> None:
    summary = summarize([1.0, 2.0, 6.0])
    assert summary is not None
    assert (summary.mean, summary.count) == (3.0, 3)
    assert summary.deviation == pytest.approx(np.sqrt(7.0))
    assert summarize([]) is None
    single = summarize([0.5])
    assert single is not None
    assert single.deviation == 0.0


def test_seeds_of_one_fold_are_paired() -> None:
    ours = {(0, 0): 0.8, (0, 1): 0.9, (0, 2): 0.7}
    theirs = {(0, 0): 0.7, (0, 1): 0.9, (0, 2): 0.5, (0, 3): 0.1}
    found = paired_difference(ours, theirs)
    assert found is not None
    interval = stats.ttest_rel([0.8, 0.9, 0.7], [0.7, 0.9, 0.5]).confidence_interval(0.95)
    assert found.mean == pytest.approx(0.1)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_folds_are_the_units_where_there_are_several() -> None:
    ours = {(0, 0): 0.8, (0, 1): 0.6, (1, 0): 0.5}
    theirs = dict.fromkeys(ours, 0.5)
    found = paired_difference(ours, theirs)
    assert found is not None
    assert found.count == 2
    assert found.mean == pytest.approx((0.2 + 0.0) / 2)


def test_one_pair_has_no_interval_and_none_has_no_difference() -> None:
    found = paired_difference({(0, 0): 1.0}, {(0, 0): 0.25})
    assert found is not None
    assert (found.mean, found.low, found.high) == (0.75, None, None)
    assert paired_difference({(0, 0): 1.0}, {(1, 0): 1.0}) is None


def test_calibration_by_hand() -> None:
    found = reliability(np.array([0.05, 0.05, 0.95, 1.0]), np.array([0, 1, 1, 1]))
    assert found.predicted == pytest.approx([0.05, 0.975])
    assert found.observed == pytest.approx([0.5, 1.0])
    assert found.counts.tolist() == [2, 2]
    assert found.error == pytest.approx((0.45 + 0.025) / 2)


def test_calibration_error_is_that_of_fifteen_bins() -> None:
    random = np.random.default_rng(0)
    sure, right = random.uniform(0.5, 1, 400), random.random(400) < 0.6
    edges = np.linspace(0, 1, 16)
    expected = 0.0
    for low, high in pairwise(edges):
        inside = (sure >= low) & ((sure < high) | (high == 1))
        if inside.any():
            expected += inside.mean() * abs(sure[inside].mean() - right[inside].mean())
    assert expected_calibration_error(sure, right) == pytest.approx(expected)


def test_rows_are_drawn_in_pairs_and_always_the_same() -> None:
    random = np.random.default_rng(0)
    ours, theirs = random.random(80) < 0.8, random.random(80) < 0.6  # right or wrong
    drawn = resampled_rows(80, 500)
    assert np.array_equal(drawn, resampled_rows(80, 500))
    scores = [each[drawn].mean(axis=1) for each in (ours, theirs)]
    found = resampled_interval(*scores)
    differences = np.sort([(ours[rows].astype(int) - theirs[rows]).mean() for rows in drawn])
    assert found == pytest.approx(tuple(np.quantile(differences, [0.025, 0.975])))
    assert not np.array_equal(drawn, resampled_rows(80, 500, fold=1))


def test_too_few_draws_that_can_be_scored_give_no_interval() -> None:
    scores = np.array([0.5, np.nan, np.nan, np.nan])
    assert resampled_interval(scores, np.zeros(4)) is None
