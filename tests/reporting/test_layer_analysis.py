"""The measures of over-smoothing, against their definitions written out."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_distances, euclidean_distances
from torch import Tensor

from histograph_post.reporting.layer_analysis import (
    Sample,
    choose_graphs,
    dirichlet_energy,
    distance_to,
    mean_cosine_distance,
    mean_pairwise_distance,
    measure_smoothness,
)


def random_rows(seed: int, num_nodes: int, dim: int = 5) -> Tensor:
    return torch.randn(num_nodes, dim, generator=torch.Generator().manual_seed(seed))


def over_pairs(matrix: np.ndarray) -> float:
    return float(np.mean([matrix[u, v] for u, v in itertools.combinations(range(len(matrix)), 2)]))


@given(st.integers(0, 10**6), st.integers(2, 12))
def test_pairs_are_measured_as_brute_force_does(seed: int, num_nodes: int) -> None:
    rows = random_rows(seed, num_nodes)
    values = rows.double().numpy()
    assert mean_pairwise_distance(rows) == pytest.approx(over_pairs(euclidean_distances(values)))
    assert mean_cosine_distance(rows) == pytest.approx(over_pairs(cosine_distances(values)))


def test_dirichlet_energy_by_hand() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    # both directions of two edges: 2 * (25 + 1), over three nodes
    assert dirichlet_energy(rows, edges) == pytest.approx(52 / 3)


def test_distances_to_the_last_layer_by_hand() -> None:
    rows, last = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 1.0], [0.0, 5.0]])
    assert distance_to(rows, last) == pytest.approx((math.sqrt(2) + 3) / 2)


def test_a_collapsed_layer_keeps_its_last_digits() -> None:
    rows = 1000 + 1e-3 * random_rows(0, 40).double()
    oracle = over_pairs(np.linalg.norm(rows.numpy()[:, None] - rows.numpy()[None], axis=-1))
    assert mean_pairwise_distance(rows) == pytest.approx(oracle, rel=1e-7)
    units = rows.numpy() / np.linalg.norm(rows.numpy(), axis=1, keepdims=True)
    pairs = itertools.combinations(units, 2)
    oracle = float(np.mean([((u - v) ** 2).sum() / 2 for u, v in pairs]))
    assert mean_cosine_distance(rows) == pytest.approx(oracle, rel=1e-6)


def test_nodes_without_a_direction_do_not_count() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert mean_cosine_distance(rows) == pytest.approx(1.0)
    assert math.isnan(mean_pairwise_distance(rows[:1]))
    assert math.isnan(mean_cosine_distance(rows[:2]))


def test_a_sample_is_measured_graph_by_graph() -> None:
    sizes = [3, 1, 5, 4]
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    edges = torch.tensor([[0, 1, 4, 8, 9], [1, 0, 8, 4, 10]])
    rows = random_rows(1, int(ptr[-1]))
    sample = Sample(np.arange(4), 4, [rows], ptr, edges)
    found = measure_smoothness(rows, sample)
    graphs = [rows[a:b].double().numpy() for a, b in itertools.pairwise(ptr)]
    pairwise = [over_pairs(euclidean_distances(graph)) for graph in graphs if len(graph) > 1]
    assert found.pairwise.median == pytest.approx(np.median(pairwise))
    assert found.pairwise.low == pytest.approx(np.quantile(pairwise, 0.25))
    squares = ((rows[edges[0]] - rows[edges[1]]).double() ** 2).sum(1).numpy()
    energies = [squares[:2].sum() / 3, squares[2:4].sum() / 5, squares[4:].sum() / 4]
    assert found.dirichlet.median == pytest.approx(np.median(energies))


def test_a_sample_is_bounded_and_always_the_same() -> None:
    sizes = np.full(1000, 30)
    chosen = choose_graphs(sizes, max_graphs=50, max_nodes=600)
    assert len(chosen) == 20
    assert np.array_equal(chosen, choose_graphs(sizes, max_graphs=50, max_nodes=600))
    assert np.array_equal(choose_graphs(np.array([7, 8])), [0, 1])
    assert len(choose_graphs(np.array([10**6]), max_nodes=10)) == 1  # never nothing
