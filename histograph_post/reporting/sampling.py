"""A bounded part of a cache, chosen by a seed: what the analyses of a report look at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache

#: Graphs and nodes that are looked at in one fit, at most; a single graph may have more nodes.
MAX_GRAPHS = 256
MAX_NODES = 20_000

_SEED = 0


@dataclass(frozen=True)
class Sample:
    """Some graphs of a cache in memory."""

    #: Their numbers in the cache, ascending, ``[num_graphs]``.
    graphs: np.ndarray
    #: Of how many they were chosen.
    total: int
    #: One tensor ``[num_nodes, D_l]`` per layer, single precision.
    layers: list[Tensor]
    #: First node of each graph, and the number of nodes: ``[num_graphs + 1]``.
    ptr: np.ndarray
    #: ``[2, num_edges]``; None for a cache without edges.
    edge_index: Tensor | None

    @property
    def num_nodes(self) -> int:
        """Nodes of all graphs together."""
        return int(self.ptr[-1])

    @property
    def batch(self) -> Tensor:
        """Graph of each node, ``[num_nodes]``."""
        return torch.from_numpy(np.repeat(np.arange(len(self.graphs)), np.diff(self.ptr)))

    @property
    def is_whole(self) -> bool:
        """Whether nothing was left out."""
        return len(self.graphs) == self.total

    def slices(self) -> Iterator[tuple[slice, Tensor | None]]:
        """Yield the nodes of each graph, and its edges, numbered from its first node."""
        ends = None
        if self.edge_index is not None:  # edges of a graph follow those of the graph before it
            owners = np.searchsorted(self.ptr, self.edge_index[0].numpy(), side="right") - 1
            ends = np.searchsorted(owners, np.arange(len(self.graphs) + 1))
        for number, (start, stop) in enumerate(zip(self.ptr[:-1], self.ptr[1:], strict=True)):
            edges = None
            if ends is not None and self.edge_index is not None:
                edges = self.edge_index[:, ends[number] : ends[number + 1]] - int(start)
            yield slice(int(start), int(stop)), edges


def owners_of(cache: Cache, rows: np.ndarray) -> np.ndarray:
    """Return the graph that each label row belongs to: ``[rows]``."""
    return np.searchsorted(cache.label_ptr, rows, side="right") - 1


def choose_graphs(
    sizes: np.ndarray, *, max_graphs: int = MAX_GRAPHS, max_nodes: int = MAX_NODES
) -> np.ndarray:
    """Return which graphs to look at, ascending: a random choice within bounds, at least one.

    Args:
        sizes: Nodes of each graph to choose from, ``[num_graphs]``.
        max_graphs: How many to take at most.
        max_nodes: How many nodes they may have together, unless the first alone has more.
    """
    order = np.random.default_rng(_SEED).permutation(len(sizes))[:max_graphs]
    within = np.cumsum(sizes[order]) <= max_nodes
    within[:1] = True
    return np.sort(order[within])


def read_sample(cache: Cache, graphs: np.ndarray, total: int) -> Sample:
    """Read some graphs of a cache."""
    found = cache.gather(graphs, edges=cache.manifest.layout.has_edges)
    layers = found.history.unbind(1) if isinstance(found.history, Tensor) else found.history
    return Sample(
        graphs=graphs,
        total=total,
        layers=[layer.float() for layer in layers],
        ptr=found.ptr.numpy(),
        edge_index=found.edge_index,
    )


def sample_test_graphs(cache: Cache, rows: np.ndarray) -> Sample:
    """Read a bounded number of the graphs that own these label rows."""
    graphs = np.unique(owners_of(cache, rows))
    chosen = choose_graphs(cache.num_nodes[graphs])
    return read_sample(cache, graphs[chosen], len(graphs))
