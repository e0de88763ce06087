"""Sums of layers: those that join them before the pool, and residuals, which do not."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GCNConv,
    GraphConv,
    SAGEConv,
    SimpleConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .lasts import JUMPING, make_jumping
from .registry import add, entry, keep

RESIDUALS, GATES = "residuals", "gates between layers"


def recurrent_join(self, xs):
    """A GRU over the layers of each node; its last output."""
    return keep(self.gru(torch.stack(xs, dim=1))[0][:, -1])


def map_each(self, xs):
    """A linear map for each layer, added up per node."""
    return keep(sum(lin(x) for lin, x in zip(self.lins, xs, strict=True)))


#: More ways to write an aggregation over layers: a function, its width, modules it needs.
JOINS = {
    "JK by + and a division": (lambda self, xs: keep((xs[1] + xs[2] + xs[3]) / 3), WIDTH),
    "JK by reduce": (lambda self, xs: keep(functools.reduce(torch.add, xs)), WIDTH),
    "JK by einsum": (
        lambda self, xs: keep(torch.einsum("l,lnd->nd", self.w.weight[0], torch.stack(xs))),
        WIDTH,
        {"w": lambda: nn.Linear(4, 1)},
    ),
    "JK by a softmax over layers": (
        lambda self, xs: keep(
            (torch.softmax(self.w.weight[0], 0).view(-1, 1, 1) * torch.stack(xs)).sum(0)
        ),
        WIDTH,
        {"w": lambda: nn.Linear(4, 1)},
    ),
    "JK by cat, view and max": (
        lambda self, xs: keep(torch.cat(xs, dim=-1).view(-1, 4, WIDTH).max(dim=1)[0]),
        WIDTH,
    ),
    "JK by torch.sum of a stack in the middle": (
        lambda self, xs: keep(torch.sum(torch.stack(xs, dim=1), dim=1)),
        WIDTH,
    ),
    "JK by a product": (lambda self, xs: keep(xs[1] * xs[2] * xs[3]), WIDTH),
    "JK by a GRU": (
        recurrent_join,
        WIDTH,
        {"gru": lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)},
    ),
    "JK by a map of each layer": (
        map_each,
        5,
        {"lins": lambda: nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(4))},
    ),
    "JK by cat of the first and the last, and an MLP": (
        lambda self, xs: keep(self.mlp(torch.cat([xs[-1], xs[0]], dim=-1))),
        5,
        {"mlp": lambda: mlp(2 * WIDTH, WIDTH, 5)},
    ),
}

for _name, _parts in JOINS.items():
    add(_name, JUMPING, functools.partial(make_jumping, *_parts))


class Residual(nn.Module):
    """Four convolutions of one width, and what becomes of them as given."""

    def __init__(self, run):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GraphConv(WIDTH, WIDTH) for _ in range(4))
        self.run = run

    def forward(self, x, edge_index, batch):
        convs = [
            functools.partial(lambda conv, x: conv(x, edge_index), conv) for conv in self.convs
        ]
        return self.head(global_mean_pool(self.run(convs, self.embed(x)), batch))


def initial(convs, x):
    start = keep(x)
    for conv in convs:
        x = keep(F.relu(conv(x)) + start)
    return x


def blocks_of_two(convs, x):
    """ResNet: the residual goes around two convolutions."""
    keep(x)
    for first, second in (convs[:2], convs[2:]):
        inner = keep(F.relu(first(x)))
        x = keep(F.relu(x + second(inner)))
    return x


def scaled(convs, x):
    keep(x)
    for conv in convs:
        x = keep(x + 0.1 * torch.tanh(conv(x)))
    return x


def momentum(convs, x):
    """A second state, the velocity, beside the one that layers consume."""
    keep(x)
    velocity = torch.zeros_like(x)
    for conv in convs:
        velocity = 0.9 * velocity + torch.tanh(conv(x))
        x = keep(x + 0.5 * velocity)
    return x


def symmetric(convs, x):
    """A U without pooling: the way up adds what the way down made."""
    first = keep(F.relu(convs[0](keep(x))))
    second = keep(F.relu(convs[1](first)))
    third = keep(F.relu(convs[2](second)) + first)
    return keep(F.relu(convs[3](third)) + x)


def all_before(convs, x):
    """What a layer consumes is the sum of all before it: the sum is the stream."""
    total = keep(x)
    for conv in convs:
        total = keep(total + F.relu(conv(total)))
    return total


def greater(convs, x):
    """Each state is the larger of the new one and the one before."""
    keep(x)
    for conv in convs:
        x = keep(torch.maximum(x, F.relu(conv(x))))
    return x


def smaller(convs, x):
    keep(x)
    for conv in convs:
        x = keep(torch.minimum(x, torch.tanh(conv(x))))
    return x


def concatenated(convs, x):
    """The input is added to the last state once, at the end."""
    start = keep(x)
    for conv in convs[:-1]:
        x = keep(F.relu(conv(x)))
    x = keep(F.relu(convs[-1](x)), "state")
    return keep(x + start)


add("the first state is added in each layer", RESIDUALS, lambda: Residual(initial))
add("residuals around two layers", RESIDUALS, lambda: Residual(blocks_of_two))
add("scaled residuals", RESIDUALS, lambda: Residual(scaled))
add("residuals with momentum", RESIDUALS, lambda: Residual(momentum))
# The last addition is one of the way up, though it is the only one that reaches the input.
add("symmetric skips", RESIDUALS, lambda: Residual(symmetric))
add("sums of all layers before", RESIDUALS, lambda: Residual(all_before))


@entry("classes by convolutions, then propagated with a residual", RESIDUALS)
class Propagated(nn.Module):
    """The same state, which layers have made, is added after each step."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.step, self.head = SimpleConv(aggr="mean"), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index, batch):
        x = keep(self.convs[0](keep(x), edge_index).relu())
        first = y = keep(self.head(self.convs[1](x, edge_index)))
        for _ in range(2):
            y = keep(0.5 * first + 0.5 * self.step(y, edge_index))
        return global_add_pool(y, batch)


add("residuals by the maximum", RESIDUALS, lambda: Residual(greater))
add("residuals by the minimum", RESIDUALS, lambda: Residual(smaller))
# One skip around everything: a residual, or an aggregation of the first and the last state.
add(
    "one skip around all layers",
    RESIDUALS,
    lambda: Residual(concatenated),
    readings=("state", "residual"),
)


@entry("highway gates", GATES)
class Highway(nn.Module):
    """A gate of each layer decides between its state and the one before."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv, gate in zip(self.convs, self.gates, strict=True):
            share = torch.sigmoid(gate(x))
            x = keep(share * F.relu(conv(x, edge_index)) + (1 - share) * x)
        return self.head(global_add_pool(x, batch))


# The gate of a layer comes from its graph and goes back to its nodes: a part of the layer.
@entry("squeeze and excitation", GATES)
class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.squeezes = nn.ModuleList(mlp(WIDTH, 4, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv, squeeze in zip(self.convs, self.squeezes, strict=True):
            x = F.relu(conv(x, edge_index))
            x = keep(x * torch.sigmoid(squeeze(global_mean_pool(x, batch)))[batch])
        return self.head(global_max_pool(x, batch))


@entry("experts: a softmax over layers of each depth", GATES)
class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.ModuleList([GCNConv(WIDTH, WIDTH), SAGEConv(WIDTH, WIDTH)]) for _ in range(3)
        )
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for experts, gate in zip(self.experts, self.gates, strict=True):
            weight = torch.softmax(gate(x), dim=-1)  # [num_nodes, 2]
            made = torch.stack([expert(x, edge_index) for expert in experts], dim=-1)
            x = keep(F.relu((made * weight.unsqueeze(1)).sum(-1)))
        return self.head(global_mean_pool(x, batch))


# SimGNN: the weight of a node is how near it is to a map of its graph's mean.
@entry("readout: attention by the graph's context", GATES)
class ContextAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        context = torch.tanh(global_mean_pool(x, batch) @ self.weight)  # [num_graphs, width]
        score = torch.sigmoid((x * context[batch]).sum(dim=-1, keepdim=True))  # [num_nodes, 1]
        return self.head(global_add_pool(score * x, batch))
