"""Several graphs, copies and edge outputs: which rows are a node's, and in which order."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GCNConv,
    GINEConv,
    MessagePassing,
    SAGEConv,
    Set2Set,
    global_add_pool,
    global_mean_pool,
)

from .branches import SIAMESE, mlp
from .edges import EDGES, EQUAL
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .lasts import make_schnet
from .registry import add, entry, keep
from .states import sum_to_nodes

ORDER = "rows and their order"


# Both molecules go through one encoder at once; the pool tells them apart: one chain of layers.
@entry("pairs as one graph, one encoder, pooled by side", SIAMESE, data="merged pairs")
class PooledBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        x = keep(data.x)
        for conv in self.convs:
            x = keep(conv(x, data.edge_index).relu())
        sides = global_add_pool(x, 2 * data.batch + data.side)  # [2 * num_graphs, width]
        return self.head(sides.view(-1, 2 * WIDTH))


# CIGIN: after their layers the two molecules attend to each other's atoms.
@entry("pairs with x_s and x_t, no number of nodes", SIAMESE, data="bare pairs", refused=r"node")
class BarePairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, WIDTH), GCNConv(FEATURES, WIDTH)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        source = global_add_pool(self.first(data.x_s, data.edge_index_s).relu(), data.x_s_batch)
        target = global_add_pool(self.second(data.x_t, data.edge_index_t).relu(), data.x_t_batch)
        return self.head(torch.cat([source, target], dim=-1))


# Several shapes of one molecule through one encoder: a branch for each.
@entry("conformers through one SchNet", SIAMESE, either=True)
class Conformers(nn.Module):
    def __init__(self):
        super().__init__()
        self.schnet = make_schnet()

    def forward(self, z, pos, batch):
        return torch.stack([self.shape(z, p, batch) for p in (pos, 1.1 * pos)]).mean(0)

    def shape(self, z, pos, batch):
        net = self.schnet
        edge_index, distance = net.interaction_graph(pos, batch)
        smeared = net.distance_expansion(distance)
        h = keep(net.embedding(z))
        for block in net.interactions:
            h = keep(h + block(h, edge_index, distance, smeared))
        return net.readout(keep(net.lin2(net.act(net.lin1(h)))), batch)


# Each graph for itself, in a loop: layers see the rows of one graph at a time.
@entry("a loop over single graphs", ORDER, refused=r"rows.*--layers|--layers")
class OneByOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)

    def forward(self, batch):
        pooled = []
        for graph in batch.to_data_list():
            x = self.conv1(graph.x, graph.edge_index).relu()
            pooled.append(self.conv2(x, graph.edge_index).relu().mean(0))
        return torch.stack(pooled)


# The layers work on the nodes in another order: as many rows, each of another node than its place
# says. Refused, or put back into the order of the data.
@entry("nodes are sorted before the layers", ORDER, refused=r"order|--layers", either=True)
class Sorted(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        order = x[:, 0].argsort()  # [num_nodes]
        place = order.argsort()
        keep(x)
        x, edge_index, batch = x[order], place[edge_index], batch[order]
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
            keep(x[place])
        return global_mean_pool(x, batch)


# A head for edges where there are as many as nodes: its rows are no nodes'.
class EdgeHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = mlp(2 * WIDTH + EDGE_FEATURES, WIDTH, 2)

    def forward(self, x, edge_index, edge_attr):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(torch.cat([x[edge_index[0]], x[edge_index[1]], edge_attr], dim=1))


add("a head for edges", EDGES, EdgeHead)
add("a head for edges, on cycles", EQUAL, EdgeHead, data="cycles")


class EdgesFirstLayer(MessagePassing):
    """PyG's class, edge states first: ``layer(e, x, edge_index) -> e, x``."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin_e, self.lin_x = nn.Linear(3 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, e, x, edge_index):
        e = F.relu(self.lin_e(torch.cat([e, x[edge_index[0]], x[edge_index[1]]], dim=1)))
        return e, F.relu(self.lin_x(torch.cat([x, self.propagate(edge_index, e=e, x=x)], dim=1)))

    def message(self, e, x_j):
        return e * x_j


class EdgesFirstNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(EdgesFirstLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        e, x = self.edges(edge_attr), keep(self.embed(x))
        for layer in self.layers:
            e, x = layer(e, x, edge_index)
            keep(x)
        return self.head(global_mean_pool(x, batch))


add("PyG layers with edges first", EDGES, EdgesFirstNet)
add("PyG layers with edges first, on cycles", EQUAL, EdgesFirstNet, data="cycles")


class UpdatedEdges(nn.Module):
    """Edge states are made anew between the layers, by functions in the model."""

    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.convs = nn.ModuleList(GINEConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.updates = nn.ModuleList(nn.Linear(3 * WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def states(self, x, edge_index, edge_attr):
        x, e = keep(self.embed(x)), self.edges(edge_attr)
        for conv, update in zip(self.convs, self.updates, strict=True):
            x = keep(F.relu(conv(x, edge_index, e)))
            e = e + torch.tanh(update(torch.cat([x[edge_index[0]], x[edge_index[1]], e], dim=1)))
        return x, e

    def forward(self, x, edge_index, edge_attr, batch):
        return self.head(global_mean_pool(self.states(x, edge_index, edge_attr)[0], batch))


add("edges updated between layers", EDGES, UpdatedEdges)
add("edges updated between layers, on cycles", EQUAL, UpdatedEdges, data="cycles")


# Nodes and edges are read out; edges have no rows in a history of nodes.
class Megnet(UpdatedEdges):
    def __init__(self):
        super().__init__()
        self.node_pool, self.edge_pool = Set2Set(WIDTH, 2), Set2Set(WIDTH, 2)
        self.head = nn.Linear(4 * WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        x, e = self.states(x, edge_index, edge_attr)
        pooled = [self.node_pool(x, batch), self.edge_pool(e, batch[edge_index[0]])]
        return self.head(torch.cat(pooled, dim=1))


add("MEGNet: nodes and edges are pooled", EDGES, Megnet, either=True)
add("MEGNet on cycles", EQUAL, Megnet, data="cycles", either=True)


class SelfLoops(nn.Module):
    """Hand-written layers that add self-loops: on cycles twice as many edges as nodes."""

    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.lin = nn.Linear(width_in, WIDTH)

        def forward(self, x, edge_index):
            loops = torch.arange(len(x)).repeat(2, 1)
            source, target = torch.cat([edge_index, loops], dim=1)
            return sum_to_nodes(self.lin(x)[source], target, len(x)) / 2

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for layer in self.layers:
            x = keep(F.relu(layer(x, edge_index)))
        return global_add_pool(x, batch)


add("hand-written layers with self-loops, on cycles", EQUAL, SelfLoops, data="cycles")
