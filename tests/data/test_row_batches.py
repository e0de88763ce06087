"""Batches cover every row once, whatever the level."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from histograph_post.data.batching import count_batches, row_batches


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
    batches = list(row_batches(rows, "node", ptr, batch_size=batch_size, seed=seed))
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
        batches = row_batches(rows, "graph", ptr, batch_size=3, seed=seed)
        return [int(row) for batch in batches for row in batch.rows]

    assert order(None) == [1, 3, 7, 9]
    assert sorted(order(0)) == [1, 3, 7, 9]
    assert order(0) == order(0)
    assert len({tuple(order(seed)) for seed in range(20)}) > 1
