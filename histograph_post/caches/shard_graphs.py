"""What a shard stores of its graphs that does not come from the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheError
from .contents import check_contents
from .layout import Counts, Layout


@dataclass(frozen=True)
class ShardGraphs:
    """The graphs of one shard, without what the model made of them.

    Args:
        start: Position of the first graph in the data set.
        ids: A name per graph.
        num_nodes: Nodes per graph, ``[num_graphs]``.
        labels: A row per graph, node or link; NaN is a missing label. ``[rows, num_targets]``.
        edge_index: ``[2, num_edges]`` per graph, nodes numbered from 0 in each; None to store none.
        edge_label_index: The same for the labelled pairs of a link task.
    """

    start: int
    ids: Sequence[str]
    num_nodes: np.ndarray
    labels: np.ndarray
    edge_index: Sequence[Tensor] | None = None
    edge_label_index: Sequence[Tensor] | None = None

    def counts(self, layout: Layout) -> Counts:
        """Return how much a shard of these graphs holds."""
        num_nodes = int(self.num_nodes.sum())
        num_edges = _num_pairs(self.edge_index) if layout.has_edges else 0
        rows = {"graph": len(self.ids), "node": num_nodes}
        num_labels = rows.get(layout.level, _num_pairs(self.edge_label_index))
        return Counts(len(self.ids), num_nodes, num_edges, num_labels)

    def arrays(self, layout: Layout, where: str) -> dict[str, np.ndarray]:
        """Return the values of every dataset but the outputs and the activations, checked."""
        try:
            ids = [graph_id.encode() for graph_id in self.ids]
        except UnicodeEncodeError as error:
            raise CacheError(
                f"{where}: found graph id {error.object!r}, expected text that UTF-8 can hold"
            ) from None
        arrays = {
            "ptr": _offsets(self.num_nodes),
            "id_ptr": _offsets([len(graph_id) for graph_id in ids]),
            "ids": np.frombuffer(b"".join(ids), "|u1"),
            "labels": np.ascontiguousarray(self.labels, "<f8"),
        }
        if layout.level == "link":
            arrays["label_ptr"], arrays["edge_label_index"] = _pairs(self.edge_label_index or ())
        if layout.has_edges:
            arrays["edge_ptr"], arrays["edge_index"] = _pairs(self.edge_index or ())
        counts = self.counts(layout)
        for dataset in layout.descriptors(counts, len(arrays["ids"])):
            found = arrays.get(dataset.name)
            if found is not None and found.shape != dataset.shape:
                raise CacheError(
                    f"{where}: found {dataset.name} of shape {found.shape}, "
                    f"expected {dataset.shape} for {len(self.ids)} graphs"
                )
        check_contents(arrays, counts, self.start, where)
        return arrays


def _num_pairs(pairs: Sequence[Tensor] | None) -> int:
    return sum(pair.shape[1] for pair in pairs or ())


def _offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype("<i8")


def _pairs(pairs: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the node pairs of all graphs, side by side."""
    together = torch.cat([torch.empty(2, 0, dtype=torch.long), *pairs], dim=1)  # [2, num_pairs]
    return _offsets([pair.shape[1] for pair in pairs]), together.numpy().astype("<i4")
