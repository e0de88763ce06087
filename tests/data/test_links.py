"""Link tasks made from graphs: nothing leaks, negatives are true ones, the seed decides."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.utils import erdos_renyi_graph, is_undirected, to_undirected

from histograph_post.data import GraphDataset, LinkOptions, from_graphs, load_data
from histograph_post.data.labels import NonEdges, numbered_pairs, pair_numbers
from histograph_post.errors import DataError, SplitError
from histograph_post.splits import Splits, resolve_splits

Pairs = set[frozenset[int]]


def random_graph(num_nodes: int = 40, density: float = 0.2, *, seed: int = 0, **more: Any) -> Data:
    torch.manual_seed(seed)
    edges = erdos_renyi_graph(num_nodes, density)
    return Data(x=torch.randn(num_nodes, 3), edge_index=edges, **more)


def pair_set(pairs: torch.Tensor) -> Pairs:
    return {frozenset(pair) for pair in pairs.t().tolist() if pair[0] != pair[1]}


def part(dataset: GraphDataset, name: str, label: int) -> list[tuple[int, frozenset[int]]]:
    """Return the (graph, pair) of every row of a part with this label."""
    assert dataset.official is not None
    rows = getattr(dataset.official.folds[0], name)
    graphs = np.searchsorted(dataset.label_ptr, rows, side="right") - 1
    labels = dataset.labels()[:, 0]
    found = []
    for row, graph in zip(rows, graphs, strict=True):
        pair = dataset.graphs[graph].edge_label_index[:, row - dataset.label_ptr[graph]]
        if labels[row] == label:
            found.append((int(graph), frozenset(pair.tolist())))
    return found


def check_link_task(dataset: GraphDataset, given: list[Data]) -> None:
    """Assert all that a link task promises, whatever the graphs."""
    links = {name: part(dataset, name, 1) for name in ("train", "valid", "test")}
    every = [link for found in links.values() for link in found]
    real = {(i, pair) for i, graph in enumerate(given) for pair in pair_set(graph.edge_index)}
    assert len(every) == len(set(every))
    assert set(every) == real
    negatives = part(dataset, "valid", 0) + part(dataset, "test", 0)
    assert len(negatives) == len(set(negatives))
    assert not set(negatives) & real
    assert all(len(pair) == 2 for _, pair in negatives)  # no self loops
    assert not part(dataset, "train", 0)
    train = set(links["train"])
    for number, (graph, before) in enumerate(zip(dataset.graphs, given, strict=True)):
        # All edges of training links, in the directions they had, and no edge of any other link.
        kept = [
            edge
            for edge in before.edge_index.t().tolist()
            if edge[0] == edge[1] or (number, frozenset(edge)) in train
        ]
        assert graph.edge_index.t().tolist() == kept


@settings(max_examples=60)
@given(
    num_nodes=st.integers(1, 12),
    pairs=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), max_size=30),
    number=st.integers(0, 80),
)
def test_non_edges_are_drawn_from_exactly_the_pairs_that_no_edge_joins(num_nodes, pairs, number):
    known = [pair for pair in pairs if max(pair) < num_nodes]
    edges = np.array(known, dtype=np.int64).reshape(-1, 2).T
    free = {frozenset((u, v)) for v in range(num_nodes) for u in range(v)} - set(
        map(frozenset, known)
    )
    non_edges = NonEdges(num_nodes, edges)

    drawn = non_edges.draw(number, np.random.default_rng(0))

    assert non_edges.count == len(free)
    found = [frozenset(pair) for pair in drawn.T.tolist()]
    assert len(found) == len(set(found)) == min(number, len(free))
    assert set(found) <= free
    assert (drawn[0] < drawn[1]).all()


def test_every_non_edge_is_equally_likely():
    edges = np.array([[0, 1, 2, 0], [1, 2, 3, 3]])  # a square of four nodes, and a fifth one
    non_edges = NonEdges(5, edges)
    random = np.random.default_rng(0)
    numbers = [int(pair_numbers(non_edges.draw(1, random))[0]) for _ in range(6000)]

    _, counts = np.unique(numbers, return_counts=True)

    assert len(counts) == 6  # two diagonals, four pairs with the fifth node
    assert np.abs(counts - 1000).max() < 4 * np.sqrt(1000)


@given(st.integers(1, 2**31), st.integers(0, 2**31))
def test_pairs_and_their_numbers_agree_in_graphs_of_any_size(high, low):
    pair = np.array([[min(high - 1, low)], [high]])

    np.testing.assert_array_equal(numbered_pairs(pair_numbers(pair)), pair)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_of_the_held_out_links_is_left_in_the_graph(seed):
    graph = random_graph(seed=seed)
    num_links = graph.edge_index.size(1) // 2

    dataset = from_graphs([graph], level="link")

    check_link_task(dataset, [graph])
    assert (dataset.level, dataset.target_names) == ("link", ["link"])
    assert is_undirected(dataset.graphs[0].edge_index)
    for name, share in (("valid", 0.05), ("test", 0.1)):
        assert (
            len(part(dataset, name, 1)) == len(part(dataset, name, 0)) == round(share * num_links)
        )
    assert "messages run along training links" in dataset.notes[-1]


def test_a_link_of_a_directed_graph_is_held_out_in_both_directions():
    torch.manual_seed(0)
    edges = torch.randint(0, 20, (2, 150))  # some pairs joined both ways, twice, or to themselves
    graph = Data(x=torch.ones(20, 1), edge_index=edges)

    dataset = from_graphs([graph], level="link", links=LinkOptions((0.5, 0.2, 0.3)))

    check_link_task(dataset, [graph])
    assert any("directed edges in 1 graphs" in note for note in dataset.notes)
    assert any("self loops carry messages" in note for note in dataset.notes)


def test_attributes_of_edges_follow_their_edges():
    graph = random_graph(edge_attr=None)
    graph.edge_attr = graph.edge_index.t().float()  # an edge's attribute names the edge
    graph.y = torch.zeros(40)
    graph.train_mask = torch.ones(40, dtype=torch.bool)

    (found,) = from_graphs([graph], level="link").graphs

    assert torch.equal(found.edge_attr, found.edge_index.t().float())
    assert torch.equal(found.x, graph.x)
    assert "y" not in found
    assert "train_mask" not in found
    assert "y" in graph  # what was given is not changed
    assert "edge_label_index" not in graph


def test_the_seed_decides_and_nothing_else_does():
    graph = random_graph()
    options = LinkOptions(seed=3)
    first = from_graphs([graph], level="link", links=options)
    torch.manual_seed(99)
    np.random.default_rng(99).random()

    again = from_graphs([graph], level="link", links=options)
    other = from_graphs([graph], level="link", links=LinkOptions(seed=4))

    assert first.fingerprint() == again.fingerprint()
    assert first.official == again.official
    assert first.fingerprint() != other.fingerprint()


@pytest.mark.parametrize("ratio", [0.5, 3])
def test_the_number_of_negatives_can_be_chosen(ratio):
    graph = random_graph(60, 0.1)
    options = LinkOptions(shares=(0.6, 0.2, 0.2), negatives=ratio)

    dataset = from_graphs([graph], level="link", links=options)

    check_link_task(dataset, [graph])
    for name in ("valid", "test"):
        assert len(part(dataset, name, 0)) == round(ratio * len(part(dataset, name, 1)))


def test_several_graphs_share_one_split_and_a_dense_one_gives_fewer_negatives():
    clique = Data(
        x=torch.ones(7, 3), edge_index=to_undirected(torch.combinations(torch.arange(7)).t())
    )
    lonely = Data(x=torch.ones(3, 3), edge_index=torch.empty(2, 0, dtype=torch.int64))
    graphs = [random_graph(15, 0.3, seed=1), clique, lonely, random_graph(20, 0.2, seed=2)]

    dataset = from_graphs(graphs, level="link", links=LinkOptions((0.5, 0.25, 0.25)))

    check_link_task(dataset, graphs)
    dense = [pair for name in ("valid", "test") for i, pair in part(dataset, name, 1) if i == 1]
    assert f"{len(dense)} negatives fewer than asked for" in dataset.notes[-1]
    assert np.diff(dataset.label_ptr)[2] == 0
    batch = Batch.from_data_list(dataset.graphs)
    assert batch.edge_label.numel() == dataset.label_ptr[-1]


def test_degrees_made_into_features_do_not_count_the_held_out_links():
    graph = random_graph()
    del graph["x"]
    graph.num_nodes = 40

    dataset = from_graphs([graph], level="link", features="degree")

    (found,) = dataset.graphs
    degrees = torch.bincount(found.edge_index[0], minlength=40)
    assert torch.equal(found.x[:, 0], degrees.float())
    assert int(degrees.sum()) < graph.edge_index.size(1)


def test_graphs_that_name_their_pairs_are_left_alone():
    pairs, labels = torch.tensor([[0, 1], [2, 3]]), torch.tensor([1.0, 0.0])
    graph = random_graph(edge_label_index=pairs, edge_label=labels)

    dataset = from_graphs([graph], level="link")

    assert torch.equal(dataset.graphs[0].edge_label_index, pairs)
    assert torch.equal(dataset.graphs[0].edge_index, graph.edge_index)
    assert dataset.official is None
    with pytest.raises(DataError, match="expected graphs without edge_label_index"):
        from_graphs([graph], level="link", links=LinkOptions(seed=1))


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"link_seed": 1}, DataError, "found link_seed without level=link"),
        ({"level": "node"}, DataError, "level=node, expected one of graph, link"),
        ({"level": "link", "link_seed": "x"}, DataError, "expected a whole number"),
        ({"level": "link", "link_seed": -1}, DataError, "link_seed: found -1"),
        (
            {"level": "link", "link_negatives": "many"},
            DataError,
            "link_negatives=many, expected a n",
        ),
        ({"level": "link", "link_negatives": 0}, DataError, "link_negatives: found 0"),
        ({"level": "link", "link_split": "0.9,0.2"}, SplitError, "link_split: found '0.9,0.2'"),
    ],
)
def test_arguments_are_checked(args, error, message):
    with pytest.raises(error, match=message):
        load_data("demo:", args=args)


def test_arguments_work_as_text_and_as_values():
    text = {"level": "link", "link_seed": "2", "link_split": "0.5,0.2,0.3", "link_negatives": "2"}
    values = {"level": "link", "link_seed": 2, "link_split": (0.5, 0.2, 0.3), "link_negatives": 2}

    one, other = (load_data("demo:", args={"num_graphs": 5, **args}) for args in (text, values))

    assert one.fingerprint() == other.fingerprint()
    assert one.official is not None
    assert one.official.kind == "links:0.5,0.2,0.3"


def test_graphs_without_edges_have_no_links():
    lonely = Data(x=torch.ones(3, 3), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(DataError, match="no edges between different nodes"):
        from_graphs([lonely], level="link")


def test_a_split_that_scores_links_the_model_has_seen_is_refused(tmp_path):
    dataset = from_graphs([random_graph()], level="link")
    assert dataset.official is not None

    assert resolve_splits(dataset, None) == dataset.official
    for spec in ("random", "kfold:4"):
        with pytest.raises(SplitError, match="links to score that messages run along"):
            resolve_splits(dataset, spec)
    dataset.official.save(tmp_path / "splits.json")
    assert resolve_splits(dataset, str(tmp_path / "splits.json")) == dataset.official
    assert isinstance(dataset.official, Splits)


@pytest.mark.parametrize(
    ("spec", "num_links", "directed"),
    [("planetoid:Cora", 5278, False), ("actor:", 26659, True), ("ogbg:molesol", 15428, False)],
)
@pytest.mark.usefixtures("processed_once")
def test_real_graphs(spec, num_links, directed, shared_data):
    given = load_data(spec, root=shared_data)

    dataset = load_data(spec, root=shared_data, args={"level": "link"})

    check_link_task(dataset, given.graphs)
    counts = [len(part(dataset, name, 1)) for name in ("train", "valid", "test")]
    assert sum(counts) == num_links
    assert counts[1:] == [round(0.05 * num_links), round(0.1 * num_links)]
    assert any("directed" in note for note in dataset.notes) == directed
