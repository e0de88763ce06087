"""Means, deviations and paired intervals, against hand-computed values and scipy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from histograph_post.metrics import paired_difference, summarize


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
