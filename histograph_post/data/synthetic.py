"""``demo:``, a graph-classification set made in code, for trying the tool without any files.

Each graph is a random tree of 10 to 40 nodes with some extra edges; each node has one of four
colours, in the same proportions in both classes. A graph of class 1 more often has

- edges between nodes of one colour, which one step of message passing sees,
- triangles, which two steps see, and
- slightly more edges altogether, a weak sign that every layer sees.

Nodes carry their colour as a one-hot vector under Gaussian noise, and the classes overlap. What
matters most is thus seen in the first layers of a message-passing network and fades a little where
deep layers average it away. Nothing else is arranged: any readout that keeps what early layers know
can use it. These graphs stand for no real data, and results on them say nothing about real data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from ..errors import DataError
from .arguments import LEVEL_ARGS, as_int, check_names, level_options
from .dataset import GraphDataset, from_graphs

_COLOURS = 4
_FEATURE_NOISE = 0.3


def load_demo(name: str, args: Mapping[str, Any]) -> GraphDataset:
    """Make the demo set: ``num_graphs`` graphs (300), half of each class, from ``seed`` (0)."""
    spec = f"demo:{name}"
    check_names(args, ("seed", "num_graphs", *LEVEL_ARGS), spec=spec)
    seed = as_int(args, "seed", default=0, spec=spec)
    num_graphs = as_int(args, "num_graphs", default=300, spec=spec)
    if name or seed is None or seed < 0 or num_graphs is None or num_graphs < 2:
        raise DataError(
            f"{spec} with seed={seed}, num_graphs={num_graphs}: "
            "expected demo: with a seed from 0 and at least 2 graphs"
        )
    random = np.random.default_rng(seed)
    labels = random.permutation(num_graphs) % 2
    graphs = [_graph(random, int(label)) for label in labels]
    return from_graphs(graphs, spec=spec, **level_options(args, own="graph", spec=spec))


def _graph(random: np.random.Generator, label: int) -> Data:
    num_nodes = int(random.integers(10, 41))
    colours = random.integers(_COLOURS, size=num_nodes)
    attraction = random.beta(2 + 6 * label, 8 - 6 * label)  # of like to like: 0.2 or 0.8
    closing = random.beta(2 + 4 * label, 6 - 4 * label)  # share of extra edges that close triangles
    num_extra = random.binomial(num_nodes, 0.3 + 0.05 * label)
    adjacency = np.zeros((num_nodes, num_nodes), dtype=np.int64)
    for node in range(1, num_nodes):
        earlier = np.arange(node)
        alike = earlier[colours[:node] == colours[node]]
        parent = random.choice(alike if len(alike) and random.random() < attraction else earlier)
        adjacency[node, parent] = adjacency[parent, node] = 1
    for _ in range(num_extra):
        start, end = random.choice(num_nodes, 2, replace=False)
        two_hops = np.flatnonzero(adjacency[start] @ adjacency)
        two_hops = two_hops[two_hops != start]
        if len(two_hops) and random.random() < closing:
            end = random.choice(two_hops)
        adjacency[start, end] = adjacency[end, start] = 1
    noise = random.normal(0, _FEATURE_NOISE, (num_nodes, _COLOURS))
    features = np.eye(_COLOURS)[colours] + noise
    return Data(
        x=torch.from_numpy(features).to(torch.float32),  # [num_nodes, 4]
        edge_index=torch.from_numpy(np.stack(adjacency.nonzero())),  # [2, num_edges]
        y=torch.tensor([label]),
    )
