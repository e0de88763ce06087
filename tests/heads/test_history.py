"""Rows of a table: graphs of a history read where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from histograph_post.errors import DataError
from histograph_post.heads import build_head
from histograph_post.heads.history import TableRows

SIZES = (5, 1, 0, 17, 40, 3)


def make_table(num_nodes: int) -> Tensor:
    return torch.randn(num_nodes, 4, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("depth", [4, 3])
@pytest.mark.parametrize("name", ["histograph", "concat"])
def test_rows_of_a_table_give_what_a_copy_of_them_gives(toy: Any, name: str, depth: int) -> None:
    head = build_head(name, [6] * 4, 3, dim=8, history_layers=depth).eval()
    table, starts = make_table(110), np.array([70, 3, 9, 50, 10, 0])
    places = [range(start, start + size) for start, size in zip(starts, SIZES, strict=True)]
    own = table[[place for places_of in places for place in places_of]]
    batch = toy.batch(SIZES)
    found = head(TableRows(table, starts, np.array(SIZES)), batch, num_graphs=len(SIZES))
    assert torch.equal(found, head(own, batch, num_graphs=len(SIZES)))


@pytest.mark.parametrize(
    ("starts", "sizes", "found"),
    [
        ([0], [4, 6], "1"),
        ([0, 5], [4, 6], "0 to 11"),
        ([-1, 4], [4, 6], "-1 to 10"),
        ([0, 4], [4, -2], "-2"),
    ],
)
def test_rows_that_are_not_in_the_table_are_refused(
    starts: list[int], sizes: list[int], found: str
) -> None:
    with pytest.raises(DataError, match=f"found.*{found}"):
        TableRows(make_table(10), np.array(starts), np.array(sizes))


def test_rows_of_other_graphs_than_those_of_the_batch_are_refused(toy: Any) -> None:
    rows = TableRows(make_table(10), np.array([0, 4]), np.array([4, 6]))
    with pytest.raises(DataError, match=r"found graphs of \[3, 7\] nodes"):
        toy.head([6] * 4)(rows, toy.batch((3, 7)))


def test_where_rows_lie_cannot_be_changed_from_outside() -> None:
    starts, sizes = np.array([0, 3]), np.array([3, 2])
    rows = TableRows(make_table(5), starts, sizes)
    starts[1], sizes[1] = 10**6, 10**6
    assert rows.starts.tolist() == [0, 3]
    assert rows.sizes.tolist() == [3, 2]
