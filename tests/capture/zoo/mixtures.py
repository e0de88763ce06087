"""Branches that part, meet and exchange; graphs that get more rows than nodes."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool, global_mean_pool

from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep
from .running import Plain

MEETING, MORE = "branches that meet", "more rows than nodes"


@entry("a trunk, then a tower for each task", MEETING)
class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.towers = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.trunk:
            x = keep(F.relu(conv(x, edge_index)))
        outputs = []
        for tower, head in zip(self.towers, self.heads, strict=True):
            outputs.append(head(global_mean_pool(keep(F.relu(tower(x, edge_index))), batch)))
        return torch.cat(outputs, dim=1)


# Each branch consumes a sum of both: the sums are what the layers consume.
@entry("towers that exchange after each layer", MEETING)
class CrossStitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.left = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))
        self.right = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        a = b = keep(self.embed(x))
        for left, right in zip(self.left, self.right, strict=True):
            new_a, new_b = left(a, edge_index).relu(), right(b, edge_index).relu()
            a, b = keep(0.7 * new_a + 0.3 * new_b), keep(0.3 * new_a + 0.7 * new_b)
        return self.head(torch.cat([global_add_pool(a, batch), global_add_pool(b, batch)], dim=1))


# The same atoms before and after a reaction: two branches, and their difference is pooled.
@entry("reactant and product, the difference pooled", MEETING, data="views")
class Reaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def encode(self, x, edge_index):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return x

    def forward(self, data):
        before = self.encode(data.x, data.edge_index)
        after = self.encode(data.x2, data.edge_index2)
        return self.head(global_add_pool(keep(after - before), data.batch))


# In eval no edge is dropped, so both views hold the same numbers; they are two runs all the same.
@entry("two augmented views that are one in eval", MEETING, readings=("twice", "once"))
class Augmented(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.project = nn.Linear(WIDTH, 4)

    def encode(self, x, edge_index, batch, *readings):
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu(), *readings)
        return self.project(global_add_pool(x, batch))

    def forward(self, x, edge_index, batch):
        keep(x)
        return self.encode(x, edge_index, batch), self.encode(x, edge_index, batch, "twice")


@entry("BGRL: an encoder and its slow copy", MEETING)
class SlowCopy(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = Plain(), Plain()
        self.predictor = nn.Linear(2, 2)

    def forward(self, x, edge_index, batch):
        prediction = self.predictor(self.online(x, edge_index, batch))
        with torch.no_grad():
            target = self.target(x, edge_index, batch)
        return prediction, target


# The last layer feeds an output of nodes alone; the graph's output ends a layer earlier.
@entry("an auxiliary layer for nodes after the readout", MEETING, readings=("graphs", "all"))
class Auxiliary(Plain):
    def __init__(self):
        super().__init__()
        self.extra = GCNConv(WIDTH, 3)

    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        out = self.head(global_mean_pool(h, batch))
        return out, keep(self.extra(h, edge_index), "all")


@entry("an autoencoder with layers in its decoder", MEETING)
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [FEATURES, WIDTH, 4, WIDTH, FEATURES]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x, edge_index):
        keep(x)
        for conv in self.convs[:-1]:
            x = keep(conv(x, edge_index).relu())
        return keep(self.convs[-1](x, edge_index))


class WithVirtual(nn.Module):
    """Virtual nodes are rows of their own, after those of the nodes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.virtual = nn.Parameter(torch.randn(1, WIDTH))
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, edge_index, batch):
        num_nodes, num_graphs = len(x), int(batch.max()) + 1
        x = torch.cat([self.embed(x), self.virtual.expand(num_graphs, -1)])
        links = torch.stack([torch.arange(num_nodes), num_nodes + batch])
        edge_index = torch.cat([edge_index, links, links.flip(0)], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.head(x[num_nodes:])


_ROWS = r"rows.*--layers|--layers"
add("virtual nodes as rows, read out", MORE, WithVirtual, refused=_ROWS)


@entry("virtual nodes as rows, the nodes pooled", MORE, refused=_ROWS, either=True)
class VirtualNodesPooled(WithVirtual):
    def forward(self, x, edge_index, batch):
        num_nodes, num_graphs = len(x), int(batch.max()) + 1
        x = torch.cat([self.embed(x), self.virtual.expand(num_graphs, -1)])
        keep(x[:num_nodes])
        links = torch.stack([torch.arange(num_nodes), num_nodes + batch])
        edge_index = torch.cat([edge_index, links, links.flip(0)], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
            keep(x[:num_nodes])
        return self.head(global_mean_pool(x[:num_nodes], batch))


# Two copies of each graph, with another mark: rows are of copies, not of nodes.
@entry("DropGNN: copies of each graph", MORE, refused=_ROWS)
class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        num_nodes = len(x)
        x = torch.cat([x, -x])  # [2 * num_nodes, features]
        edge_index = torch.cat([edge_index, edge_index + num_nodes], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.head(global_mean_pool(x.view(2, num_nodes, -1).mean(0), batch))
