from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from histograph_post.heads.ragged import Graphs, bucket_layout

from .conftest import graphs_of


def test_sums_and_means_inside_each_graph() -> None:
    graphs = graphs_of([2, 0, 3])
    rows = torch.arange(10.0).view(5, 2)
    torch.testing.assert_close(graphs.sum(rows), torch.tensor([[2.0, 4], [0, 0], [18, 21]]))
    torch.testing.assert_close(graphs.mean(rows), torch.tensor([[1.0, 2], [0, 0], [6, 7]]))
    torch.testing.assert_close(
        graphs.spread(torch.tensor([5, 6, 7])), torch.tensor([5, 5, 7, 7, 7])
    )
    assert graphs.empty_to_zero(torch.ones(3, 2)).tolist() == [[1, 1], [0, 0], [1, 1]]


def test_without_a_batch_vector_all_nodes_are_one_graph() -> None:
    graphs = Graphs.from_batch(None, 3, None, torch.device("cpu"))
    assert graphs.sizes.tolist() == [3]
    assert Graphs.from_batch(None, 3, 2, torch.device("cpu")).sizes.tolist() == [3, 0]


@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    padding_budget=st.integers(0, 2000),
    largest=st.integers(0, 40),
    capacity=st.none() | st.integers(0, 4000),
)
def test_buckets_hold_every_node_once_within_the_budget(
    sizes: list[int], padding_budget: int, largest: int, capacity: int | None
) -> None:
    graphs = graphs_of(sizes)
    layout = bucket_layout(
        graphs, padding_budget=padding_budget, largest=largest, capacity=capacity
    )
    rows = torch.arange(1.0, len(graphs.index) + 1).unsqueeze(1)
    for bucket in layout.buckets:
        waste = len(bucket.graphs) * bucket.width**2 - int(bucket.sizes.square().sum())
        assert waste <= padding_budget
        assert len(bucket.graphs) == 1 or bucket.width <= largest
        scores = len(bucket.graphs) * bucket.width**2
        assert len(bucket.graphs) == 1 or capacity is None or scores <= capacity
    assert sorted(torch.cat([b.graphs for b in layout.buckets]).tolist() if sum(sizes) else []) == [
        graph for graph, size in enumerate(sizes) if size
    ]
    if not sum(sizes):
        return
    starts = np.cumsum(sizes) - sizes
    parts = layout.pad(rows)  # [graphs, width, 1] each
    for bucket, padded in zip(layout.buckets, parts, strict=True):
        assert torch.equal(bucket.pad(rows[bucket.nodes]), padded)
        for place, graph in enumerate(bucket.graphs.tolist()):
            size = sizes[graph]
            expected = torch.arange(size) + starts[graph] + 1.0
            assert torch.equal(padded[place, :size, 0], expected)
            assert not padded[place, size:].any()
    assert torch.equal(layout.unpad(parts), rows)
