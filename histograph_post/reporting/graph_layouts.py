"""Where to draw the nodes of a small graph."""

from __future__ import annotations

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import shortest_path

#: Steps of stress majorisation: more do not move a small graph visibly.
_STEPS = 200


def layout(num_nodes: int, edges: np.ndarray) -> np.ndarray:
    """Place nodes so that distances on paper are like distances in the graph: ``[num_nodes, 2]``.

    Classical scaling, improved by stress majorisation; the same graph always looks the same. Parts
    that no path joins stand side by side.

    Args:
        num_nodes: Number of nodes.
        edges: Pairs of nodes, ``[2, num_edges]``.
    """
    if num_nodes < 2:
        return np.zeros((num_nodes, 2))
    ones = np.ones(edges.shape[1])
    adjacency = coo_matrix((ones, (edges[0], edges[1])), shape=(num_nodes, num_nodes))
    distances = shortest_path(adjacency.tocsr(), directed=False, unweighted=True)
    reached = np.isfinite(distances)
    distances = np.where(reached, distances, distances[reached].max() + 1.5)
    places = _classical_scaling(distances)
    weights = 1 / np.maximum(distances, 1.0) ** 2
    np.fill_diagonal(weights, 0)
    inverse = np.linalg.pinv(np.diag(weights.sum(1)) - weights)
    for _ in range(_STEPS):
        gaps = np.linalg.norm(places[:, None] - places[None], axis=-1)
        pulls = weights * distances / np.maximum(gaps, 1e-9)
        np.fill_diagonal(pulls, 0)
        places = inverse @ (np.diag(pulls.sum(1)) - pulls) @ places
    _, _, axes = np.linalg.svd(places - places.mean(0), full_matrices=False)
    return places @ axes.T  # lying down, as frames are wider than high


def _classical_scaling(distances: np.ndarray) -> np.ndarray:
    count = len(distances)
    centred = np.eye(count) - 1 / count
    values, vectors = np.linalg.eigh(-0.5 * centred @ distances**2 @ centred)
    places = vectors[:, -2:] * np.sqrt(np.maximum(values[-2:], 0))
    # Nodes that look alike to the graph would start on one spot and never part.
    return places + 1e-3 * np.random.default_rng(0).standard_normal(places.shape)
