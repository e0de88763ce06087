"""Parallel branches: towers, views, short beside long, Inception blocks, pairs of molecules."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from .graphs import FEATURES, WIDTH
from .registry import entry, keep

TOWERS, VIEWS, INCEPTION = "parallel branches", "multi-view", "Inception blocks"
SIAMESE = "pairs of molecules"


def mlp(*widths: int) -> nn.Sequential:
    """Linear maps with a ReLU between."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@entry("two towers, pooled apart", TOWERS)
class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.gcn = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.gat = nn.ModuleList([GATConv(FEATURES, WIDTH), GATConv(WIDTH, WIDTH)])
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, x, edge_index, batch):
        a = b = keep(x)
        for conv in self.gcn:
            a = keep(F.relu(conv(a, edge_index)))
        for conv in self.gat:
            b = keep(F.elu(conv(b, edge_index)))
        return self.head(torch.cat([global_mean_pool(a, batch), global_max_pool(b, batch)], dim=1))


# The last states of the towers are consumed as one tensor by the pool: apart they are what the
# towers made, together what the readout consumes. Either holds all of both.
@entry("two towers, concatenated per node", TOWERS, readings=("apart", "together"))
class TwoTowersPerNode(TwoTowers):
    def forward(self, x, edge_index, batch):
        a = b = keep(x)
        a = keep(F.relu(self.gcn[0](a, edge_index)))
        a = keep(F.relu(self.gcn[1](a, edge_index)), "apart")
        b = keep(F.elu(self.gat[0](b, edge_index)))
        b = keep(F.elu(self.gat[1](b, edge_index)), "apart")
        both = keep(torch.cat([a, b], dim=1), "together")
        return self.head(global_mean_pool(both, batch))


# As above; a sum of two branches is an aggregation, so all three tensors.
@entry("two towers, added per node", TOWERS)
class TwoTowersAdded(TwoTowers):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        a = b = keep(x)
        for conv in self.gcn:
            a = keep(F.relu(conv(a, edge_index)))
        for conv in self.gat:
            b = keep(F.elu(conv(b, edge_index)))
        return self.head(global_mean_pool(keep(a + b), batch))


@entry("towers that take turns", TOWERS)
class TakingTurns(TwoTowers):
    def forward(self, x, edge_index, batch):
        a = b = keep(x)
        for gcn, gat in zip(self.gcn, self.gat, strict=True):
            a = keep(gcn(a, edge_index).relu())
            b = keep(gat(b, edge_index).tanh())
        return self.head(torch.cat([global_add_pool(a, batch), global_add_pool(b, batch)], dim=1))


@entry("a short branch beside a long one", TOWERS)
class ShortAndLong(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.long = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.short = SAGEConv(WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        long = x
        for conv in self.long:
            long = keep(F.relu(conv(long, edge_index)))
        short = keep(F.relu(self.short(x, edge_index)))
        return self.head(
            torch.cat([global_mean_pool(long, batch), global_mean_pool(short, batch)], dim=-1)
        )


@entry("the short branch first", TOWERS)
class ShortFirst(ShortAndLong):
    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        short = keep(F.relu(self.short(x, edge_index)))
        pooled = global_mean_pool(short, batch)
        for conv in self.long:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(torch.cat([pooled, global_mean_pool(x, batch)], dim=-1))


# A branch without message passing is a path of the input to the readout: what it makes of each
# node is pooled with weights between, so it may be kept; it is no layer, so it need not be.
@entry("an MLP branch beside the convolutions", TOWERS, readings=("layers", "pooled too"))
class MlpBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.mlp = mlp(FEATURES, WIDTH, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        h = keep(x)
        for conv in self.convs:
            h = keep(conv(h, edge_index).relu())
        beside = keep(self.mlp(x), "pooled too")
        return self.head(
            torch.cat([global_add_pool(h, batch), global_add_pool(beside, batch)], dim=1)
        )


# An auxiliary output that eval leaves out: it ran, but nothing descends from it.
@entry("a branch whose result is not used", TOWERS)
class DeadBranch(ShortAndLong):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        auxiliary = self.short(x, edge_index)
        for conv in self.long:
            x = keep(F.relu(conv(x, edge_index)))
        out = self.head(global_mean_pool(x, batch))
        return (out, auxiliary) if self.training else out


class SharedEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [GINConv(mlp(FEATURES, WIDTH, WIDTH)), GINConv(mlp(WIDTH, WIDTH, WIDTH))]
        )

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return global_add_pool(x, batch)


# The input of both views is one tensor, so it is one layer.
@entry("one encoder on two sets of edges", VIEWS, data="views", readings=("once", "twice"))
class TwoEdgeSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(2 * WIDTH, 2)

    def encode(self, x, edge_index):
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return x

    def forward(self, x, edge_index, edge_index2, batch):
        first = self.encode(keep(x), edge_index)
        second = self.encode(keep(x, "twice"), edge_index2)
        pooled = [global_mean_pool(view, batch) for view in (first, second)]
        return self.head(torch.cat(pooled, dim=-1))


@entry("one encoder on two sets of features", VIEWS, data="views")
class TwoFeatureSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = SharedEncoder()
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, data):
        first = self.encoder(data.x, data.edge_index, data.batch)
        second = self.encoder(data.x2, data.edge_index, data.batch)
        return self.head(torch.cat([first, second], dim=-1))


# The views are stacked first: apart they are the states, together the same numbers in one tensor.
@entry(
    "two views, the better one by attention",
    VIEWS,
    data="views",
    readings=("apart", "together"),
)
class AttendedViews(TwoEdgeSets):
    """AM-GCN: a softmax over the views of each node; an aggregation before the pool."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, data):
        views, x = [], keep(data.x)
        for edges in (data.edge_index, data.edge_index2):
            first = keep(self.convs[0](x, edges).relu())
            views.append(keep(self.convs[1](first, edges).relu(), "apart"))
        stacked = keep(torch.stack(views, dim=1), "together")  # [num_nodes, 2, width]
        weight = torch.softmax(self.score(torch.tanh(stacked)), dim=1)  # [num_nodes, 2, 1]
        return self.head(global_mean_pool(keep((weight * stacked).sum(1)), data.batch))


@entry("a convolution for each kind of edge, their mean after each layer", VIEWS)
class MeanOfKinds(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, edge_attr, batch):
        kinds = [edge_index[:, edge_attr[:, kind] > 0] for kind in range(3)]
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(torch.stack([conv(x, edges) for edges in kinds]).mean(0).relu())
        return self.head(global_mean_pool(x, batch))


@entry("Inception blocks, concatenated", INCEPTION)
class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [FEATURES, 12, 12]
        self.blocks = nn.ModuleList(
            nn.ModuleList([GCNConv(w, 4), SAGEConv(w, 4), GATConv(w, 4)]) for w in widths
        )
        self.head = nn.Linear(12, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for block in self.blocks:
            x = keep(F.relu(torch.cat([conv(x, edge_index) for conv in block], dim=-1)))
        return self.head(global_mean_pool(x, batch))


@entry("Inception blocks, added", INCEPTION)
class AddedInception(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.left = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for left, right in zip(self.left, self.right, strict=True):
            x = keep(F.elu(left(x, edge_index) + right(x, edge_index)))
        return self.head(global_max_pool(x, batch))


# Inside a block one path has two convolutions: what the second consumes is a layer of its own.
@entry("Inception blocks with a deeper path", INCEPTION)
class DeeperInception(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.one = nn.ModuleList(GCNConv(WIDTH, 4) for _ in range(2))
        self.two = nn.ModuleList(
            nn.ModuleList([GCNConv(WIDTH, 4), GCNConv(4, 4)]) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for one, (first, second) in zip(self.one, self.two, strict=True):
            short = one(x, edge_index)
            inner = keep(F.relu(first(x, edge_index)))
            x = keep(F.relu(torch.cat([short, second(inner, edge_index)], dim=-1)))
        return self.head(global_mean_pool(x, batch))


# Two molecules with atoms of their own: there is no one row per node of the batch.
@entry(
    "pairs with x_s and x_t, one encoder", SIAMESE, data="pairs", refused=r"--layers|rows|one graph"
)
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = SharedEncoder()
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        source = self.encoder(data.x_s, data.edge_index_s, data.x_s_batch)
        target = self.encoder(data.x_t, data.edge_index_t, data.x_t_batch)
        return self.head(torch.cat([source, target], dim=-1))


# Both encoders run over all atoms; each is pooled over the atoms of its side. The mask is no
# weight: the last entry of a branch is its state, or the masked state that the pool is given.
@entry(
    "pairs as one graph, two encoders and a mask",
    SIAMESE,
    data="merged pairs",
    readings=("state", "masked"),
)
class MaskedPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.solute = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.solvent = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        x, edge_index, batch = data.x, data.edge_index, data.batch
        side = data.side.unsqueeze(-1).float()  # [num_nodes, 1]
        keep(x)
        a = keep(self.solute[0](x, edge_index).relu())
        a = keep(self.solute[1](a, edge_index).relu(), "state")
        a = keep(a * (1 - side), "masked")
        b = keep(self.solvent[0](x, edge_index).relu())
        b = keep(self.solvent[1](b, edge_index).relu(), "state")
        b = keep(b * side, "masked")
        pooled = [global_add_pool(a, batch), global_add_pool(b, batch)]
        return self.head(torch.cat(pooled, dim=-1))


# Each encoder is given the atoms of its side alone: rows of some of the nodes.
@entry(
    "pairs as one graph, split by index",
    SIAMESE,
    data="merged pairs",
    refused=r"rows.*--layers|--layers.*rows|no message-passing",
)
class SplitPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = SharedEncoder()
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        pooled = []
        for side in (0, 1):
            mask = data.side == side
            number = torch.cumsum(mask, 0) - 1  # [num_nodes]
            edges = data.edge_index[:, mask[data.edge_index[0]]]
            pooled.append(self.encoder(data.x[mask], number[edges], data.batch[mask]))
        return self.head(torch.cat(pooled, dim=-1))
