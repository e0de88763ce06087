"""The manners of frameworks: GraphGym and GraphGPS, DGL, torchdrug, powerful-gnns, Kipf's GCN."""

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

GYM, DGL, DRUG, PLAIN = "GraphGym and GraphGPS", "DGL style", "torchdrug style", "plain PyTorch"


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


# powerful-gnns: sparse matrices for neighbours and for the pool, a linear map of each layer's pool.
@entry("GIN paper: sparse matrices, every layer pooled", PLAIN, either=True)
class PowerfulGnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlps = nn.ModuleList([mlp(FEATURES, WIDTH, WIDTH), mlp(WIDTH, WIDTH, WIDTH)])
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.linears_prediction = nn.ModuleList(
            [nn.Linear(FEATURES, 2), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)]
        )

    def sparse(self, index, rows, columns):
        ones = torch.ones(index.shape[1])
        return torch.sparse_coo_tensor(index, ones, (rows, columns), check_invariants=True)

    def forward(self, x, edge_index, batch):
        num_nodes, num_graphs = len(x), int(batch.max()) + 1
        adj_block = self.sparse(edge_index, num_nodes, num_nodes)
        members = torch.stack([batch, torch.arange(num_nodes)])
        graph_pool = self.sparse(members, num_graphs, num_nodes)
        hidden_rep = [keep(x)]
        h = x
        for layer_mlp, norm in zip(self.mlps, self.batch_norms, strict=True):
            h = F.relu(norm(layer_mlp(torch.spmm(adj_block, h))))
            hidden_rep.append(keep(h))
        score_over_layer = 0
        for h, linear in zip(hidden_rep, self.linears_prediction, strict=True):
            score_over_layer += F.dropout(linear(torch.spmm(graph_pool, h)), 0.5, self.training)
        return score_over_layer


class Kipf(nn.Module):
    """pygcn's layer: ``layer(x, adj)``."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out))

    def forward(self, x, adj):
        return torch.spmm(adj, torch.mm(x, self.weight))


@entry("Kipf's GCN: layer(x, adj)", PLAIN)
class KipfGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2 = Kipf(FEATURES, WIDTH), Kipf(WIDTH, 3)

    def forward(self, x, edge_index):
        ones = torch.ones(edge_index.shape[1])
        shape = (len(x), len(x))
        adj = torch.sparse_coo_tensor(edge_index, ones, shape, check_invariants=True)
        x = keep(F.dropout(F.relu(self.gc1(keep(x), adj)), 0.5, training=self.training))
        return F.log_softmax(keep(self.gc2(x, adj)), dim=1)


@entry("nn.Sequential of layers that take a tuple", PLAIN)
class TupleSequential(nn.Module):
    class Layer(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.conv = Kipf(width_in, WIDTH)

        def forward(self, state):
            x, adj = state
            return F.relu(self.conv(x, adj)), adj

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.Layer(FEATURES), self.Layer(WIDTH), self.Layer(WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        adj = torch.zeros(len(x), len(x)).index_put_(tuple(edge_index), torch.ones(()))
        if recording():
            state = keep(x), adj
            for layer in self.net:
                state = layer(state)
                keep(state[0])
        return self.head(global_mean_pool(self.net((x, adj))[0], batch))


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
