from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from histograph_post.heads.histograph import HistoGraphConfig
from histograph_post.heads.histograph.layer_attention import (
    NORMALIZATIONS,
    LayerAttention,
    bounded_weights,
    signed_weights,
    sinusoidal_encoding,
)
from histograph_post.heads.ragged import Graphs

OPTIONS = HistoGraphConfig((4,), 1, radius=2.0, eps=1e-6)
FINITE = st.floats(-(2.0**50), 2.0**50, width=32)
SCORES = arrays(np.float32, st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=FINITE)


class TestNormalisations:
    @pytest.mark.parametrize("name", NORMALIZATIONS)
    @pytest.mark.parametrize("scores", [[0.5, -1.0, 2.0], [4e4, 4e4, 4e4], [-6e4, -5e4, -6e4]])
    def test_a_head_in_half_precision_has_weights_too(self, name: str, scores: list[float]) -> None:
        attention = LayerAttention(HistoGraphConfig((4,) * 3, 1, normalization=name))
        found = attention.normalize(torch.tensor(scores).half())
        assert found.dtype == torch.float16
        expected = attention.normalize(torch.tensor(scores))
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)

    @settings(max_examples=100)
    @given(values=SCORES)
    def test_bounded_weights_sum_to_one_inside_the_ball(self, values: np.ndarray) -> None:
        scores = torch.from_numpy(values).requires_grad_()
        weights = bounded_weights(scores, OPTIONS)
        torch.testing.assert_close(weights.sum(-1), torch.ones(len(scores)), rtol=0, atol=1e-5)
        assert ((weights - 1 / scores.size(1)).norm(dim=-1) <= 2.0 + 1e-5).all()
        weights.square().sum().backward()
        assert scores.grad is not None
        assert scores.grad.isfinite().all()

    @pytest.mark.parametrize("name", sorted({*NORMALIZATIONS} - {"none"}))
    @settings(max_examples=60)
    @given(values=SCORES)
    @example(values=np.full((1, 3), -(2.0**50), np.float32))
    @example(values=np.float32([[-120, -120, -121], [2.0**50, 0, -(2.0**50)]]))
    @example(values=np.float32([[0, 0, -2, -2], [1, 1, 0, -1]]))  # ties
    def test_weights_are_finite_forward_and_backward(self, name: str, values: np.ndarray) -> None:
        scores = torch.from_numpy(values).requires_grad_()
        weights = NORMALIZATIONS[name](scores, OPTIONS)
        weights.square().sum().backward()
        assert weights.isfinite().all()
        assert scores.grad is not None
        assert scores.grad.isfinite().all()

    def test_signed_weights_divide_by_the_sum(self) -> None:
        weights = signed_weights(torch.tensor([3.0, -1.0, 2.0]), OPTIONS)
        torch.testing.assert_close(weights, torch.tensor([0.75, -0.25, 0.5]))

    @pytest.mark.parametrize(
        ("scores", "expected"),
        [
            ([1.0, -1.0], [10.0, -10.0]),  # a sum of zero counts as positive
            ([-1.0, 0.95], [10.0, -9.5]),  # a small negative one stays negative
            ([-1.0, 1.05], [-10.0, 10.5]),
        ],
    )
    def test_a_sum_near_zero_keeps_its_sign(
        self, scores: list[float], expected: list[float]
    ) -> None:
        torch.testing.assert_close(
            signed_weights(torch.tensor(scores), replace(OPTIONS, eps=0.1)), torch.tensor(expected)
        )

    @settings(max_examples=50)
    @given(values=arrays(np.float64, st.integers(2, 8), elements=st.floats(-1, 1)))
    def test_every_filter_inside_the_ball_can_be_expressed(self, values: np.ndarray) -> None:
        weights = torch.from_numpy(values)
        weights = weights - weights.mean()
        weights = 1.9 * weights / weights.norm().clamp(min=1.0) + 1 / len(weights)
        offset = weights - 1 / len(weights)
        scores = offset / (2.0**2 - offset.square().sum()).sqrt()
        torch.testing.assert_close(bounded_weights(scores, OPTIONS), weights)

    def test_gradient_vanishes_slowly_not_at_once(self) -> None:
        scores = torch.tensor([1e4, -3e4, 2e4], dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(lambda s: bounded_weights(s, OPTIONS), scores)
        assert 1e-6 < torch.linalg.matrix_norm(jacobian, 2) < 1e-3

    @pytest.mark.parametrize("name", NORMALIZATIONS)
    def test_gradcheck(self, name: str) -> None:
        scores = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda s: NORMALIZATIONS[name](s, OPTIONS), scores)


#: Equal scores of zero are no weights: the paper's form, and the ablation without a normalisation.
@pytest.mark.parametrize("normalization", sorted(NORMALIZATIONS.keys() - {"signed", "none"}))
def test_every_seed_starts_from_the_mean_over_layers(normalization: str) -> None:
    options = HistoGraphConfig((4,) * 3, 1, dim=8, layer_heads=2, normalization=normalization)
    history = torch.randn(5, 3, 4)
    graphs = Graphs.from_batch(None, 5, None, history.device)
    weights = LayerAttention(options).weights(history, graphs)
    torch.testing.assert_close(weights, torch.full((1, 2, 3), 1 / 3))


def test_encoding_is_the_one_of_vaswani() -> None:
    encoding = sinusoidal_encoding(4, 5)
    assert encoding[3, 2].item() == pytest.approx(math.sin(3 / 10000 ** (2 / 5)))
    assert encoding[3, 3].item() == pytest.approx(math.cos(3 / 10000 ** (2 / 5)))
    assert encoding[0].tolist() == [0, 1, 0, 1, 0]


def test_encoding_has_the_precision_of_the_weights_and_needs_no_file() -> None:
    options = HistoGraphConfig((4,) * 3, 1, dim=8, layer_heads=2)
    exact = sinusoidal_encoding(3, 8)
    assert torch.equal(LayerAttention(options).double().encoding, exact)
    with torch.device("meta"):
        made = LayerAttention(options)
    assert torch.equal(made.to_empty(device="cpu").encoding, exact.float())


def fit_first_difference(normalization: str) -> float:
    """Learn the difference of the last two of three layers; return the error, 2 being no fit."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    history = torch.randn(400, 3, 4, generator=generator)
    history[:, 0] = 0.0
    target = history[:, 2] - history[:, 1]
    index = torch.arange(400) // 20
    graphs = Graphs.from_batch(index, 400, 20, history.device)
    options = HistoGraphConfig((4,) * 3, 1, dim=8, layer_heads=1, normalization=normalization)
    filtered = LayerAttention(options)
    output = torch.nn.Linear(8, 4)
    optimizer = torch.optim.Adam([*filtered.parameters(), *output.parameters()], lr=0.02)
    for _ in range(300):
        nodes, _ = filtered(history, graphs)
        error = (output(nodes) - target).square().mean()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return error.item()


def test_signed_weights_learn_a_first_difference_and_softmax_cannot() -> None:
    # With weights p, q >= 0 on the two layers and any map w, (w p + 1)^2 + (w q - 1)^2 >= 1.
    assert fit_first_difference("bounded") < 0.05
    assert fit_first_difference("softmax") > 0.9
