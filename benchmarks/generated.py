"""Random graphs in the sizes of well-known sets, for a machine that has none of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from histograph_post.data import GraphDataset, from_graphs

#: Number of categories in the atom and bond features of pretrain-gnns.
ATOM_TYPES, CHIRALITY_TAGS, BOND_TYPES, BOND_DIRECTIONS = 120, 3, 4, 3


@dataclass(frozen=True)
class GraphSet:
    """The statistics of a published data set that generated graphs follow."""

    num_graphs: int
    mean_nodes: float
    largest: int
    #: Standard deviation of the logarithm of the number of nodes.
    spread: float
    #: Edges per node beyond those of a spanning tree.
    extra_edges: float
    #: Kinds of nodes, one-hot; None for atoms and bonds as pretrain-gnns numbers them.
    node_kinds: int | None


GRAPH_SETS = {
    "PROTEINS": GraphSet(1113, 39.1, 620, 0.9, 0.85, 3),
    "NCI1": GraphSet(4110, 29.9, 111, 0.4, 0.08, 37),
    "BBBP": GraphSet(2039, 24.1, 132, 0.45, 0.08, None),
}


def generate(name: str, num_graphs: int) -> GraphDataset:
    """Return random graphs in the sizes of a data set, in two classes that differ in their nodes.

    Args:
        name: Of :data:`GRAPH_SETS`.
        num_graphs: How many, at most as many as the set has.
    """
    like = GRAPH_SETS[name]
    random = np.random.default_rng(0)
    count = min(num_graphs, like.num_graphs)
    middle = np.log(like.mean_nodes) - like.spread**2 / 2
    sizes = random.lognormal(middle, like.spread, count).round().clip(3, like.largest).astype(int)
    sizes[-1] = like.largest
    graphs = [_graph(random, like, int(size), label % 2) for label, size in enumerate(sizes)]
    return from_graphs(graphs, spec=f"generated:{name}")


def _graph(random: np.random.Generator, like: GraphSet, num_nodes: int, label: int) -> Data:
    nodes = np.arange(1, num_nodes)
    parents = nodes - np.minimum(nodes, random.integers(1, 4, num_nodes - 1))  # a tree of chains
    extra = random.integers(num_nodes, size=(2, round(like.extra_edges * num_nodes)))
    pairs = np.concatenate([np.stack([nodes, parents]), extra[:, extra[0] != extra[1]]], axis=1)
    edge_index = to_undirected(torch.from_numpy(pairs), num_nodes=num_nodes)  # [2, num_edges]
    kinds = like.node_kinds or ATOM_TYPES
    drawn = torch.from_numpy((kinds * random.random(num_nodes) ** (1 + label)).astype(np.int64))
    if like.node_kinds is not None:
        features = torch.nn.functional.one_hot(drawn, kinds).float()  # [num_nodes, kinds]
        return Data(x=features, edge_index=edge_index, y=torch.tensor([label]))
    tags = torch.from_numpy(random.integers(CHIRALITY_TAGS, size=num_nodes))
    bonds = random.integers((BOND_TYPES, BOND_DIRECTIONS), size=(edge_index.shape[1], 2))
    return Data(
        x=torch.stack([drawn, tags], dim=1),  # [num_nodes, 2]
        edge_index=edge_index,
        edge_attr=torch.from_numpy(bonds),  # [num_edges, 2]
        y=torch.tensor([label]),
    )


def large_graph(
    num_nodes: int = 1_000_000, num_edges: int = 10_000_000, channels: int = 16, classes: int = 8
) -> Data:
    """Return one random graph for node classification, most of whose edges join nodes of a class.

    The features of a node are those of its class under noise four times as strong, so that messages
    help. Of the nodes, 60 % train and 20 % validate.

    Args:
        num_nodes: How many.
        num_edges: In both directions together.
        channels: Features of a node.
        classes: Number of classes.
    """
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(num_nodes) % classes  # [num_nodes]
    pairs = torch.randint(num_nodes, (2, num_edges // 2), generator=random)
    alike = torch.rand(num_edges // 2, generator=random) < 0.6
    # The nearest node of the class: labels repeat with the numbers of nodes.
    same = (pairs[1] - (pairs[1] - pairs[0]) % classes).clamp(min=0)
    pairs[1] = torch.where(alike, same, pairs[1])
    features = 4 * torch.randn(num_nodes, channels, generator=random)
    # The same for graphs of every size: what is learned on a small one holds on a large one.
    kinds = torch.randn(classes, channels, generator=torch.Generator().manual_seed(1))
    features += kinds[labels]
    part = torch.rand(num_nodes, generator=random)
    return Data(
        x=features,  # [num_nodes, channels]
        edge_index=torch.cat([pairs, pairs.flip(0)], dim=1),  # [2, num_edges]
        y=labels,
        train_mask=part < 0.6,
        val_mask=(part >= 0.6) & (part < 0.8),
        test_mask=part >= 0.8,
    )
