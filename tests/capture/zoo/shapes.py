"""Unusual shapes and types: heads kept apart, padding, nodes in the last place, hetero graphs."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, HeteroConv, MessagePassing, SAGEConv, global_mean_pool
from torch_geometric.nn.models import LightGCN
from torch_geometric.utils import to_dense_adj

from .graphs import FEATURES, WIDTH
from .lasts import JUMPING, make_jumping
from .registry import add, entry, keep
from .running import Plain

SHAPES, TYPES, KINDS = "shapes", "types", "other graphs"

_NO_ROWS = r"--layers"


@entry("states of several heads", SHAPES)
class Heads(nn.Module):
    """States are ``[num_nodes, heads, width]`` all the way."""

    class Layer(MessagePassing):
        def __init__(self):
            super().__init__(aggr="mean", node_dim=0)
            self.lin = nn.Linear(4, 4)

        def forward(self, x, edge_index):
            return torch.tanh(self.propagate(edge_index, x=self.lin(x)))

        def message(self, x_j):
            return x_j

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x).view(-1, 2, 4))
        for layer in self.layers:
            x = keep(layer(x, edge_index))
        return self.head(global_mean_pool(x.flatten(1), batch))


# The first row stands for "no neighbour": all rows are one place further than their nodes.
@entry("a row of padding before the nodes", SHAPES, refused=_NO_ROWS, either=True)
class PaddingRow(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        x = F.pad(x, (0, 0, 1, 0))  # [1 + num_nodes, features]
        keep(x[1:])
        for conv in self.convs:
            x = F.relu(conv(x, edge_index + 1))
            keep(x[1:])
        return global_mean_pool(x[1:], batch)


# One graph in a batch dimension of 1: nodes are in the second place.
@entry("a leading dimension of 1", SHAPES, refused=_NO_ROWS, either=True)
class LeadingOne(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.lin = nn.Linear(width_in, WIDTH)

        def forward(self, x, adj):
            return F.relu(torch.bmm(adj, self.lin(x)))

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])

    def forward(self, x, edge_index, batch):
        adj = to_dense_adj(edge_index, max_num_nodes=len(x))  # [1, num_nodes, num_nodes]
        keep(x)
        x = x.unsqueeze(0)
        for layer in self.layers:
            x = layer(x, adj)
            keep(x.squeeze(0))
        return global_mean_pool(x.squeeze(0), batch)


@entry("nodes in the last dimension", SHAPES, refused=_NO_ROWS, either=True)
class NodesLast(nn.Module):
    """States are ``[1, width, num_nodes]``, as a 1-d convolution wants them."""

    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.conv = nn.Conv1d(width_in, WIDTH, 1)

        def forward(self, x, adj):
            return F.relu(self.conv(x) @ adj)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])

    def forward(self, x, edge_index, batch):
        adj = to_dense_adj(edge_index, max_num_nodes=len(x))[0]
        keep(x)
        x = x.t().unsqueeze(0)
        for layer in self.layers:
            x = layer(x, adj)
            keep(x[0].t())
        return global_mean_pool(x[0].t(), batch)


def buffered_max(self, xs):
    """Layers are written into a tensor that was there before them."""
    buffer = xs[0].new_zeros(len(xs[0]), 4, WIDTH)
    for at, x in enumerate(xs):
        buffer[:, at] = x
    return keep(buffer.max(dim=1).values)


add("JK by a buffer", JUMPING, lambda: make_jumping(buffered_max, WIDTH))


@entry("tasks in one flat output", SHAPES)
class FlatOutput(Plain):
    """``[num_graphs * tasks]``: neither rows of graphs nor of nodes."""

    def forward(self, x, edge_index, batch):
        return super().forward(x, edge_index, batch).flatten()


@entry("nodes' embedding beside their logits", SHAPES)
class EmbeddingAndLogits(Plain):
    def forward(self, x, edge_index):
        h = self.encode(x, edge_index)
        return h, self.head(h)


# Out of PyTorch's sight: nothing says that the output comes of the layers.
@entry("a pool in NumPy", SHAPES, refused=r"--layers")
class NumpyPool(Plain):
    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index).numpy()
        rows = [h[(batch == graph).numpy()].mean(0) for graph in range(int(batch[-1]) + 1)]
        return self.head(torch.from_numpy(np.stack(rows)))


@entry("double precision", TYPES)
class Double(Plain):
    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x, edge_index, batch):
        return super().forward(x.double(), edge_index, batch).float()


# Under autocast states have half the bits; the last one as it was made, or as the pool is given it.
@entry("autocast inside", TYPES, readings=("given", "made"))
class Autocast(Plain):
    def forward(self, x, edge_index, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = keep(self.embed(x))
            for number in range(2):
                h = keep(self.layer(number, h, edge_index))
            h = keep(self.layer(2, h, edge_index), "made")
        return self.head(global_mean_pool(keep(h.float(), "given"), batch))


def lightgcn_by_hand(model, data):
    history = [model.embedding.weight]
    for conv in model.convs:
        history.append(conv(history[-1], data.edge_index))
    return [*history, sum(weight * x for weight, x in zip(model.alpha, history, strict=True))]


# Its states start from a table of its own, a row for each node of the one graph.
add(
    "PyG's LightGCN",
    KINDS,
    lambda: LightGCN(12, WIDTH, num_layers=2),
    by_hand=lightgcn_by_hand,
    data="one size",
    either=True,
)


@entry("HeteroConv on hetero graphs", KINDS, data="hetero", refused=r"[Hh]etero")
class Hetero(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = [("atom", "in", "ring"), ("ring", "of", "atom")]
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv((width, width), WIDTH) for kind in kinds})
            for width in (FEATURES, WIDTH)
        )

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {key: x.relu() for key, x in conv(x_dict, edge_index_dict).items()}
        return x_dict["atom"]


@entry("steps in time before the nodes", SHAPES, refused=r"nodes in dimension 1.*--layers")
class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(FEATURES, WIDTH)

    def forward(self, x, edge_index, batch):
        states = self.conv(torch.stack([x, 2 * x, 3 * x]), edge_index)  # [time, num_nodes, width]
        return global_mean_pool(states.mean(0), batch)
