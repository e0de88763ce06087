"""Labels of graphs, nodes and links as one array: rows by targets, NaN where one is missing.

The official splits of node-level data come with the labels, as boolean masks on the graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..errors import DataError
from ..splits import Split, Splits
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
