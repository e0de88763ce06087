from __future__ import annotations

import numpy as np
import pytest

from histograph_post.errors import SplitError
from histograph_post.splits.making import (
    DEFAULT_SHARES,
    kfold_parts,
    parse_fold_count,
    parse_shares,
    random_parts,
    stratified_parts,
)


def sizes(parts: tuple) -> list[int]:
    return [len(part) for part in parts]


def test_shares_are_three_numbers_that_add_up() -> None:
    assert parse_shares("", where="") == DEFAULT_SHARES
    assert parse_shares("0.7, 0.3, 0", where="") == (0.7, 0.3, 0)
    assert parse_shares("1,0,0", where="") == (1, 0, 0)


@pytest.mark.parametrize(
    "text", ["0.8,0.2", "0.8,0.1,0.2", "0,0.5,0.5", "1.1,-0.1,0", "a,b,c", "nan,0.5,0.5", "0.1" * 3]
)
def test_shares_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(SplitError, match=r"^here: found .* expected three shares that add up to 1"):
        parse_shares(text, where="here")


@pytest.mark.parametrize("text", ["", "2", "x", "21", "-3", "3.0"])
def test_the_number_of_folds_must_fit(text: str) -> None:
    with pytest.raises(SplitError, match="expected kfold:K with K from 3 to 20"):
        parse_fold_count(text, 20, where="here")
    assert parse_fold_count("20", 20, where="here") == 20


def test_random_parts_are_sorted_and_use_every_row_once() -> None:
    parts = random_parts(40, (0.5, 0.3, 0.2), seed=0)
    assert sizes(parts) == [20, 12, 8]
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    assert all((np.diff(part) > 0).all() for part in parts)
    assert [part.tolist() for part in parts] != [
        part.tolist() for part in random_parts(40, (0.5, 0.3, 0.2), seed=1)
    ]


def test_stratified_parts_keep_the_class_proportions() -> None:
    classes = np.array([0] * 160 + [1] * 40)
    parts = stratified_parts(classes, DEFAULT_SHARES, seed=0, where="here")
    assert sizes(parts) == [160, 20, 20]
    assert [classes[part].sum() for part in parts] == [32, 4, 4]
    assert sorted(np.concatenate(parts).tolist()) == list(range(200))


@pytest.mark.parametrize(
    ("shares", "expected"), [((0.5, 0.5, 0), [10, 10, 0]), ((0.5, 0, 0.5), [10, 0, 10])]
)
def test_a_share_of_nothing_is_an_empty_part(shares: tuple, expected: list[int]) -> None:
    assert sizes(random_parts(20, shares, seed=0)) == expected
    assert sizes(stratified_parts(np.arange(20) % 2, shares, seed=0, where="")) == expected


@pytest.mark.parametrize("classes", [[0] * 19 + [1], [0, 1, 2, 3, 4] * 2])
def test_classes_too_small_to_stratify_are_refused(classes: list[int]) -> None:
    with pytest.raises(SplitError, match="here: the classes are too small to be stratified"):
        stratified_parts(np.array(classes), DEFAULT_SHARES, seed=0, where="here")


def test_kfold_tests_every_row_once_and_validates_on_the_next_fold() -> None:
    folds = kfold_parts(100, None, 10, seed=0)
    assert [sizes(fold) for fold in folds] == [[80, 10, 10]] * 10
    assert sorted(np.concatenate([test for _, _, test in folds]).tolist()) == list(range(100))
    for fold, following in zip(folds, [*folds[1:], folds[0]], strict=True):
        assert fold[1].tolist() == following[2].tolist()
        assert sorted(np.concatenate(fold).tolist()) == list(range(100))


def test_kfold_spreads_the_classes_as_far_as_they_go() -> None:
    classes = np.array([0] * 70 + [1] * 30)
    assert [classes[test].sum() for _, _, test in kfold_parts(100, classes, 10, seed=0)] == [3] * 10
    # A class of two members reaches two of four folds; no class of two reaches any of them all.
    for tiny in ([0] * 10 + [1] * 2, list(range(6)) * 2):
        folds = kfold_parts(12, np.array(tiny), 4, seed=0)
        assert [sizes(fold) for fold in folds] == [[6, 3, 3]] * 4
