"""Layers made of several modules: edge and node blocks, heads, messages, aggregation, update."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    APPNP,
    GatedGraphConv,
    GCNConv,
    MetaLayer,
    SAGEConv,
    TAGConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.utils import scatter, softmax

from .branches import mlp
from .edges import EQUAL
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, entry, keep, recording
from .states import sum_to_nodes

BLOCKS, READOUTS, STEPS = "layers of several modules", "readouts", "steps inside layers"


class EdgeBlock(nn.Module):
    """Graph Nets: edges first, from the nodes at both ends."""

    def __init__(self):
        super().__init__()
        self.mlp = mlp(3 * WIDTH, WIDTH, WIDTH)

    def forward(self, x, e, edge_index):
        return e + self.mlp(torch.cat([x[edge_index[0]], x[edge_index[1]], e], dim=1))


class NodeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp(2 * WIDTH, WIDTH, WIDTH)

    def forward(self, x, e, edge_index):
        return x + self.mlp(torch.cat([x, sum_to_nodes(e, edge_index[1], len(x))], dim=1))


class GraphNets(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.edge_blocks = nn.ModuleList(EdgeBlock() for _ in range(2))
        self.node_blocks = nn.ModuleList(NodeBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        x, e = keep(self.embed(x)), self.edges(edge_attr)
        for edge_block, node_block in zip(self.edge_blocks, self.node_blocks, strict=True):
            e = edge_block(x, e, edge_index)
            x = keep(node_block(x, e, edge_index))
        return self.head(global_mean_pool(x, batch))


add("edge blocks and node blocks", BLOCKS, GraphNets, either=True)
add("edge blocks and node blocks, on cycles", EQUAL, GraphNets, data="cycles", either=True)


class Gather(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH + EDGE_FEATURES, WIDTH)

    def forward(self, x, edge_attr, source):
        return F.relu(self.lin(torch.cat([x[source], edge_attr], dim=1)))


class Aggregate(nn.Module):
    def forward(self, messages, target, num_nodes):
        return sum_to_nodes(messages, target, num_nodes)


class Split(nn.Module):
    """Message, aggregation and update are modules of their own, called by the model."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.message, self.aggregate, self.update = Gather(), Aggregate(), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr, batch):
        h = keep(self.embed(x))
        for _ in range(3):
            messages = self.message(h, edge_attr, edge_index[0])
            h = keep(self.update(self.aggregate(messages, edge_index[1], len(h)), h))
        return self.head(global_add_pool(h, batch))


add("message, aggregation and update as modules", BLOCKS, Split, either=True)
add("message, aggregation and update, on cycles", EQUAL, Split, data="cycles", either=True)


class NodeModel(nn.Module):
    def __init__(self, width_in):
        super().__init__()
        self.lin = nn.Linear(width_in + WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr, u, batch):
        gathered = scatter(edge_attr, edge_index[1], dim_size=len(x), reduce="mean")
        return self.lin(torch.cat([x, gathered], dim=1)).relu()


class EdgeModel(nn.Module):
    def __init__(self, width_in, width_edge):
        super().__init__()
        self.lin = nn.Linear(2 * width_in + width_edge, WIDTH)

    def forward(self, src, dest, edge_attr, u, batch):
        return self.lin(torch.cat([src, dest, edge_attr], dim=1)).relu()


class MetaLayers(nn.Module):
    """PyG's MetaLayer with edges and nodes; neighbours come in by the edges alone."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            MetaLayer(EdgeModel(width, edges), NodeModel(width))
            for width, edges in ((FEATURES, EDGE_FEATURES), (WIDTH, WIDTH))
        )

    def forward(self, x, edge_index, edge_attr, batch):
        keep(x)
        for layer in self.layers:
            x, edge_attr, _ = layer(x, edge_index, edge_attr, batch=batch)
            keep(x)
        return global_mean_pool(x, batch)


add("MetaLayer: edges and nodes", BLOCKS, MetaLayers)
add("MetaLayer: edges and nodes, on cycles", EQUAL, MetaLayers, data="cycles")


# pyGAT: a module for each head, with a dense adjacency; the next layer consumes all heads. What the
# states are multiplied with is made of scores, and of the adjacency only where it is 0.
@entry("pyGAT: a module for each head", BLOCKS, either=True)
class PyGat(nn.Module):
    class Head(nn.Module):
        def __init__(self, width_in, width_out):
            super().__init__()
            self.W = nn.Parameter(torch.randn(width_in, width_out))
            self.a = nn.Parameter(torch.randn(2 * width_out, 1))

        def forward(self, h, adj):
            Wh = h @ self.W
            half = len(self.a) // 2
            e = F.leaky_relu(Wh @ self.a[:half] + (Wh @ self.a[half:]).T, 0.2)
            attention = torch.softmax(torch.where(adj > 0, e, -9e15), dim=1)
            return attention @ Wh

    def __init__(self):
        super().__init__()
        self.attentions = [self.Head(FEATURES, 4) for _ in range(2)]
        for number, attention in enumerate(self.attentions):
            self.add_module(f"attention_{number}", attention)
        self.out_att = self.Head(8, 3)

    def forward(self, x, edge_index):
        adj = torch.zeros(len(x), len(x)).index_put_(tuple(edge_index), torch.ones(()))
        adj = adj + torch.eye(len(x))
        x = keep(F.dropout(x, 0.6, training=self.training))
        x = torch.cat([F.elu(attention(x, adj)) for attention in self.attentions], dim=1)
        x = keep(F.dropout(x, 0.6, training=self.training))
        return F.log_softmax(keep(F.elu(self.out_att(x, adj))), dim=1)


# A tower that steers the other and is read out itself: its state is a branch of its own.
@entry("a tower that steers the other, both read out", BLOCKS)
class Steering(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.steer = GCNConv(WIDTH, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.gate, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        steer = keep(F.relu(self.steer(x, edge_index)))
        x = F.relu(self.convs[0](x, edge_index)) * torch.sigmoid(self.gate(steer))
        x = keep(F.relu(self.convs[1](keep(x), edge_index)))
        pooled = [global_mean_pool(steer, batch), global_mean_pool(x, batch)]
        return self.head(torch.cat(pooled, dim=1))


# The gate of the readout is a convolution: a layer by the letter, of the readout by its use. The
# state is there in each reading; the weighted state or the scores may follow.
@entry(
    "readout: a gate that is a convolution",
    READOUTS,
    readings=("state", "weighted", "scores", "both"),
)
class ConvolvedGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.score, self.head = GCNConv(WIDTH, 1), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        score = keep(softmax(self.score(x, edge_index), batch), "scores", "both")  # [num_nodes, 1]
        return self.head(global_add_pool(keep(score * x, "weighted", "both"), batch))


def steps_by_hand(make_states):
    """Compute the states of the steps beside the forward pass, when they are asked for."""

    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = make_states.layer()
            self.lin, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x, edge_index, batch):
            x = self.lin(x)
            if recording():
                make_states(self.conv, x, edge_index)
            return self.head(global_mean_pool(self.conv(x, edge_index), batch))

    return Steps


def appnp_steps(conv, x, edge_index):
    start = keep(x)
    for _ in range(3):
        one = APPNP(K=1, alpha=0)
        x = keep(0.9 * one(x, edge_index) + 0.1 * start)


# The powers are summed after a map of each: the last step is a power, the result the sum.
def tag_steps(conv, x, edge_index):
    out = conv.lins[0](keep(x))
    power = TAGConv(WIDTH, WIDTH, K=1, bias=False)
    nn.init.zeros_(power.lins[0].weight)
    nn.init.eye_(power.lins[1].weight)
    for lin in conv.lins[1:]:
        x = keep(power(x, edge_index))
        out = out + lin(x)
    keep(out + conv.bias)


# A step's message is a map of the state, which is what is passed on; both are states of the step.
def gated_steps(conv, x, edge_index):
    for step in range(3):
        keep(x, "states")
        mapped = keep(x @ conv.weight[step], "messages")
        x = conv.rnn(sum_to_nodes(mapped[edge_index[0]], edge_index[1], len(x)), x)
    keep(x)


appnp_steps.layer = lambda: APPNP(K=3, alpha=0.1)
tag_steps.layer = lambda: TAGConv(WIDTH, WIDTH, K=2)
gated_steps.layer = lambda: GatedGraphConv(WIDTH, num_layers=3)

add("--layers steps of APPNP", STEPS, steps_by_hand(appnp_steps), layers="steps")
add("--layers steps of TAGConv", STEPS, steps_by_hand(tag_steps), layers="steps", either=True)
add(
    "--layers steps of GatedGraphConv",
    STEPS,
    steps_by_hand(gated_steps),
    layers="steps",
    readings=("states", "messages"),
)
