"""Negatives for links that train without any: pairs drawn anew in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tasks import Task
from .non_edges import NonEdges
from .row_batches import RowBatch


class Negatives(NamedTuple):
    """Pairs that are no links, drawn for one batch."""

    #: Nodes numbered within their graph: ``[2, negatives]``.
    pairs: Tensor
    #: Place of each pair's graph in the batch: ``[negatives]``.
    owners: np.ndarray


class LinkNegatives:
    """Draws as many pairs as a batch has links, from the same graphs, by the seed of the epoch.

    Args:
        task: What is predicted.
        targets: Of every label row, ``[rows]`` or ``[rows, targets]``.
        non_edges: The pairs of a graph that neither an edge joins nor a label names.
    """

    def __init__(self, task: Task, targets: Tensor, non_edges: Callable[[int], NonEdges]) -> None:
        self._links = task.level == "link" and task.kind == "binary"
        self._targets = targets
        self._non_edges = non_edges

    def generator(self, rows: np.ndarray, seed: int | None) -> np.random.Generator | None:
        """Return what to draw with; None where these rows need no negatives."""
        lacking = self._links and not bool((self._targets.numpy()[rows] == 0).any())
        # A stream of its own: the seed itself shuffles the graphs.
        return np.random.default_rng([seed, 1]) if lacking and seed is not None else None

    def draw(self, members: RowBatch, random: np.random.Generator) -> Negatives:
        """Draw as many pairs in each graph as it has links; a graph that is too dense has fewer."""
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
