from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from histograph_post.errors import DataError
from histograph_post.heads.standardize import Standardizer


def make_rows(num_rows: int = 200, seed: int = 0) -> torch.Tensor:
    """Three layers of four channels whose means and scales differ by orders of magnitude."""
    rows = torch.randn(num_rows, 3, 4, generator=torch.Generator().manual_seed(seed))
    scales = torch.tensor([1e-4, 1.0, 50.0]).view(3, 1) * torch.tensor([1.0, 2.0, 0.5, 1.5])
    return rows * scales + torch.tensor([0.0, 100.0, -3.0]).view(3, 1)


def test_statistics_are_those_of_numpy() -> None:
    rows = make_rows()
    standardizer = Standardizer([4] * 3).fit(rows.split([1, 50, 0, 99, 50]))
    reference = rows.double().numpy()
    for layer in range(3):
        mean, scale = standardizer.statistics(layer)
        np.testing.assert_allclose(mean, reference[:, layer].mean(0), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(scale, reference[:, layer].std(0), rtol=1e-5)


@settings(max_examples=30)
@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_any_partition_of_the_rows_gives_the_same(cuts: list[int]) -> None:
    rows = make_rows()
    edges = [0, *sorted(cuts), 200]
    whole = Standardizer([4] * 3).fit([rows])
    parts = Standardizer([4] * 3).fit(rows[a:b] for a, b in pairwise(edges))
    torch.testing.assert_close(parts.mean, whole.mean)
    torch.testing.assert_close(parts.scale, whole.scale)


def test_a_large_mean_costs_no_digits() -> None:
    rows = (torch.randn(4000, 1, 1).double() + 1e8).unbind(0)
    _, scale = Standardizer([1]).fit([torch.stack(rows)]).statistics(0)
    assert scale.item() == pytest.approx(float(torch.stack(rows).std()), rel=1e-3)


def test_channels_that_hardly_move_are_not_blown_up() -> None:
    rows = torch.randn(500, 1, 4)
    rows[:, 0, 0] = 3.0  # constant
    rows[:, 0, 1] *= 1e-9  # rounding noise
    standardizer = Standardizer([4], floor=0.1).fit([rows])
    typical = rows[:, 0].double().var(0, unbiased=False).mean().sqrt()
    torch.testing.assert_close(standardizer.scale[:2], (0.1 * typical).float().expand(2))

    unseen = torch.full((1, 1, 4), 4.0)  # the first graph that moves them
    standardizer.apply_(unseen)
    assert unseen.abs().max() < 100


def test_a_layer_of_rounding_noise_is_not_blown_up() -> None:
    rows = torch.ones(100, 1, 2) + torch.rand(100, 1, 2) * 1e-7
    standardizer = Standardizer([2]).fit([rows])
    standardizer.apply_(rows)
    assert rows.abs().max() < 0.5


def test_a_dead_layer_stays_zero() -> None:
    rows = torch.zeros(10, 2, 3)
    rows[:, 1] = torch.randn(10, 3)
    Standardizer([3, 3]).fit([rows]).apply_(rows)
    assert torch.equal(rows[:, 0], torch.zeros(10, 3))


def test_layers_of_different_widths() -> None:
    layers = [torch.randn(60, 3) * 7 + 1, torch.randn(60, 5) * 0.1]
    standardizer = Standardizer([3, 5]).fit([layers])
    standardizer.apply_(layers)
    for layer in layers:
        torch.testing.assert_close(layer.mean(0), torch.zeros(layer.size(1)), rtol=0, atol=1e-5)
        deviation = layer.std(0, unbiased=False)
        torch.testing.assert_close(deviation, torch.ones(layer.size(1)), rtol=1e-4, atol=0)


def test_statistics_travel_in_the_state_dict() -> None:
    fitted, other = Standardizer([4] * 3).fit([make_rows()]), Standardizer([4] * 3)
    other.load_state_dict(fitted.state_dict())
    assert other.is_fitted
    assert torch.equal(other.scale, fitted.scale)
    assert repr(other) == "Standardizer(3 layers, floor=0.1, fitted on 200 rows)"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "found no training rows"),
        ([torch.zeros(0, 3, 4)], "found no training rows"),
        ([torch.full((5, 3, 4), float("nan"))], "found NaN or infinity"),
        ([torch.zeros(5, 2, 4)], r"found layers of widths \[4, 4\]"),
    ],
)
def test_unusable_rows_are_refused(batches: list[torch.Tensor], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Standardizer([4] * 3).fit(batches)


def test_a_tensor_is_standardised_like_its_layers() -> None:
    rows = torch.randn(20, 3, 4, dtype=torch.float64) * 3 + 1
    standardizer = Standardizer([4] * 3).double().fit([rows])
    found = standardizer(rows)  # [20, 3, 4]
    torch.testing.assert_close(found, torch.stack(standardizer(rows.unbind(1)), 1))
    standardizer.apply_(rows)
    torch.testing.assert_close(found, rows)


def test_a_classifier_that_is_folded_gives_the_same() -> None:
    rows = torch.randn(20, 3, 4, dtype=torch.float64) * 3 + 1
    standardizer = Standardizer([4] * 3).double().fit([rows])
    classifier = torch.nn.Linear(4, 2).double()
    weight, bias = standardizer.fold_into(classifier.weight, classifier.bias)
    found = standardizer(rows)[:, -1] @ weight.t() + bias  # [20, 2]
    torch.testing.assert_close(found, classifier(rows[:, -1]))
