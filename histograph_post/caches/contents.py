"""What must hold for the values of a shard, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import CacheError
from .layout import Counts


def check_contents(
    arrays: Mapping[str, np.ndarray], counts: Counts, start: int, where: str
) -> None:
    """Refuse offsets and node numbers that point outside of a graph.

    ``start`` is the position of the shard's first graph in the data set.
    """
    totals = {
        "ptr": counts.num_nodes,
        "id_ptr": len(arrays["ids"]),
        "edge_ptr": counts.num_edges,
        "label_ptr": counts.num_labels,
    }
    for name, total in totals.items():
        if name in arrays:
            _check_offsets(arrays[name], total, f"{where}: found {name}")
    for name, offsets in (("edge_index", "edge_ptr"), ("edge_label_index", "label_ptr")):
        if name in arrays:
            _check_pairs(
                arrays[name],
                np.diff(arrays[offsets]),
                np.diff(arrays["ptr"]),
                start,
                f"{where}: found {name}",
            )


def _check_offsets(offsets: np.ndarray, total: int, found: str) -> None:
    """Refuse offsets that do not rise from 0 to the number of what they count."""
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise CacheError(
            f"{found} from {offsets[0]} to {offsets[-1]}, expected it to rise from 0 to {total}"
        )


def _check_pairs(
    pairs: np.ndarray, pairs_per_graph: np.ndarray, num_nodes: np.ndarray, start: int, found: str
) -> None:
    """Refuse node numbers, ``[2, num_pairs]``, outside of their graph."""
    limit = np.repeat(num_nodes, pairs_per_graph)  # [num_pairs]
    wrong = ((pairs < 0) | (pairs >= limit)).any(axis=0)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        graph = int(np.searchsorted(np.cumsum(pairs_per_graph), first, side="right"))
        raise CacheError(
            f"{found} {pairs[:, first].tolist()} in graph {start + graph}, "
            f"expected nodes 0 to {num_nodes[graph] - 1}"
        )
