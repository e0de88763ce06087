"""Batches of whole graphs within a number of nodes."""

from __future__ import annotations

import pytest

from histograph_post.data.batching import budget_batches


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
