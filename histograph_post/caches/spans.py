"""Graphs of a batch that are neighbours in a shard, and are read in one go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Graphs ``start`` to ``stop`` of a shard, rows ``first_row`` to ``stop_row`` of it."""

    shard: int
    start: int
    stop: int
    first_row: int
    stop_row: int
    #: Of the first of these graphs in the batch.
    position: int


class Runs(NamedTuple):
    """The runs of a batch in its order, each ``[runs]``; see :class:`Run`."""

    shards: Integers
    starts: Integers
    stops: Integers
    first_rows: Integers
    stop_rows: Integers
    positions: Integers

    @classmethod
    def of(cls, graphs: Integers, shards: Integers, before: Integers, node_ptr: Integers) -> Self:
        """Find the runs of a batch.

        Args:
            graphs: The batch, ``[batch]``.
            shards: The shard of each of them, ``[batch]``.
            before: Graphs before each shard, ``[shards]``.
            node_ptr: First node of each graph of all, and their number, ``[num_graphs + 1]``.
        """
        breaks = np.flatnonzero((np.diff(graphs) != 1) | (np.diff(shards) != 0)) + 1
        positions = np.concatenate([[0], breaks])[: len(graphs)]  # [runs]
        next_positions = np.append(positions[1:], len(graphs))[: len(positions)]  # [runs]
        own, starts = shards[positions], graphs[positions]  # [runs] each
        stops = starts + next_positions - positions
        first_graphs = before[own]
        rows_before = node_ptr[first_graphs]
        return cls(
            own,
            starts - first_graphs,
            stops - first_graphs,
            node_ptr[starts] - rows_before,
            node_ptr[stops] - rows_before,
            positions,
        )

    @property
    def rows(self) -> tuple[Integers, Integers, Integers]:
        """The shard of each run, its first row there and one past its last: ``[runs]`` each."""
        return self.shards, self.first_rows, self.stop_rows

    def each(self) -> Iterator[Run]:
        """Yield the runs in the order of the batch."""
        return map(Run._make, np.stack(self, axis=1).tolist())

    def in_file_order(self) -> Iterator[Run]:
        """Yield the runs in the order of the shards and of what is in them."""
        return iter(sorted(self.each()))
