"""Layers that are asked for: what ``--layers`` gives, one meaning for all of it.

A name means what the next layer consumes of that module; of nested matches the outermost, each
tensor once, in the order of execution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GatedGraphConv,
    GCNConv,
    GINConv,
    GraphUNet,
    TopKPooling,
    global_add_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep, recording

FAMILY = "layers by name"


class NamedGin(nn.Module):
    """Inside of each convolution are five modules that ``convs.*`` matches too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def layer(self, number, x, edge_index):
        return F.relu(self.norms[number](self.convs[number](x, edge_index)))

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for number in range(3):
            x = keep(self.layer(number, x, edge_index), "all", str(number))
        return self.head(global_add_pool(x, batch))


add("--layers 'convs.*'", FAMILY, NamedGin, layers="convs.*", readings=("all",))
add("--layers 'convs*'", FAMILY, NamedGin, layers="convs*", readings=("all",))
add("--layers convs.1", FAMILY, NamedGin, layers="convs.1", readings=("1",))


class FirstAndLast(NamedGin):
    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for number in range(3):
            x = self.layer(number, x, edge_index)
            if number != 1:
                keep(x)
        return self.head(global_add_pool(x, batch))


add("--layers convs.2,convs.0", FAMILY, FirstAndLast, layers="convs.2,convs.0")
add("--layers convs.0,3,convs.0", FAMILY, FirstAndLast, layers="convs.0,3,convs.0")


# The U-Net's first convolution is consumed after its activation by the pooling below; the network
# as a whole is consumed after the ReLU behind it.
@entry("--layers unet.down_convs.0,unet", FAMILY, layers="unet.down_convs.0,unet")
class NamedUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.unet = GraphUNet(FEATURES, WIDTH, WIDTH, depth=2, pool_ratios=0.5)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        if recording():
            weight = torch.ones(edge_index.shape[1])
            keep(F.relu(self.unet.down_convs[0](x, edge_index, weight)))
        x = keep(F.relu(self.unet(x, edge_index, batch)))
        return self.head(global_mean_pool(x, batch))


@entry("--layers conv1 before a pooling", FAMILY, layers="conv1")
class NamedBeforePooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.pool1 = GCNConv(FEATURES, WIDTH), TopKPooling(WIDTH)
        self.conv2 = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        x = keep(F.relu(self.conv1(x, edge_index)))
        x, edge_index, _, batch, _, _ = self.pool1(x, edge_index, batch=batch)
        return global_mean_pool(F.relu(self.conv2(x, edge_index)), batch)


# No layers are found by themselves; a name still means what the next step consumes of it.
@entry("--layers phi.* without message passing", FAMILY, layers="phi.*")
class NamedDeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.rho = nn.Linear(WIDTH, 1)

    def forward(self, x, batch):
        for lin in self.phi:
            x = keep(F.relu(lin(x)))
        return self.rho(global_add_pool(x, batch))


@entry("--layers steps of a GatedGraphConv", FAMILY, layers="steps")
class GatedSteps(nn.Module):
    """A step is given the state, not what it maps that by before it sends it."""

    def __init__(self):
        super().__init__()
        self.embed, self.conv = nn.Linear(FEATURES, WIDTH), GatedGraphConv(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        h = x = keep(self.embed(x))
        for weight in self.conv.weight if recording() else ():
            sent = (h @ weight)[edge_index[0]]
            h = keep(self.conv.rnn(torch.zeros_like(h).index_add_(0, edge_index[1], sent), h))
        return global_mean_pool(self.conv(x, edge_index), batch)
