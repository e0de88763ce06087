"""Statistics of layers against numpy, one graph at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.heads.histograph.mixing import GraphStatistics, WideDropout
from histograph_post.heads.history import STATISTICS, layer_statistics

from .conftest import graphs_of

SIZES = (3, 1, 0, 40, 2, 0)


def random_layers(
    widths: Sequence[int], sizes: Sequence[int], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(sum(sizes), width, generator=generator, dtype=dtype) for width in widths]


def by_hand(layers: Sequence[Tensor], sizes: Sequence[int]) -> np.ndarray:
    """``[num_graphs, 3, sum(D_l)]`` in double precision."""
    rows = np.hstack([layer.double().numpy() for layer in layers])
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    return np.stack(
        [
            np.stack([part.mean(0), part.max(0), part.std(0)])
            if len(part)
            else np.zeros((3, rows.shape[1]))
            for part in parts
        ]
    )


@pytest.mark.parametrize("widths", [(4, 4, 4), (5, 2, 3)], ids=["one width", "mixed"])
def test_they_are_those_of_numpy(widths: tuple[int, ...]) -> None:
    layers = random_layers(widths, SIZES)
    found = layer_statistics(layers, graphs_of(SIZES))
    assert found.shape == (len(SIZES), len(STATISTICS), sum(widths))
    np.testing.assert_allclose(found.numpy(), by_hand(layers, SIZES), rtol=1e-5, atol=1e-6)
    if len(set(widths)) == 1:
        stacked = layer_statistics(torch.stack(layers, dim=1), graphs_of(SIZES))
        torch.testing.assert_close(stacked, found)


def test_a_single_node_and_equal_nodes_do_not_deviate() -> None:
    rows = torch.full((8, 1, 3), 0.1)
    rows[0] = torch.tensor([3.3, -1e4, 1e-8])
    found = layer_statistics(rows, graphs_of([1, 7]))
    assert found[:, 2].eq(0).all()
    assert found[0, 0].tolist() == found[0, 1].tolist() == rows[0, 0].tolist()


def test_small_differences_far_from_zero_are_not_rounded_away() -> None:
    sizes = [5000, 20]
    rows = 1000 + 0.01 * random_layers([3], sizes)[0]
    expected = by_hand([rows], sizes)
    found = layer_statistics([rows], graphs_of(sizes)).double().numpy()
    np.testing.assert_allclose(found[:, 2], expected[:, 2], rtol=1e-4)
    assert np.abs(found[:, 0] - expected[:, 0]).max() <= 1000 * np.finfo(np.float32).eps


def test_gradients_are_right_and_finite_where_nodes_agree() -> None:
    sizes = [3, 1, 5]
    rows = random_layers([4], sizes, torch.float64)[0].requires_grad_()
    graphs = graphs_of(sizes)
    weights = torch.randn(3, 3, 4, dtype=torch.float64)
    # Not of the single node, whose deviation has no slope.
    assert torch.autograd.gradcheck(
        lambda values: (layer_statistics([values], graphs) * weights)[[0, 2]].sum(), rows
    )
    equal = torch.ones(9, 2, 4, requires_grad=True)
    layer_statistics(equal, graphs).sum().backward()
    assert equal.grad is not None
    # Mean and maximum: each node has its share of both.
    torch.testing.assert_close(equal.grad[3], torch.full((2, 4), 2.0))
    torch.testing.assert_close(equal.grad[4], torch.full((2, 4), 2 / 5))


def test_no_nodes_at_all() -> None:
    assert layer_statistics(torch.empty(0, 2, 4), graphs_of([0, 0])).eq(0).all()


def test_a_row_has_what_is_asked_for_and_size_weighs_ten_columns() -> None:
    sizes = (3, 1, 40, 2)
    layers, counts = random_layers((2, 3), sizes), torch.tensor(sizes)
    rows = np.hstack([layer.numpy() for layer in layers])
    parts = np.split(rows, np.cumsum(sizes)[:-1])
    module = GraphStatistics((2, 3), ("max", "sum", "size"))
    statistics = layer_statistics(layers, graphs_of(sizes))
    expected = np.stack(
        [np.r_[part.max(0), part.sum(0), len(part), np.log(len(part))] for part in parts]
    )
    rows_of_graphs = module.rows(statistics, counts).numpy()
    np.testing.assert_allclose(rows_of_graphs, expected, rtol=1e-5, atol=1e-5)
    # Until their scale is known, sums and sizes do not count.
    np.testing.assert_allclose(module(statistics, counts)[:, :5].numpy(), expected[:, :5])
    assert module(statistics, counts)[:, 5:].eq(0).all()

    module.fit([(statistics[:1], counts[:1]), (statistics[1:], counts[1:])])
    found = module(statistics, counts)
    torch.testing.assert_close(found.mean(0), torch.zeros(12), rtol=0, atol=1e-5)
    deviations = found.std(0, correction=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0] * 10 + [10.0] * 2))

    # No column goes further than among these graphs.
    far = module(1e6 * statistics[:1].abs(), torch.tensor([10**6]))
    torch.testing.assert_close(far[0], found.amax(0))
    # Weights of an earlier version come without limits.
    state = {name: value for name, value in module.state_dict().items() if "limits" not in name}
    module.load_state_dict(state)
    assert module(1e6 * statistics[:1].abs(), torch.tensor([10**6])).amin() > 30


@pytest.mark.parametrize("mix", ["statistics", "all", "last"])
@pytest.mark.parametrize("widths", [(4, 4, 4), (5, 2, 5)], ids=["one width", "alternating"])
def test_a_head_describes_a_graph_alike_by_its_layers_and_by_its_statistics(
    mix: str, widths: tuple[int, ...]
) -> None:
    head = HistoGraphHead(widths, 1, dim=4, mix=mix, statistics="mean+max")
    layers, graphs = random_layers(widths, SIZES), graphs_of(SIZES)
    (found,), last = head.describe_by(layer_statistics(layers, graphs), graphs)
    torch.testing.assert_close(found, torch.cat(head.describe(layers, graphs), dim=1))
    torch.testing.assert_close(last, graphs.mean(layers[-1]))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_its_share_at_random(share: float) -> None:
    torch.manual_seed(0)
    dropout, rows = WideDropout(share), torch.ones(501, 1003)  # no multiple of four values
    found = dropout(rows)
    dropped = found.eq(0).double()
    assert found.unique().tolist() == pytest.approx([0.0, 1 / (1 - share)], rel=1e-4)
    for counted in (dropped.mean(), dropped[:, ::2].mean(), dropped[:, 1::4].mean()):
        assert float(counted) == pytest.approx(share, abs=0.01)
    # Neighbours are dropped independently of each other.
    both = (dropped[:, 1:] * dropped[:, :-1]).mean()
    assert float(both) == pytest.approx(share**2, abs=0.01)
    torch.manual_seed(0)
    assert torch.equal(dropout(rows), found)
    assert not torch.equal(dropout(rows), found)


def test_nothing_is_dropped_from_what_is_predicted() -> None:
    rows = torch.randn(3, 5)
    assert torch.equal(WideDropout(0.5).eval()(rows), rows)
    assert torch.equal(WideDropout(0.0)(rows), rows)
