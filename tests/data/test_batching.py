"""A batch is the one that PyTorch Geometric makes, and covers every row once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.data import Batch, Data

from histograph_post.data.batching import budget_batches, count_batches, make_batch, row_batches

KINDS = (torch.float32, torch.float64, torch.int64, torch.bool)


def _assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            _assert_same(own, other)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name, value in expected.items():
            _assert_same(found[name], value)
    else:
        assert found == expected


def _assert_same_batch(graphs: list[Data], found: Batch) -> None:
    expected = Batch.from_data_list(graphs)
    assert type(found) is type(expected)
    assert found.num_graphs == expected.num_graphs
    _assert_same(found.to_dict(), expected.to_dict())
    # Each graph comes out of the batch again.
    for own, other in zip(found.to_data_list(), expected.to_data_list(), strict=True):
        _assert_same(own.to_dict(), other.to_dict())


@st.composite
def _graphs(draw: st.DrawFn) -> list[Data]:
    widths = draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=3, max_size=3))
    has_edges, has_pairs = draw(st.booleans()), draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))

    def values(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.randint(0, 2, shape, generator=generator).to(kind)

    graphs = []
    for nodes, edges, pairs in draw(
        st.lists(
            st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)),
            min_size=1,
            max_size=6,
        )
    ):
        graph = Data(
            edge_index=torch.randint(0, nodes, (2, edges), generator=generator),
            x=values(kinds[0], nodes, widths[0]),
            y=values(kinds[1], 1, widths[1]),
        )
        if has_edges:
            graph.edge_attr = values(kinds[2], edges, widths[2])
        if has_pairs:
            graph.edge_label_index = torch.randint(0, nodes, (2, pairs), generator=generator)
            graph.train_mask = values(torch.bool, nodes)
        graphs.append(graph)
    return graphs


@given(_graphs())
def test_plain_graphs(graphs: list[Data]) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Batch:
        raise AssertionError("plain graphs need no work per graph")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batch, "from_data_list", refuse)
        found = make_batch(graphs)
    _assert_same_batch(graphs, found)


class Pair(Data):
    """Counts its second graph's nodes in an attribute of its own."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        return 100 if key == "other_index" else super().__inc__(key, value, *args, **kwargs)


EDGES = torch.tensor([[0, 1], [1, 0]])


@pytest.mark.parametrize(
    "attributes",
    [
        {"y": torch.tensor(3.0)},
        {"y": 1},
        {"name": "ethanol"},
        {"sizes": [1, 2]},
        {"num_nodes": 2},
        {"x": None},
        {"face": torch.tensor([[0], [1], [1]])},
        {"x_batch": torch.tensor([0, 0])},
        {"adj": torch.eye(2)},
        {"extra": {"a": torch.ones(2)}},
        {"node_index": torch.tensor([0, 1], dtype=torch.int32)},
        {"index_mask": torch.tensor([True, False])},
        {"pos": torch.rand(2, 3)},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_other_attributes(attributes: dict[str, Any]) -> None:
    graph = Data(x=torch.ones(2, 1), edge_index=EDGES)
    for name, value in attributes.items():
        graph[name] = value
    if graph.x is None:
        graph.num_nodes = 2
    graphs = [graph, graph.clone(), graph.clone()]
    _assert_same_batch(graphs, make_batch(graphs))


def test_graphs_with_rules_of_their_own() -> None:
    graph = Pair(x=torch.ones(2, 1), edge_index=EDGES, other_index=torch.tensor([0, 1]))
    assert make_batch([graph, graph]).other_index.tolist() == [0, 1, 100, 101]


def test_the_graphs_are_not_changed() -> None:
    graphs = [Data(x=torch.ones(2, 1), edge_index=EDGES.clone()) for _ in range(2)]
    batch = make_batch(graphs)
    batch.x.zero_()
    batch.edge_index.zero_()
    assert all(graph.x.sum() == 2 and torch.equal(graph.edge_index, EDGES) for graph in graphs)


def test_one_graph_is_not_shared_with_its_batch() -> None:
    graph = Data(x=torch.ones(2, 1), edge_index=EDGES.clone())
    make_batch([graph]).x.zero_()
    assert graph.x.sum() == 2


def test_attributes_that_some_graphs_lack_are_refused() -> None:
    with pytest.raises(KeyError, match="y"):
        make_batch([Data(x=torch.ones(1, 1), y=torch.ones(1)), Data(x=torch.ones(1, 1))])


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=12),
    st.integers(1, 5),
    st.one_of(st.none(), st.integers(0, 3)),
    st.data(),
)
def test_node_rows_are_found_in_their_graphs(
    sizes: list[int], batch_size: int, seed: int | None, data: st.DataObject
) -> None:
    ptr = np.concatenate([[0], np.cumsum(sizes)])
    rows = np.array(
        sorted(data.draw(st.sets(st.integers(0, int(ptr[-1]) - 1)))) if ptr[-1] else [],
        dtype=np.int64,
    )
    seen: list[int] = []
    batches = list(row_batches(rows, ptr, batch_size=batch_size, seed=seed))
    assert len(batches) == count_batches(rows, ptr, batch_size=batch_size)
    for batch in batches:
        assert 1 <= len(batch.graphs) <= batch_size
        assert (ptr[batch.graphs[batch.owners]] + batch.within == batch.rows).all()
        seen += batch.rows.tolist()
    assert sorted(seen) == rows.tolist()


def test_graph_rows_are_shuffled_by_the_seed_and_else_in_order() -> None:
    ptr = np.arange(11)
    rows = np.array([7, 1, 3, 9])

    def order(seed: int | None) -> list[int]:
        batches = row_batches(rows, ptr, batch_size=3, seed=seed)
        return [int(row) for batch in batches for row in batch.rows]

    assert order(None) == [1, 3, 7, 9]
    assert sorted(order(0)) == [1, 3, 7, 9]
    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(20)}) > 1


@pytest.mark.parametrize("budget", [1, 5, 100])
def test_budget_batches_cover_all_graphs_in_order(budget: int) -> None:
    sizes = [3, 1, 1, 9, 2, 2, 1]
    batches = list(budget_batches(sizes, budget))
    assert [graph for batch in batches for graph in batch] == list(range(7))
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        nodes = sum(sizes[graph] for graph in batch)
        assert nodes <= budget or len(batch) == 1
        if following is not None:  # no batch could have taken one more graph
            assert nodes + sizes[following.start] > budget
    assert list(budget_batches([], budget)) == []
