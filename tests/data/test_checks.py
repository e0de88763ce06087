"""Features of featureless graphs, against PyG's own transforms."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import OneHotDegree
from torch_geometric.utils import to_undirected

from histograph_post.data import from_graphs
from histograph_post.errors import DataError


def star(leaves, extra_nodes=0):
    edges = torch.stack([torch.zeros(leaves, dtype=torch.long), torch.arange(1, leaves + 1)])
    return Data(edge_index=to_undirected(edges), num_nodes=leaves + 1 + extra_nodes)


def test_auto_is_pygs_one_hot_degree_up_to_the_highest_degree():
    graphs = [star(3), star(5, extra_nodes=1)]

    dataset = from_graphs(graphs)

    for graph, given in zip(dataset.graphs, graphs, strict=True):
        assert torch.equal(graph.x, OneHotDegree(5)(given.clone()).x)
    assert dataset.notes == ["no node features: x = one-hot degree (6 columns, max_degree=5)"]


def test_max_degree_fixes_the_width_and_higher_degrees_share_the_last_column():
    narrow = from_graphs([star(5)], max_degree=3)
    wide = from_graphs([star(5)], features="onehot-degree", max_degree=9)

    assert narrow.graphs[0].x.argmax(1).tolist() == [3, 1, 1, 1, 1, 1]
    assert narrow.graphs[0].x.shape == (6, 4)
    assert "1 nodes of higher degree in the last column" in narrow.notes[0]
    assert wide.graphs[0].x.shape == (6, 10)


@pytest.mark.parametrize(
    ("kind", "hub", "leaf"),
    [("degree", 4.0, 1.0), ("log-degree", 1.609438, 0.693147), ("constant", 1.0, 1.0)],
)
def test_one_column_features(kind, hub, leaf):
    graph = from_graphs([star(4)], features=kind).graphs[0]

    torch.testing.assert_close(graph.x, torch.tensor([[hub]] + [[leaf]] * 4))


def test_auto_does_not_make_thousands_of_columns():
    dataset = from_graphs([star(1500)])

    assert dataset.graphs[0].x.shape == (1501, 1)
    assert "log-degree" in dataset.notes[0]


def test_one_hot_columns_that_would_fill_the_memory_are_refused():
    with pytest.raises(DataError, match=r"would take 4\.7 GiB .* expected a smaller max_degree"):
        from_graphs([star(1500)], features="onehot-degree", max_degree=840_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"features": "pagerank"}, "features=pagerank is unknown, expected one of auto, onehot"),
        ({"features": "constant", "max_degree": 3}, "max_degree=3 with features=constant"),
        ({"max_degree": 0}, "max_degree=0 .* expected at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(DataError, match=message):
        from_graphs([star(2)], **options)


def test_features_of_their_own_are_never_replaced():
    graph = Data(x=torch.ones(2, 3), edge_index=torch.tensor([[0], [1]]))

    with pytest.raises(DataError, match=r"features of their own \(3 columns\)"):
        from_graphs([graph], features="degree")


def test_nodes_are_counted_from_the_edges_when_nothing_else_says_so():
    dataset = from_graphs([Data(edge_index=torch.tensor([[0, 3], [1, 0]]))])

    assert dataset.num_nodes.tolist() == [4]
    assert dataset.notes[0].startswith("number of nodes read off the edges")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("x", torch.ones(2, 3, device="meta"), "x is without values, expected a dense tensor"),
        ("y", torch.ones(1, device="meta"), "y is without values, expected a dense tensor"),
        ("y", -(16**5000), "y is a whole number of 20001 bits, expected a dense tensor"),
        ("num_nodes", 16**5000, "num_nodes is a whole number of 20001 bits"),
    ],
    ids=["meta", "meta label", "long label", "long count"],  # pytest cannot write such numbers
)
def test_what_has_no_values_or_too_many_digits_is_refused(attribute, value, message):
    graph = star(1)
    graph[attribute] = value

    with pytest.raises(DataError, match=f"graph 0: {message}"):
        from_graphs([graph])


def test_a_number_beyond_64_bits_that_is_no_label_is_left_out():
    graph = star(1)
    graph.code = 2**128

    dataset = from_graphs([graph])

    assert "code" not in dataset.graphs[0]
    assert "attribute code (int) left out in 1 graphs" in dataset.notes
