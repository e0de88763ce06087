"""Batches of whole graphs that stay within a number of nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

#: Nodes of a batch at most, unless told otherwise.
NODE_BUDGET = 8192


def budget_batches(num_nodes: Sequence[int] | np.ndarray, node_budget: int) -> Iterator[range]:
    """Cut graphs into batches of neighbours with at most ``node_budget`` nodes together.

    A larger graph is a batch of its own, so a budget of 1 gives one graph at a time.

    Args:
        num_nodes: Nodes of each graph: ``[num_graphs]``.
        node_budget: Nodes of a batch at most.
    """
    first, nodes = 0, 0
    for graph, size in enumerate(num_nodes):
        if graph > first and nodes + size > node_budget:
            yield range(first, graph)
            first, nodes = graph, 0
        nodes += int(size)
    if len(num_nodes):
        yield range(first, len(num_nodes))
