"""Pairs of nodes that no edge joins, numbered: they are drawn without trial and error."""

from __future__ import annotations

import numpy as np


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
    """The pairs of a graph's nodes that are not among some known ones.

    Args:
        num_nodes: Nodes of the graph.
        known: Pairs to leave out, in any direction and number: ``[2, num_known]``.
    """

    def __init__(self, num_nodes: int, known: np.ndarray) -> None:
        numbers = np.unique(pair_numbers(known[:, known[0] != known[1]]))
        self.count = num_nodes * (num_nodes - 1) // 2 - len(numbers)
        #: How many unknown pairs come before each known one: ``[num_known]``.
        self._before = numbers - np.arange(len(numbers))

    def draw(self, number: int, random: np.random.Generator) -> np.ndarray:
        """Draw different pairs, the lower node first: ``[2, number]``, or all if there are fewer.

        Every pair is as likely as any other.
        """
        ranks = random.choice(self.count, min(number, self.count), replace=False)
        # The k-th unknown pair is preceded by k unknown ones, and by the known ones among them.
        return numbered_pairs(ranks + np.searchsorted(self._before, ranks, side="right"))
