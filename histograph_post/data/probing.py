"""A few graphs of a data set, on which a model is tried out."""

from __future__ import annotations

import numpy as np
from torch_geometric.data import Data

from .dataset import GraphDataset

#: How many: enough to tell graph rows from node rows, few enough to be quick.
PROBE_GRAPHS = 4


def probe_numbers(dataset: GraphDataset) -> list[int]:
    """Return which graphs to try a model on."""
    # Spread over the data: neighbours in a sorted data set look alike.
    spread = np.linspace(0, len(dataset) - 1, PROBE_GRAPHS).astype(int)
    return np.unique(spread).tolist()


def probe_graphs(dataset: GraphDataset) -> list[Data]:
    """Return the graphs to try a model on, copied."""
    return [dataset.graphs[number].clone() for number in probe_numbers(dataset)]
