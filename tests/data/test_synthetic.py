"""The demo set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch_geometric.utils import is_undirected, to_dense_adj

from histograph_post.data import load_data
from histograph_post.errors import DataError


def test_the_same_seed_gives_the_same_graphs():
    def fingerprint(**args):
        return load_data("demo:", args={"num_graphs": 20, **args}).fingerprint()

    assert fingerprint() == fingerprint(seed="0")
    assert fingerprint() != fingerprint(seed=1)


def test_it_is_what_it_says():
    dataset = load_data("demo:", args={"num_graphs": "100"})

    assert (len(dataset), dataset.level, dataset.labels().mean()) == (100, "graph", 0.5)
    assert 10 <= dataset.num_nodes.min() <= dataset.num_nodes.max() <= 40
    assert all(is_undirected(graph.edge_index) for graph in dataset.graphs)
    assert all(graph.num_edges >= 2 * (graph.num_nodes - 1) for graph in dataset.graphs)


def test_averaging_over_neighbours_wipes_out_what_one_step_sees():
    dataset = load_data("demo:")
    labels = dataset.labels()[:, 0]

    def accuracy(num_steps, *statistics):
        """How well statistics over the nodes tell the class after steps of averaging."""
        features = []
        for graph in dataset.graphs:
            adjacency = to_dense_adj(graph.edge_index)[0] + torch.eye(graph.num_nodes)
            scale = adjacency.sum(0).rsqrt()  # [num_nodes]
            averaging = scale[:, None] * adjacency * scale  # [num_nodes, num_nodes], as in a GCN
            x = torch.linalg.matrix_power(averaging, num_steps) @ graph.x  # [num_nodes, 4]
            features.append(torch.cat([statistic(x, 0) for statistic in statistics]).tolist())
        classifier = make_pipeline(StandardScaler(), LogisticRegression())
        return cross_val_score(classifier, np.array(features), labels, cv=5).mean()

    with_spread = [accuracy(num_steps, torch.mean, torch.std) for num_steps in (1, 8, 32)]
    assert with_spread == sorted(with_spread, reverse=True)
    assert with_spread[0] > 0.9
    assert with_spread[-1] < 0.85
    # The weaker sign is in the mean and stays there, however deep.
    assert all(0.65 < accuracy(num_steps, torch.mean) < 0.8 for num_steps in (0, 32))


@pytest.mark.parametrize("args", [{"num_graphs": 1}, {"seed": -1}, {"seed": "x"}, {"size": 3}])
def test_bad_arguments_are_refused(args):
    with pytest.raises(DataError, match=next(iter(args))):
        load_data("demo:", args=args)
