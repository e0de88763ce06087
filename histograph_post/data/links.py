"""Link prediction on graphs that come without pairs to predict.

The links of a graph are its pairs of connected nodes, whichever way their edges point. Some are
held out for validation and test, and their edges are removed from ``edge_index``: a model passes
messages along training links only, and cannot see what it will predict. ``edge_label_index``
holds every link and, for validation and test, negatives (pairs without an edge) that are drawn
once. Negatives for training are drawn in every epoch (:class:`LinkNegatives`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from ..errors import DataError
from ..splits import Split, Splits
from ..splits.making import Shares, random_parts
from ..splits.split import LINKS
from ..tasks import Task
from .batching import RowBatch
from .labels import MASKS

_TRAIN, _VALID, _TEST = range(3)


@dataclass(frozen=True)
class LinkOptions:
    """How links are held out."""

    #: Shares of the links that train, validate and test.
    shares: Shares = (0.85, 0.05, 0.1)
    seed: int = 0
    #: Pairs without an edge per link, in the validation and the test part.
    negatives: float = 1.0

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise DataError(f"link_seed: found {self.seed}, expected 0 or more")
        if not 0 < self.negatives < np.inf:
            raise DataError(f"link_negatives: found {self.negatives}, expected a positive number")


@dataclass(frozen=True)
class _Links:
    """The links of a graph."""

    #: Number of each link, in order: ``[num_links]``.
    numbers: np.ndarray
    #: Which link each edge belongs to, -1 for a self loop: ``[num_edges]``.
    of_edge: np.ndarray

    @classmethod
    def of(cls, graph: Data) -> _Links:
        edges = graph.edge_index.numpy()  # [2, num_edges]
        proper = edges[0] != edges[1]  # [num_edges]
        numbers, inverse = np.unique(pair_numbers(edges[:, proper]), return_inverse=True)
        of_edge = np.full(len(proper), -1)
        of_edge[proper] = inverse
        return cls(numbers, of_edge)


def split_links(
    graphs: Sequence[Data], options: LinkOptions | None = None, *, spec: str
) -> tuple[list[Data], Splits, list[str]]:
    """Turn graphs into a link task: return new graphs, their split, and notes for the user.

    The links of all graphs are split together. Each graph gets as many negatives as it has links
    in a part (times :attr:`LinkOptions.negatives`), or fewer if it is too dense. Node labels and
    masks are removed; edge attributes stay with their edges.
    """
    options = options or LinkOptions()
    links = [_Links.of(graph) for graph in graphs]
    counts = [len(found.numbers) for found in links]
    if not sum(counts):
        raise DataError(f"{spec}: no edges between different nodes, expected links to predict")
    part_of = np.empty(sum(counts), dtype=np.int64)  # of each link of all graphs
    for part, members in enumerate(random_parts(sum(counts), options.shares, seed=options.seed)):
        part_of[members] = part
    random = np.random.default_rng([options.seed, 1])
    made, labelled = [], []
    for graph, found, parts in zip(
        graphs, links, np.split(part_of, np.cumsum(counts)[:-1]), strict=True
    ):
        labelled.append(_labelled(graph, found, parts, options.negatives, random))
        made.append(_link_graph(graph, found, parts, labelled[-1]))
    rows = np.concatenate([pairs.parts for pairs in labelled])  # part of each row of all graphs
    splits = Splits(
        kind=f"{LINKS}:{','.join(f'{share:g}' for share in options.shares)}",
        unit="link",
        total=len(rows),
        seed=options.seed,
        folds=(Split(*(np.flatnonzero(rows == part) for part in (_TRAIN, _VALID, _TEST))),),
    )
    splits.validate(where=f"{spec}: split of links")
    missing = sum(pairs.missing for pairs in labelled)
    return made, splits, _notes(graphs, links, splits, part_of, missing)


@dataclass(frozen=True)
class _Labelled:
    """The pairs of a graph that have a label: part by part, links before negatives."""

    #: ``[2, rows]``
    pairs: np.ndarray
    #: 1 for a link, 0 for a negative: ``[rows]``.
    labels: np.ndarray
    #: ``[rows]``
    parts: np.ndarray
    #: How many negatives there are too few, in a dense graph.
    missing: int


def _labelled(
    graph: Data, links: _Links, parts: np.ndarray, ratio: float, random: np.random.Generator
) -> _Labelled:
    wanted = [round(ratio * int((parts == part).sum())) for part in (_VALID, _TEST)]
    # Drawn together, so that no pair is a negative of both parts.
    negatives = NonEdges(int(graph.num_nodes), graph.edge_index.numpy()).draw(sum(wanted), random)
    for_valid = negatives.shape[1] * wanted[0] // max(1, sum(wanted))
    blocks = [
        (numbered_pairs(links.numbers[parts == _TRAIN]), 1.0, _TRAIN),
        (numbered_pairs(links.numbers[parts == _VALID]), 1.0, _VALID),
        (negatives[:, :for_valid], 0.0, _VALID),
        (numbered_pairs(links.numbers[parts == _TEST]), 1.0, _TEST),
        (negatives[:, for_valid:], 0.0, _TEST),
    ]
    sizes = [pairs.shape[1] for pairs, _, _ in blocks]
    return _Labelled(
        pairs=np.concatenate([pairs for pairs, _, _ in blocks], axis=1),
        labels=np.repeat([label for _, label, _ in blocks], sizes).astype(np.float32),
        parts=np.repeat([part for _, _, part in blocks], sizes),
        missing=sum(wanted) - negatives.shape[1],
    )


def _link_graph(graph: Data, links: _Links, parts: np.ndarray, labelled: _Labelled) -> Data:
    """Return the graph with the edges of its training links and its self loops, and the pairs."""
    # The last entry is for self loops, whose link is -1.
    carries_messages = np.append(parts == _TRAIN, True)[links.of_edge]  # [num_edges]
    made = graph.edge_subgraph(torch.from_numpy(carries_messages))
    for name in ("y", *MASKS.values()):
        if name in made:
            del made[name]
    made.edge_label_index = torch.from_numpy(labelled.pairs)  # [2, rows]
    made.edge_label = torch.from_numpy(labelled.labels)  # [rows]
    return made


def _notes(
    graphs: Sequence[Data],
    links: Sequence[_Links],
    splits: Splits,
    part_of: np.ndarray,
    missing: int,
) -> list[str]:
    train, valid, test = np.bincount(part_of, minlength=3).tolist()
    notes = [
        f"links: {train} train, {valid} validate and {test} test, beside "
        f"{splits.total - len(part_of)} pairs without an edge; messages run along training links"
    ]
    directed = sum(not is_undirected(graph.edge_index) for graph in graphs)
    if directed:
        notes.append(
            f"directed edges in {directed} graphs: a link is a pair of nodes, whichever way its "
            "edges point; messages keep their direction"
        )
    loops = sum(int((found.of_edge < 0).sum()) for found in links)
    if loops:
        notes.append(f"{loops} self loops carry messages and are not links")
    if missing:
        notes.append(f"{missing} negatives fewer than asked for: some graphs are too dense")
    return notes


# --- pairs of nodes are numbered, so that negatives can be drawn without rejection


def pair_numbers(pairs: np.ndarray) -> np.ndarray:
    """Number pairs of different nodes ``[2, num_pairs]``, direction aside: ``[num_pairs]``.

    The pairs of a graph are (0, 1), (0, 2), (1, 2), (0, 3), ...: a graph with n nodes has the
    numbers from 0 to n (n - 1) / 2 - 1.
    """
    low, high = np.sort(pairs, axis=0)
    return high * (high - 1) // 2 + low


def numbered_pairs(numbers: np.ndarray) -> np.ndarray:
    """Return the pairs of these numbers, the lower node first: ``[2, num_pairs]``."""
    high = ((1 + np.sqrt(8 * numbers.astype(np.float64) + 1)) // 2).astype(np.int64)
    # The root is rounded: in very large graphs it may be one off.
    high -= high * (high - 1) // 2 > numbers
    high += high * (high + 1) // 2 <= numbers
    return np.stack([numbers - high * (high - 1) // 2, high])


class NonEdges:
    """All pairs of a graph's nodes except some known ones.

    Args:
        known: Pairs to exclude, in either direction and with repetitions: ``[2, num_known]``.
    """

    def __init__(self, num_nodes: int, known: np.ndarray) -> None:
        numbers = np.unique(pair_numbers(known[:, known[0] != known[1]]))
        self.count = num_nodes * (num_nodes - 1) // 2 - len(numbers)
        #: How many other pairs come before each known one: ``[num_known]``.
        self._before = numbers - np.arange(len(numbers))

    def draw(self, number: int, random: np.random.Generator) -> np.ndarray:
        """Draw distinct pairs uniformly, the lower node first: ``[2, number]``, or all of fewer."""
        ranks = random.choice(self.count, min(number, self.count), replace=False)
        # Before the k-th of these pairs come k of them, and the known ones in between.
        return numbered_pairs(ranks + np.searchsorted(self._before, ranks, side="right"))


class Negatives(NamedTuple):
    """The negatives of one batch."""

    #: Nodes numbered within their graph: ``[2, negatives]``.
    pairs: Tensor
    #: Position of each pair's graph in the batch: ``[negatives]``.
    owners: np.ndarray


class LinkNegatives:
    """Draws negatives in every epoch for training links that come without any.

    A batch gets as many pairs as it has links, from the same graphs, by the seed of the epoch.

    Args:
        targets: Of every label row, ``[rows]`` or ``[rows, targets]``.
        non_edges: Returns the pairs of a graph that have neither an edge nor a label.
    """

    def __init__(self, task: Task, targets: Tensor, non_edges: Callable[[int], NonEdges]) -> None:
        self._links = task.level == "link" and task.kind == "binary"
        self._targets = targets
        self._non_edges = non_edges

    def generator(self, rows: np.ndarray, seed: int | None) -> np.random.Generator | None:
        """Return the random generator to draw with; None if these rows need no negatives."""
        lacking = self._links and not bool((self._targets.numpy()[rows] == 0).any())
        # A stream of its own: the seed itself shuffles the graphs.
        return np.random.default_rng([seed, 1]) if lacking and seed is not None else None

    def draw(self, members: RowBatch, random: np.random.Generator) -> Negatives:
        """Draw as many pairs in each graph as it has links; a dense graph may have fewer."""
        targets = self._targets[members.rows]  # [rows, 1]
        links = members.owners[targets[:, 0].numpy() == 1]  # graph in the batch: [links]
        counts = np.bincount(links, minlength=len(members.graphs))  # [num_graphs]
        drawn = [
            self._non_edges(graph).draw(int(count), random)
            for graph, count in zip(members.graphs, counts, strict=True)
        ]
        sizes = [pairs.shape[1] for pairs in drawn]
        return Negatives(
            pairs=torch.from_numpy(np.concatenate(drawn, axis=1)),
            owners=np.repeat(np.arange(len(drawn)), sizes),
        )
