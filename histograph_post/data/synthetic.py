"""``demo:``, a graph-classification set made in code, for trying the tool without any files.

Each graph is a random tree of 10 to 40 nodes with some extra edges; each node has one of four
colours and carries it as a one-hot vector under Gaussian noise. The two classes differ in

- who is next to whom: an edge of class 1 joins equal colours four times out of five, one of
  class 0 once (both vary from graph to graph), which the first message-passing layers see and
  repeated averaging over neighbours wipes out; and
- how common the first two colours are, a weaker sign that averaging keeps, so every depth sees it.

So a shallow network does well, and a deep one without residual connections, trained for as long,
is left with little more than the weaker sign in its last layer, while its first layers still tell
the neighbours apart. Any readout that looks at early layers can use them, a linear map of all
layers as well as attention. Results on these graphs say nothing about real data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from ..errors import DataError
from .dataset import GraphDataset, from_graphs
from .spec import LEVEL_ARGS, as_int, check_names, level_options

#: Graphs at most: each is kept in memory.
_MOST = 10**7

_COLOURS = 4
_FEATURE_NOISE = 0.3
#: More of the first colour and less of the second, or the other way round.
_COLOUR_SHIFT = 0.06
#: Edges beside those of the tree, per node.
_EXTRA_EDGES = 0.3


def load_demo(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Make the demo set: ``num_graphs`` graphs (600), half of each class, from ``seed`` (0)."""
    spec = f"demo:{name}"
    check_names(args, ("seed", "num_graphs", *LEVEL_ARGS), spec=spec)
    seed = as_int(args, "seed", default=0, spec=spec)
    num_graphs = as_int(args, "num_graphs", default=600, spec=spec)
    if name or seed < 0 or not 2 <= num_graphs <= _MOST:
        raise DataError(
            f"{spec} with seed={seed}, num_graphs={num_graphs}: "
            f"expected demo: with a seed from 0 and 2 to {_MOST} graphs"
        )
    random = np.random.default_rng(seed)
    labels = random.permutation(num_graphs) % 2
    graphs = [_graph(random, int(label)) for label in labels]
    return from_graphs(graphs, spec=spec, **level_options(args, own="graph", spec=spec))


def _graph(random: np.random.Generator, label: int) -> Data:
    num_nodes = int(random.integers(10, 41))
    shares = np.full(_COLOURS, 1 / _COLOURS)
    shares[:2] += _COLOUR_SHIFT * (2 * label - 1) * np.array([1, -1])
    colours = random.choice(_COLOURS, size=num_nodes, p=shares)
    attraction = random.beta(2 + 6 * label, 8 - 6 * label)  # of like to like: 0.2 or 0.8
    adjacency = np.zeros((num_nodes, num_nodes), dtype=np.int64)

    def connect(node: int, others: np.ndarray) -> None:
        alike = colours[others] == colours[node]
        wanted = others[alike if random.random() < attraction else ~alike]
        other = random.choice(wanted if len(wanted) else others)
        adjacency[node, other] = adjacency[other, node] = 1

    for node in range(1, num_nodes):
        connect(node, np.arange(node))  # a tree
    for node in random.integers(num_nodes, size=random.binomial(num_nodes, _EXTRA_EDGES)):
        connect(node, np.delete(np.arange(num_nodes), node))
    noise = random.normal(0, _FEATURE_NOISE, (num_nodes, _COLOURS))
    features = np.eye(_COLOURS)[colours] + noise
    return Data(
        x=torch.from_numpy(features).to(torch.float32),  # [num_nodes, 4]
        edge_index=torch.from_numpy(np.stack(adjacency.nonzero())),  # [2, num_edges]
        y=torch.tensor([label]),
    )
