"""Official splits of node-level data, as PyG stores them: boolean masks on the graphs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..errors import DataError
from ..splits import Split, Splits

#: PyG's name of each part's mask.
MASKS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}


def take_masks(graphs: Sequence[Data], ids: Sequence[str], *, spec: str) -> Splits | None:
    """Move the masks out of the graphs and return them as splits; ``None`` without a train mask.

    A mask is ``[num_nodes]``, or ``[num_nodes, num_folds]`` for several folds; a single mask
    beside several folds counts for each of them. A validation or test mask may be absent.
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
    splits = Splits(
        kind="official",
        unit="node",
        total=parts["train"].size(0),
        seed=None,
        folds=tuple(_fold(parts, fold) for fold in range(num_folds)),
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


def _fold(parts: dict[str, Tensor], fold: int) -> Split:
    def indices(part: str) -> np.ndarray:
        if part not in parts:
            return np.empty(0, dtype=np.int64)
        masks = parts[part]
        column = masks[:, fold if masks.size(1) > 1 else 0]  # [total_nodes]
        return column.nonzero().squeeze(1).numpy()

    return Split(train=indices("train"), valid=indices("valid"), test=indices("test"))
