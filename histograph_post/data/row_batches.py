"""Which graphs and which label rows make up a batch, at every level."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..utils.levels import Level


@dataclass(frozen=True)
class RowBatch:
    """The graphs of a batch and the label rows it predicts."""

    #: Graphs, in the order of the batch: ``[num_graphs]``.
    graphs: np.ndarray
    #: Label rows, in the order of the predictions: ``[rows]``.
    rows: np.ndarray
    #: For node and link rows: the place of the row's graph in the batch, ``[rows]``.
    owners: np.ndarray
    #: For node and link rows: the row's number within its graph, ``[rows]``.
    within: np.ndarray


def row_batches(
    rows: np.ndarray, level: Level, label_ptr: np.ndarray, *, batch_size: int, seed: int | None
) -> Iterator[RowBatch]:
    """Cut label rows into batches of at most ``batch_size`` graphs.

    Args:
        rows: Label rows to cover, each once.
        level: What a row is; a graph is its own row.
        label_ptr: First label row of each graph and the number of rows: ``[num_graphs + 1]``.
        batch_size: Graphs per batch.
        seed: Of the shuffle; None keeps the graphs in order.
    """
    owner = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    graphs = np.unique(owner)
    if seed is not None:
        graphs = np.random.default_rng(seed).permutation(graphs)
    if level == "graph":
        nothing = np.empty(0, dtype=np.int64)
        for start in range(0, len(graphs), batch_size):
            members = graphs[start : start + batch_size]
            yield RowBatch(members, members, nothing, nothing)
        return
    place = np.empty(len(label_ptr), dtype=np.int64)  # of each graph in the shuffled order
    place[graphs] = np.arange(len(graphs))
    order = np.argsort(place[owner], kind="stable")  # rows, by the place of their graph
    rows, owner = rows[order], owner[order]
    for start in range(0, len(graphs), batch_size):
        inside = (place[owner] >= start) & (place[owner] < start + batch_size)  # [rows]
        members = graphs[start : start + batch_size]
        yield RowBatch(
            members,
            rows[inside],
            place[owner[inside]] - start,
            rows[inside] - label_ptr[owner[inside]],
        )


def count_batches(rows: np.ndarray, label_ptr: np.ndarray, *, batch_size: int) -> int:
    """Return how many batches :func:`row_batches` gives."""
    owners = np.searchsorted(label_ptr, rows, side="right") - 1  # graph of each row: [rows]
    return -(-len(np.unique(owners)) // batch_size)
