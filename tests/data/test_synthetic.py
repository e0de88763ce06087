"""The demo set."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from torch_geometric.utils import is_undirected

from histograph_post.data import load_data
from histograph_post.errors import DataError


def test_the_same_seed_gives_the_same_graphs():
    assert load_data("demo:").fingerprint() == load_data("demo:", args={"seed": "0"}).fingerprint()
    assert load_data("demo:").fingerprint() != load_data("demo:", args={"seed": 1}).fingerprint()


def test_it_is_what_it_says():
    dataset = load_data("demo:", args={"num_graphs": "100"})

    assert (len(dataset), dataset.level, dataset.labels().mean()) == (100, "graph", 0.5)
    assert 10 <= dataset.num_nodes.min() <= dataset.num_nodes.max() <= 40
    assert all(is_undirected(graph.edge_index) for graph in dataset.graphs)
    assert all(graph.num_edges >= 2 * (graph.num_nodes - 1) for graph in dataset.graphs)


def test_the_label_is_in_the_neighbourhoods_and_not_in_the_nodes_alone():
    dataset = load_data("demo:")
    labels = dataset.labels()[:, 0]
    nodes, alike = [], []
    for graph in dataset.graphs:
        colours = graph.x.argmax(1)
        source, target = graph.edge_index
        nodes.append(graph.x.mean(0).numpy())
        alike.append([(colours[source] == colours[target]).float().mean().item()])

    def accuracy(features):
        return cross_val_score(LogisticRegression(), np.array(features), labels, cv=5).mean()

    assert accuracy(nodes) < 0.6
    assert 0.75 < accuracy(alike) < 0.97


@pytest.mark.parametrize("args", [{"num_graphs": 1}, {"seed": -1}, {"seed": "x"}, {"size": 3}])
def test_bad_arguments_are_refused(args):
    with pytest.raises(DataError, match=next(iter(args))):
        load_data("demo:", args=args)
