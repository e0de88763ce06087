"""The manners of frameworks: GraphGym and GraphGPS, DGL, torchdrug."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GINEConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.utils import to_dense_batch

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, entry, keep, recording
from .states import sum_to_nodes

GYM, DGL, DRUG = "GraphGym and GraphGPS", "DGL style", "torchdrug style"


class GymEncoder(nn.Module):
    """A module that changes the batch it is given, as all of GraphGym's do."""

    def __init__(self):
        super().__init__()
        self.nodes, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)

    def forward(self, batch):
        batch.x, batch.edge_attr = self.nodes(batch.x), self.edges(batch.edge_attr)
        return batch


class GymLayer(nn.Module):
    """GeneralLayer: convolution, norm, dropout, activation, l2-norm."""

    def __init__(self, width_in=WIDTH):
        super().__init__()
        self.layer = SAGEConv(width_in, WIDTH)
        self.post_layer = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.ReLU())

    def forward(self, batch):
        batch.x = self.post_layer(self.layer(batch.x, batch.edge_index))
        batch.x = F.normalize(batch.x, p=2, dim=1)
        return batch


class GymStage(nn.Module):
    """GNNStackStage, with sums or concatenations of what each layer was given."""

    def __init__(self, skip):
        super().__init__()
        self.skip = skip
        for number in range(3):
            width = WIDTH * (number + 1) if skip == "skipconcat" else WIDTH
            self.add_module(f"layer{number}", GymLayer(width))

    def forward(self, batch):
        for layer in self.children():
            x = keep(batch.x)
            batch = layer(batch)
            if self.skip == "skipsum":
                batch.x = batch.x + x
            elif self.skip == "skipconcat":
                batch.x = torch.cat([x, batch.x], dim=1)
        keep(batch.x)
        return batch


class GymHead(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer_post_mp = mlp(width, WIDTH, 1)

    def forward(self, batch):
        return self.layer_post_mp(global_add_pool(batch.x, batch.batch)), batch.batch


class Gym(nn.Module):
    def __init__(self, skip, width=WIDTH):
        super().__init__()
        self.encoder, self.mp, self.post_mp = GymEncoder(), GymStage(skip), GymHead(width)

    def forward(self, batch):
        for module in self.children():
            batch = module(batch)
        return batch


add("GraphGym, stack", GYM, lambda: Gym("stack"))
add("GraphGym, skipsum", GYM, lambda: Gym("skipsum"))
add("GraphGym, skipconcat", GYM, lambda: Gym("skipconcat", 4 * WIDTH))


class GpsLayer(nn.Module):
    """GraphGPS: a local model and attention side by side, added, then a feed-forward block."""

    def __init__(self):
        super().__init__()
        self.local_model = GINEConv(mlp(WIDTH, WIDTH, WIDTH))
        self.self_attn = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm1_local, self.norm1_attn = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.norm2 = nn.BatchNorm1d(WIDTH)
        self.ff_linear1, self.ff_linear2 = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, batch):
        h = batch.x
        h_in1 = h
        h_local = h_in1 + self.local_model(h, batch.edge_index, batch.edge_attr)
        h_out_list = [self.norm1_local(h_local)]
        h_dense, mask = to_dense_batch(h, batch.batch)
        h_attn = self.self_attn(h_dense, h_dense, h_dense, key_padding_mask=~mask)[0][mask]
        h_out_list.append(self.norm1_attn(h_in1 + h_attn))
        h = sum(h_out_list)
        h = h + self.ff_linear2(F.relu(self.ff_linear1(h)))
        batch.x = self.norm2(h)
        return batch


@entry("GraphGPS: GINE and attention", GYM)
class Gps(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = GymEncoder()
        self.layers = nn.Sequential(*(GpsLayer() for _ in range(3)))
        self.post_mp = GymHead(WIDTH)

    def forward(self, batch):
        batch = self.encoder(batch)
        keep(batch.x)
        for layer in self.layers:
            batch = layer(batch)
            keep(batch.x)
        return self.post_mp(batch)


@entry("GraphGPS: an encoder of random walks beside the features", GYM)
class GpsWithPositions(Gps):
    """The embedded input is the concatenation that the first layer consumes."""

    def __init__(self):
        super().__init__()
        self.encoder.nodes = nn.Linear(FEATURES, WIDTH - 3)
        self.raw_norm = nn.BatchNorm1d(3)

    def forward(self, batch):
        encoding = self.raw_norm(batch.pos)
        batch = self.encoder(batch)
        batch.x = torch.cat([batch.x, encoding], dim=1)
        keep(batch.x)
        for layer in self.layers:
            batch = layer(batch)
            keep(batch.x)
        return self.post_mp(batch)


class Graph:
    """What a DGL graph is to a layer: an object whose edges are not among the arguments."""

    def __init__(self, edge_index, num_nodes):
        self.source, self.target, self.num_nodes = *edge_index, num_nodes

    def update_all(self, feat):
        """copy_u and sum."""
        return sum_to_nodes(feat[self.source], self.target, self.num_nodes)


class DglConv(nn.Module):
    """``conv(graph, feat)``."""

    def __init__(self, width_in):
        super().__init__()
        self.fc_self, self.fc_neigh = nn.Linear(width_in, WIDTH), nn.Linear(width_in, WIDTH)

    def forward(self, graph, feat):
        return self.fc_self(feat) + self.fc_neigh(graph.update_all(feat))


# Nothing that a layer is given says that it is one, but what it does.
@entry("DGL style: conv(graph, feat)", DGL, either=True)
class DglSage(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([DglConv(FEATURES), DglConv(WIDTH), DglConv(WIDTH)])
        self.classify = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        g, h = Graph(edge_index, len(x)), keep(x)
        for layer in self.layers:
            h = keep(F.relu(layer(g, h)))
        return self.classify(global_mean_pool(h, batch))


# Attention in three functions of the edges, the state kept on the graph (g.ndata).
@entry("DGL style: states on the graph object", DGL, either=True)
class DglAttention(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.fc = nn.Linear(width_in, WIDTH, bias=False)
            self.attn = nn.Linear(2 * WIDTH, 1, bias=False)

        def forward(self, g):
            z = self.fc(g.ndata["h"])
            ends = torch.cat([z[g.source], z[g.target]], dim=1)
            e = torch.exp(F.leaky_relu(self.attn(ends)))  # [num_edges, 1]
            total = sum_to_nodes(e, g.target, g.num_nodes) + 1e-9
            g.ndata["h"] = F.elu(sum_to_nodes(e * z[g.source], g.target, g.num_nodes) / total)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(FEATURES), self.Layer(WIDTH)])
        self.readout = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        g = Graph(edge_index, len(x))
        g.ndata = {"h": keep(x)}
        for layer in self.layers:
            layer(g)
            keep(g.ndata["h"])
        return self.readout(global_add_pool(g.ndata["h"], batch))


class DrugConv(nn.Module):
    """torchdrug: ``layer(graph, input)``, message and combine apart."""

    def __init__(self, width_in):
        super().__init__()
        self.mlp = mlp(width_in, WIDTH, WIDTH)
        self.eps = nn.Parameter(torch.zeros(1))

    def message_and_aggregate(self, graph, input):
        return graph.update_all(input)

    def combine(self, input, update):
        return F.relu(self.mlp((1 + self.eps) * input + update))

    def forward(self, graph, input):
        return self.combine(input, self.message_and_aggregate(graph, input))


class DrugGin(nn.Module):
    """Shortcuts and concatenated hidden layers; returns both features by name."""

    def __init__(self, concat_hidden):
        super().__init__()
        self.concat_hidden = concat_hidden
        self.layers = nn.ModuleList([DrugConv(FEATURES), DrugConv(WIDTH), DrugConv(WIDTH)])

    def forward(self, x, edge_index, batch):
        graph, hiddens, layer_input = Graph(edge_index, len(x)), [], keep(x)
        for layer in self.layers:
            hidden = layer(graph, layer_input)
            if hidden.shape == layer_input.shape:
                hidden = hidden + layer_input
            hiddens.append(keep(hidden))
            layer_input = hidden
        node_feature = torch.cat(hiddens, dim=-1) if self.concat_hidden else hiddens[-1]
        graph_feature = global_add_pool(node_feature, batch)
        return {"graph_feature": graph_feature, "node_feature": node_feature}


add("torchdrug style, last layer", DRUG, lambda: DrugGin(False), either=True)
add("torchdrug style, concatenated layers", DRUG, lambda: DrugGin(True), either=True)


@entry("PyG's Sequential", GYM)
class SequentialOfPyg(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = GraphSequential(
            "x, edge_index, batch",
            [
                (SAGEConv(FEATURES, WIDTH), "x, edge_index -> x1"),
                (nn.ReLU(inplace=True), "x1 -> x1"),
                (SAGEConv(WIDTH, WIDTH), "x1, edge_index -> x2"),
                (nn.ReLU(inplace=True), "x2 -> x2"),
                (lambda x1, x2: [x1, x2], "x1, x2 -> xs"),
                (lambda xs: torch.cat(xs, dim=1), "xs -> x"),
                (global_mean_pool, "x, batch -> x"),
                nn.Linear(2 * WIDTH, 2),
            ],
        )

    def forward(self, x, edge_index, batch):
        if recording():
            first = keep(self.net[0](keep(x), edge_index).relu())
            keep(self.net[2](first, edge_index).relu())
        return self.net(x, edge_index, batch)
