"""Labels of graphs, nodes and links as one array: rows by targets, NaN where one is missing.

The official splits of node-level data come with the labels, as boolean masks on the graphs. Any
graphs become a link task: their links are the pairs of connected nodes, whichever way their edges
point. Some are held out for validation and test, and their edges are removed from ``edge_index``:
a model passes messages along training links only, and cannot see what it will predict.
``edge_label_index`` holds every link and, for validation and test, negatives (pairs without an
edge) that are drawn once. Negatives for training are drawn in every epoch
(``training/batches.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import is_undirected

from ..errors import DataError
from ..splits import Split, Splits
from ..splits.making import Shares, random_parts
from ..splits.split import LINKS
from ..utils import Level

#: PyG's name of each part's mask.
MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def label_name(level: Level) -> str:
    """Return the attribute that holds the labels."""
    return "edge_label" if level == "link" else "y"


def detect_level(graphs: Sequence[Data]) -> tuple[Level, list[str]]:
    """Return what has the labels, and a note where that is a guess."""
    if all("edge_label_index" in graph for graph in graphs):
        return "link", []
    per_node = all(_has_row_per_node(graph) for graph in graphs if "y" in graph)
    sizes = {int(graph.num_nodes) for graph in graphs}
    if not any("y" in graph for graph in graphs) or not per_node or sizes == {1}:
        return "graph", []
    if len(graphs) > 1 and len(sizes) == 1:
        # Graphs of one size with as many graph-level targets as nodes look the same.
        return "node", ["y has one row per node: taken as node labels (level=graph to differ)"]
    return "node", []


def _has_row_per_node(graph: Data) -> bool:
    y = graph.y
    return isinstance(y, Tensor) and y.dim() > 0 and y.size(0) == graph.num_nodes


def label_rows(graph: Data, level: Level) -> int:
    """Return how many rows of labels a graph has."""
    if level == "graph":
        return 1
    return int(graph.num_nodes if level == "node" else graph.edge_label_index.size(1))


def label_tensor(labels: np.ndarray) -> Tensor:
    """Return integers without a gap, such as classes, as int64, other labels as float32."""
    whole = not np.isnan(labels).any() and bool((labels == np.round(labels)).all())
    return torch.from_numpy(labels).to(torch.int64 if whole else torch.float32)


def attach_labels(graphs: Sequence[Data], labels: Tensor) -> None:
    """Give each graph its row of ``labels [num_graphs, num_targets]`` as ``y``."""
    for graph, row in zip(graphs, labels, strict=True):
        graph.y = row.clone() if len(row) == 1 else row[None].clone()  # [1] or [1, num_targets]


def align_labels(graphs: Sequence[Data], ids: Sequence[str], level: Level, *, spec: str) -> int:
    """Give every graph labels of one shape, so that PyG can batch them; return their width.

    As given, one graph may have a scalar and the next ``[1]``. An unlabelled graph among labelled
    ones gets NaN, and then all graphs get float labels.
    """
    blocks = [
        _label_block(graph, level, f"{spec}: graph {name}")
        for graph, name in zip(graphs, ids, strict=True)
    ]
    widths = {block.size(1) for block in blocks if block is not None}
    if len(widths) > 1:
        raise DataError(
            f"{spec}: graphs have {sorted(widths)} targets, expected the same number in all"
        )
    if not widths:
        return 0
    width = widths.pop()
    some_missing = any(block is None for block in blocks)
    for graph, block in zip(graphs, blocks, strict=True):
        labels = torch.full((label_rows(graph, level), width), np.nan) if block is None else block
        labels = labels.float() if some_missing else labels
        graph[label_name(level)] = labels.squeeze(1) if width == 1 else labels
    return width


def _label_block(graph: Data, level: Level, where: str) -> Tensor | None:
    """Return one graph's labels as ``[rows, num_targets]``; None if it has none."""
    name, rows = label_name(level), label_rows(graph, level)
    if name not in graph:
        return None
    labels = given = torch.as_tensor(graph[name])
    if level == "graph" and labels.dim() < 2:
        labels = labels.reshape(1, -1)  # from a scalar, [1] or [num_targets]
    elif labels.dim() == 1:
        labels = labels.unsqueeze(1)  # [rows, 1]
    if labels.dim() != 2 or labels.size(0) != rows:
        raise DataError(
            f"{where}: {name} has shape {list(given.shape)}, "
            f"expected {rows} row{'' if rows == 1 else 's'} for {level}-level labels"
        )
    return labels


def take_masks(graphs: Sequence[Data], ids: Sequence[str], *, spec: str) -> Splits | None:
    """Move the masks out of the graphs and return them as splits; None without a train mask.

    A mask is ``[num_nodes]``, or ``[num_nodes, num_folds]`` for several folds; a single mask
    beside several folds applies to each of them. A validation or test mask may be absent.
    """
    parts: dict[str, Tensor] = {}
    for part, name in MASKS.items():
        if all(name in graph for graph in graphs):
            masks = [
                _mask(graph, name, f"{spec}: graph {graph_id}")
                for graph, graph_id in zip(graphs, ids, strict=True)
            ]
            if len({mask.size(1) for mask in masks}) > 1:
                raise DataError(f"{spec}: {name} has another number of folds in some graphs")
            parts[part] = torch.cat(masks)  # [total_nodes, num_folds]
        for graph in graphs:
            if name in graph:
                del graph[name]
    if "train" not in parts:
        return None
    counts = {mask.size(1) for mask in parts.values()} - {1}
    if len(counts) > 1:
        raise DataError(f"{spec}: masks have {sorted(counts)} folds, expected the same in all")
    num_folds = counts.pop() if counts else 1
    nothing = torch.zeros_like(parts["train"])
    masks = [parts.get(part, nothing).expand(-1, num_folds) for part in MASKS]
    splits = Splits(
        kind="official",
        unit="node",
        total=parts["train"].size(0),
        seed=None,
        folds=tuple(
            Split(*(mask[:, fold].nonzero().squeeze(1).numpy() for mask in masks))
            for fold in range(num_folds)
        ),
    )
    splits.validate(where=f"{spec}: official split")
    return splits


def _mask(graph: Data, name: str, where: str) -> Tensor:
    mask = graph[name]
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8):
        raise DataError(f"{where}: {name} is not boolean, expected a mask over the nodes")
    if mask.dim() == 1:
        mask = mask.unsqueeze(1)
    if mask.dim() != 2 or mask.size(0) != graph.num_nodes:
        raise DataError(
            f"{where}: {name} has shape {list(graph[name].shape)}, "
            f"expected {graph.num_nodes} rows, one per node"
        )
    return mask.bool()  # [num_nodes, num_folds]


# --- links of graphs that come without pairs to predict

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
