"""How alike the nodes of a graph are: the three measures of over-smoothing, and layer distances.

Every function takes the rows of one graph and computes in double precision. Rows are centred before
inner products stand for distances: in a collapsed layer little else than the mean would be left.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    # |u - v|^2 = 2 - 2 cos for unit vectors, and their deviations from the mean sum it up exactly.
    deviations = (units - units.mean(0)).square().sum()
    return float(deviations) / (count - 1)


def distance_to(rows: Tensor, last: Tensor) -> float:
    """Return the mean over nodes of ``|x_l - x_last|``, both ``[num_nodes, dim]``."""
    return float((rows.double() - last.double()).norm(dim=1).mean())


def cosine_distance_to(rows: Tensor, last: Tensor) -> float:
    """Return the mean over nodes of ``1 - cos(x_l, x_last)``; a zero has no direction."""
    rows, last = rows.double(), last.double()
    product = rows.norm(dim=1) * last.norm(dim=1)  # [num_nodes]
    directed = product > _TINY
    cosines = (rows * last).sum(1)[directed] / product[directed]  # [directed]
    return float((1 - cosines).mean())
