"""Benchmark sets on the real files, where they are at hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from histograph_post.data import load_data

from .conftest import listing

pytestmark = pytest.mark.usefixtures("processed_once")


@pytest.mark.parametrize(
    ("spec", "args", "num_graphs", "num_nodes", "num_features", "classes"),
    [
        ("tu:MUTAG", {}, 188, 3371, 7, [63, 125]),
        ("tu:PROTEINS", {}, 1113, 43471, 3, [663, 450]),
        ("tu:PROTEINS", {"node_attr": True}, 1113, 43471, 4, [663, 450]),
        ("tu:IMDB-BINARY", {}, 1000, 19773, 136, [500, 500]),
        ("tu:IMDB-BINARY", {"features": "constant"}, 1000, 19773, 1, [500, 500]),
    ],
)
def test_real_graph_sets(spec, args, num_graphs, num_nodes, num_features, classes, shared_data):
    dataset = load_data(spec, root=shared_data, args=args)

    assert (len(dataset), dataset.num_nodes.sum()) == (num_graphs, num_nodes)
    assert {graph.x.size(1) for graph in dataset.graphs} == {num_features}
    assert np.bincount(dataset.labels()[:, 0].astype(int)).tolist() == classes
    assert dataset.level == "graph"
    assert bool(dataset.notes) == spec.startswith("tu:IMDB")


@pytest.mark.parametrize(
    ("spec", "args", "shape", "num_edges", "folds", "parts"),
    [
        ("planetoid:Cora", {}, (2708, 1433), 10556, 1, (140, 500, 1000)),
        ("planetoid:Cora", {"split": "geom-gcn"}, (2708, 1433), 10556, 10, (1192, 796, 497)),
        ("actor:", {}, (7600, 932), 30019, 10, (3648, 2432, 1520)),
        ("wiki:chameleon", {}, (2277, 2325), 36101, 10, (1092, 729, 456)),
    ],
)
def test_real_node_sets(spec, args, shape, num_edges, folds, parts, shared_data):
    dataset = load_data(spec, root=shared_data, args=args)

    (graph,) = dataset.graphs
    assert tuple(graph.x.shape) == shape
    assert graph.num_edges == num_edges
    assert set(graph.to_dict()) == {"x", "edge_index", "y"}
    assert dataset.labels().shape == (shape[0], 1)
    assert len(dataset.official.folds) == folds
    assert tuple(len(part) for part in dataset.official.folds[0].parts) == parts


def test_normalised_features_sum_to_one(shared_data):
    plain = load_data("planetoid:Cora", root=shared_data).graphs[0].x
    scaled = load_data(
        "planetoid:cora", root=shared_data / "planetoid", args={"normalize_features": "true"}
    )

    torch.testing.assert_close(scaled.graphs[0].x, plain / plain.sum(1, keepdim=True))
    assert "normalize_features" in scaled.notes[0]


def test_the_root_is_not_written_to(shared_data, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = listing(shared_data)

    for spec in ("tu:MUTAG", "planetoid:Cora", "actor:"):
        load_data(spec, root=shared_data)

    assert listing(shared_data) == before
