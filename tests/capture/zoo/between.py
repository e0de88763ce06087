"""What stands between layers and is none: norms by hand, contexts of graphs, penalties, scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    DiffGroupNorm,
    GraphConv,
    MeanSubtractionNorm,
    SAGEConv,
    Set2Set,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn import LayerNorm as GraphLayerNorm
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.utils import degree, scatter, softmax

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

BETWEEN = "between layers"


class Between(nn.Module):
    """Three layers, with something between them and after the last that is given."""

    def __init__(self, step, **modules):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.step = step
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(self.step(self, F.relu(conv(x, edge_index)), edge_index, batch))
        return self.head(global_mean_pool(x, batch))


def graph_norm(self, x, edge_index, batch):
    """A mean and a deviation of each graph, by scatter and back."""
    mean = scatter(x, batch, reduce="mean")[batch]
    deviation = scatter((x - mean).pow(2), batch, reduce="mean")[batch]
    return (x - mean) / (deviation + 1e-5).sqrt()


def by_degree(self, x, edge_index, batch):
    return x * torch.log1p(degree(edge_index[1], len(x))).unsqueeze(-1)


def virtual_node(self, x, edge_index, batch):
    return x + self.mlp(self.pool(x, batch))[batch]


def context(self, x, edge_index, batch):
    """A vector of each graph, read out by attention over the nodes, goes back to its nodes."""
    return x + torch.tanh(self.lin(self.pool(x, batch)))[batch]


def node_attention(self, x, edge_index, batch):
    weight = softmax(self.lin(x), batch)  # [num_nodes, 1]
    return x + global_add_pool(weight * x, batch)[batch]


for _name, _step, _modules in (
    ("a norm of graphs by hand", graph_norm, {}),
    ("a scale by the degree", by_degree, {}),
    (
        "a virtual node by an aggregation module",
        virtual_node,
        {"pool": SumAggregation, "mlp": lambda: mlp(WIDTH, 4, WIDTH)},
    ),
    (
        "Set2Set as a context between layers",
        context,
        {"pool": lambda: Set2Set(WIDTH, 2), "lin": lambda: nn.Linear(2 * WIDTH, WIDTH)},
    ),
    (
        "attention over the nodes between layers",
        node_attention,
        {"lin": lambda: nn.Linear(WIDTH, 1)},
    ),
    (
        "DiffGroupNorm",
        lambda self, x, e, b: self.norm(x),
        {"norm": lambda: DiffGroupNorm(WIDTH, 2)},
    ),
    ("MeanSubtractionNorm", lambda self, x, e, b: self.norm(x, b), {"norm": MeanSubtractionNorm}),
    (
        "LayerNorm of graphs",
        lambda self, x, e, b: self.norm(x, b),
        {"norm": lambda: GraphLayerNorm(WIDTH)},
    ),
):
    add(
        _name,
        BETWEEN,
        lambda step=_step, modules=_modules: Between(
            step, **{name: make() for name, make in modules.items()}
        ),
    )


@entry("a penalty on differences between neighbours", BETWEEN)
class Penalty(Between):
    """Rows are looked up by edges for a number beside the output: no layer."""

    def __init__(self):
        super().__init__(lambda self, x, edge_index, batch: x)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        penalty = (x[edge_index[0]] - x[edge_index[1]]).pow(2).mean()
        return self.head(global_mean_pool(x, batch)), penalty


# Weights of edges from the states at both ends, for the next layer: a part of what it is given.
@entry("weights of edges learned from the states", BETWEEN)
class LearnedWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.score = nn.Linear(2 * WIDTH, 1)
        self.convs = nn.ModuleList(GraphConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            ends = torch.cat([x[edge_index[0]], x[edge_index[1]]], dim=1)
            weight = torch.sigmoid(self.score(ends)).squeeze(-1)  # [num_edges]
            x = keep(F.relu(conv(x, edge_index, weight)))
        return self.head(global_add_pool(x, batch))
