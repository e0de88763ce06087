"""Node features for graphs that come without any (IMDB, REDDIT, COLLAB).

=================  ==============================================================================
``onehot-degree``  a column per degree 0 .. max_degree; higher degrees share the last column.
                   Without ``max_degree`` it is the highest degree in the data, as PyG's
                   ``OneHotDegree`` is commonly used
``degree``         one column, the degree
``log-degree``     one column, log(1 + degree)
``constant``       one column of ones
``auto``           ``onehot-degree``; from a highest degree of 1,000 on ``log-degree``, unless
                   ``max_degree`` is given
=================  ==============================================================================

The degree counts the edges that leave a node, as ``OneHotDegree`` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import degree

from ..errors import DataError

FEATURES = ("auto", "onehot-degree", "degree", "log-degree", "constant")

#: REDDIT's hubs have thousands of neighbours: one-hot columns up to there hold nothing but zeros.
_AUTO_ONEHOT_BELOW = 1000

#: One-hot columns are dense, so a mistaken request is refused before it fills the memory.
_MAX_BYTES = 4 * 2**30


def add_features(
    graphs: Sequence[Data], kind: str = "auto", *, max_degree: int | None = None, spec: str
) -> list[str]:
    """Set ``x`` of graphs that have none; return a note on what was added."""
    if kind not in FEATURES:
        raise DataError(
            f"{spec}: features={kind} is unknown, expected one of {', '.join(FEATURES)}"
        )
    if max_degree is not None and (max_degree < 1 or kind not in ("auto", "onehot-degree")):
        raise DataError(
            f"{spec}: max_degree={max_degree} with features={kind}, "
            "expected at least 1 and features=onehot-degree"
        )
    if "x" in graphs[0]:
        if kind != "auto" or max_degree is not None:
            columns = graphs[0].x.size(1) if graphs[0].x.dim() > 1 else 1
            raise DataError(
                f"{spec}: the graphs have features of their own ({columns} columns); "
                "expected no features= or max_degree="
            )
        return []
    degrees = [degree(graph.edge_index[0], graph.num_nodes, torch.long) for graph in graphs]
    highest = max(int(counts.max()) for counts in degrees)
    if kind == "auto":
        onehot = max_degree is not None or highest < _AUTO_ONEHOT_BELOW
        kind = "onehot-degree" if onehot else "log-degree"
    if kind != "onehot-degree":
        for graph, counts in zip(graphs, degrees, strict=True):
            graph.x = _column(counts, kind)  # [num_nodes, 1]
        return [f"no node features: x = {kind} (1 column; highest degree {highest})"]
    limit = max_degree if max_degree is not None else max(highest, 1)
    _check_size(sum(len(counts) for counts in degrees), limit + 1, spec)
    for graph, counts in zip(graphs, degrees, strict=True):
        columns = torch.nn.functional.one_hot(counts.clamp(max=limit), limit + 1)
        graph.x = columns.to(torch.float32)  # [num_nodes, max_degree + 1]
    clipped = sum(int((counts > limit).sum()) for counts in degrees)
    beyond = f"; {clipped} nodes of higher degree in the last column" if clipped else ""
    return [
        f"no node features: x = one-hot degree ({limit + 1} columns, max_degree={limit}{beyond})"
    ]


def _column(counts: Tensor, kind: str) -> Tensor:
    values = counts.to(torch.float32).unsqueeze(1)  # [num_nodes, 1]
    if kind == "constant":
        return torch.ones_like(values)
    return values.log1p() if kind == "log-degree" else values


def _check_size(num_nodes: int, columns: int, spec: str) -> None:
    size = 4 * num_nodes * columns
    if size > _MAX_BYTES:
        raise DataError(
            f"{spec}: one-hot degrees would take {size / 2**30:.1f} GiB ({num_nodes:,} nodes x "
            f"{columns:,} columns); expected a smaller max_degree= or features=log-degree"
        )
