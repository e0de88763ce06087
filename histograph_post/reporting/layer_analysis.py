"""Measurements on test graphs: over-smoothing layer by layer, and the attention of the head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..caches import Cache
from ..experiments.workers import limited_threads
from ..heads.base import Explanation, Readout
from ..runs.run import Run

# --- a bounded random sample of a cache, which the analyses of a report use

#: Graphs and nodes of a sample, at most; a single graph may have more nodes.
MAX_GRAPHS = 256
MAX_NODES = 20_000

_SEED = 0


@dataclass(frozen=True)
class Sample:
    """Some graphs of a cache in memory."""

    #: Their numbers in the cache, ascending, ``[num_graphs]``.
    graphs: np.ndarray
    #: The number of graphs they were drawn from.
    total: int
    #: One tensor ``[num_nodes, D_l]`` per layer, single precision.
    layers: list[Tensor]
    #: First node of each graph, and the number of nodes: ``[num_graphs + 1]``.
    ptr: np.ndarray
    #: ``[2, num_edges]``; None for a cache without edges.
    edge_index: Tensor | None

    @property
    def largest(self) -> int:
        """Nodes of the largest graph."""
        return int(np.diff(self.ptr).max())

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
        for place, (start, stop) in enumerate(zip(self.ptr[:-1], self.ptr[1:], strict=True)):
            edges = None
            if ends is not None and self.edge_index is not None:
                edges = self.edge_index[:, ends[place] : ends[place + 1]] - int(start)
            yield slice(int(start), int(stop)), edges


def owners_of(cache: Cache, rows: np.ndarray) -> np.ndarray:
    """Return the graph that each label row belongs to: ``[rows]``."""
    return np.searchsorted(cache.label_ptr, rows, side="right") - 1


def cache_of(caches: Sequence[Cache], fold: int) -> Cache:
    """Return the cache that a fold was trained on: there is one, or one per fold."""
    return caches[fold] if len(caches) > 1 else caches[0]


def choose_graphs(
    sizes: np.ndarray, *, max_graphs: int = MAX_GRAPHS, max_nodes: int = MAX_NODES
) -> np.ndarray:
    """Return the graphs of a bounded random sample, at least one, in ascending order.

    Args:
        sizes: Nodes of each graph to choose from, ``[num_graphs]``.
        max_graphs: Graphs to take at most.
        max_nodes: Nodes they may have together, unless the first alone has more.
    """
    order = np.random.default_rng(_SEED).permutation(len(sizes))[:max_graphs]
    within = np.cumsum(sizes[order]) <= max_nodes
    within[:1] = True
    return np.sort(order[within])


def read_sample(cache: Cache, graphs: np.ndarray, total: int) -> Sample:
    """Read some graphs of a cache."""
    found = cache.gather(graphs, edges=cache.manifest.layout.has_edges)
    return Sample(
        graphs=graphs,
        total=total,
        layers=[layer.float() for layer in Readout.layers(found.history)],
        ptr=found.ptr.numpy(),
        edge_index=found.edge_index,
    )


def sample_test_graphs(cache: Cache, rows: np.ndarray) -> Sample:
    """Read a bounded number of the graphs that own these label rows."""
    graphs = np.unique(owners_of(cache, rows))
    chosen = choose_graphs(cache.num_nodes[graphs])
    return read_sample(cache, graphs[chosen], len(graphs))


# --- how alike the nodes of a graph are: the three measures of over-smoothing, and layer distances

#: A shorter vector has no direction.
_TINY = 1e-300


def mean_pairwise_distance(rows: Tensor) -> float:
    """Return the mean Euclidean distance of two different nodes; NaN for a single one.

    Args:
        rows: Node embeddings of one graph, ``[num_nodes, dim]``.
    """
    rows, count = rows.double(), len(rows)
    if count < 2:
        return float("nan")
    rows = rows - rows.mean(0)
    squares = rows.square().sum(1)  # [num_nodes]
    products = torch.addmm(squares, rows, rows.t(), alpha=-2) + squares.unsqueeze(1)
    distances = products.clamp_(min=0).sqrt_().fill_diagonal_(0)  # [num_nodes, num_nodes]
    return float(distances.sum()) / (count * (count - 1))


def dirichlet_energy(rows: Tensor, edge_index: Tensor) -> float:
    """Return the sum of ``|x_u - x_v|^2`` over the edges, divided by the number of nodes.

    As in Rusch et al., "A survey on oversmoothing in graph neural networks": an undirected edge is
    stored in both directions and counts twice.

    Args:
        rows: Node embeddings of one graph, ``[num_nodes, dim]``.
        edge_index: Its edges, ``[2, num_edges]``.
    """
    rows = rows.double()
    differences = rows[edge_index[0]] - rows[edge_index[1]]  # [num_edges, dim]
    return float(differences.square().sum()) / len(rows)


def mean_cosine_distance(rows: Tensor) -> float:
    """Return the mean of ``1 - cos`` over all pairs of different nodes (MAD, over all nodes).

    A node without a direction (all zeros) is left out; NaN where fewer than two have one.

    Args:
        rows: Node embeddings of one graph, ``[num_nodes, dim]``.
    """
    rows = rows.double()
    lengths = rows.norm(dim=1, keepdim=True)  # [num_nodes, 1]
    units = (rows / lengths.clamp(min=_TINY))[lengths.squeeze(1) > _TINY]  # [directed, dim]
    count = len(units)
    if count < 2:
        return float("nan")
    # |u - v|^2 = 2 - 2 cos for unit vectors; deviations from the mean give the sum over all pairs.
    deviations = (units - units.mean(0)).square().sum()
    return float(deviations) / (count - 1)


def distance_to(rows: Tensor, last: Tensor) -> float:
    """Return the mean over nodes of ``|x_l - x_last|``, both ``[num_nodes, dim]``."""
    return float((rows.double() - last.double()).norm(dim=1).mean())


#: Nodes of a graph whose pairs are measured at most, and edges; of more, a random sample is drawn.
MAX_PAIRED_NODES = 1000
MAX_EDGES = 200_000

#: A report computes no attention in larger graphs: its time grows with the square of their nodes.
MAX_ATTENDED_NODES = 20_000


@dataclass(frozen=True)
class Quartiles:
    """The median and the quartiles of a quantity over graphs.

    Not the mean: a few graphs with an atom that is rare in training would dominate it.
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        """Return the quartiles of all values but NaN; NaN without any."""
        present = [value for value in values if value == value]
        return cls(*np.quantile(present or [np.nan], [0.25, 0.5, 0.75]).tolist())


@dataclass(frozen=True)
class Smoothness:
    """The three measures of over-smoothing of some embeddings."""

    pairwise: Quartiles
    #: NaN for a cache without edges.
    dirichlet: Quartiles
    cosine: Quartiles


@dataclass(frozen=True)
class LayerProfile:
    """Measurements layer by layer."""

    names: tuple[str, ...]
    smoothness: tuple[Smoothness, ...]
    #: Distance to the last layer; None where a layer is not as wide.
    distance: tuple[Quartiles | None, ...]
    #: The measures of over-smoothing at each stage of the head; empty for one that pools at once.
    head: Mapping[str, Smoothness]


@dataclass(frozen=True)
class TrainedHead:
    """A head of a run, to be applied to a sample."""

    head: Readout
    #: What brings the layers to one scale before it.
    standardizer: nn.Module | None

    def prepared(self, sample: Sample) -> Tensor | list[Tensor]:
        """Return the history as the head was trained on it."""
        layers = sample.layers
        if self.standardizer is not None:
            layers = self.standardizer(layers)  # L of [num_nodes, D_l]
        uniform = len({layer.size(1) for layer in layers}) == 1
        return torch.stack(layers, dim=1) if uniform else layers  # [num_nodes, L, D]

    def embeddings(self, sample: Sample) -> dict[str, Tensor]:
        """Return the node embeddings inside the head, stage by stage: ``[num_nodes, width]``."""
        history, graphs = self.head.read(self.prepared(sample), sample.batch, len(sample.graphs))
        with torch.no_grad():
            return self.head.node_embeddings(history, graphs)

    def explain(self, sample: Sample) -> Explanation | None:
        """Return the layer weights and the node attention; None for a head without them."""
        edges = {"edge_index": sample.edge_index} if self.head.needs_edge_index else {}
        with torch.no_grad():  # a readout of one's own need not think of it
            return self.head.explain(
                self.prepared(sample), sample.batch, num_graphs=len(sample.graphs), **edges
            )


def load_fit_head(run: Run, fold: int, seed: int) -> TrainedHead:
    """Load the head of one fit of the chosen readout."""
    head, standardizer = run.load_head(fold, seed)
    return TrainedHead(head.eval(), standardizer)


def profile_layers(
    sample: Sample, names: Sequence[str], stages: Mapping[str, Tensor]
) -> LayerProfile:
    """Measure every layer of a sample, and every stage ``[num_nodes, width]`` of the head."""
    last = sample.layers[-1]
    # Thousands of small products: on a busy machine, threads that wait for each other took ten
    # times as long.
    with limited_threads(1):
        return LayerProfile(
            names=tuple(names),
            smoothness=tuple(measure_smoothness(layer, sample) for layer in sample.layers),
            distance=tuple(
                Quartiles.of(
                    [distance_to(layer[nodes], last[nodes]) for nodes, _ in sample.slices()]
                )
                if layer.size(1) == last.size(1)
                else None
                for layer in sample.layers
            ),
            head={name: measure_smoothness(rows, sample) for name, rows in stages.items()},
        )


def measure_smoothness(rows: Tensor, sample: Sample) -> Smoothness:
    """Measure embeddings ``[num_nodes, dim]`` in every graph that has a pair of nodes."""
    random, rows = np.random.default_rng(_SEED), rows.double()
    found: list[tuple[float, float, float]] = []
    for nodes, edges in sample.slices():
        graph = rows[nodes]  # [nodes of the graph, dim]
        if len(graph) < 2:
            continue
        energy = float("nan")
        if edges is not None:
            share = 1.0
            if edges.size(1) > MAX_EDGES:
                kept = random.choice(edges.size(1), MAX_EDGES, replace=False)
                share, edges = MAX_EDGES / edges.size(1), edges[:, torch.from_numpy(kept)]
            energy = dirichlet_energy(graph, edges) / share
        if len(graph) > MAX_PAIRED_NODES:
            chosen = random.choice(len(graph), MAX_PAIRED_NODES, replace=False)
            graph = graph[torch.from_numpy(chosen)]
        found.append((mean_pairwise_distance(graph), energy, mean_cosine_distance(graph)))
    return Smoothness(*(Quartiles.of([values[at] for values in found]) for at in range(3)))
