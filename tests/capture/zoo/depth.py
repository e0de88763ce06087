"""How layers are stacked: dense, gated, scaled, recurrent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.utils import dropout_edge

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep

STACKS = "stacks of layers"


@entry("GATv2 with edge features and mapped residuals", STACKS)
class ResidualGat(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (FEATURES, 2 * WIDTH, 2 * WIDTH)
        self.convs = nn.ModuleList(
            GATv2Conv(size, WIDTH, heads=2, edge_dim=EDGE_FEATURES) for size in sizes
        )
        self.skips = nn.ModuleList(nn.Linear(size, 2 * WIDTH) for size in sizes)
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, x, edge_index, edge_attr, batch):
        keep(x)
        for conv, skip in zip(self.convs, self.skips, strict=True):
            x = F.dropout(x, 0.6, training=self.training)
            x = keep(F.elu(conv(x, edge_index, edge_attr) + skip(x)))
        return self.head(global_mean_pool(x, batch))


@entry("GraphSAGE with edges dropped in training, states of length 1", STACKS)
class Sage(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        keep(x)
        for conv in self.convs:
            edges, _ = dropout_edge(edge_index, p=0.3, training=self.training)
            x = keep(F.normalize(conv(x, edges).relu(), dim=1))
        return self.head(x)


@entry("DenseNet: norm, activation, convolution on all before", STACKS)
class DenseGcn(nn.Module):
    """The last norm and activation are those before every layer."""

    def __init__(self):
        super().__init__()
        sizes = [WIDTH * (at + 1) for at in range(4)]
        self.stem = nn.Linear(FEATURES, WIDTH)
        self.norms = nn.ModuleList(nn.BatchNorm1d(size) for size in sizes)
        self.convs = nn.ModuleList(GCNConv(size, WIDTH) for size in sizes[:-1])
        self.head = nn.Linear(sizes[-1], 2)

    def forward(self, x, edge_index, batch):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x = torch.cat([x, conv(keep(norm(x).relu()), edge_index)], dim=1)
        return self.head(global_mean_pool(keep(self.norms[-1](x).relu()), batch))


@entry("PNA with towers and a GRU", STACKS)
class PnaTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = nn.Linear(FEATURES, WIDTH), nn.GRU(WIDTH, WIDTH)
        degrees = torch.tensor([0, 5, 10, 5, 2])
        self.convs = nn.ModuleList(
            PNAConv(
                *(WIDTH, WIDTH, ["mean", "max", "std"], ["identity", "amplification"]),
                deg=degrees,
                edge_dim=EDGE_FEATURES,
                towers=2,
                divide_input=True,
            )
            for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.mlp = mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        h = keep(self.embed(x))
        for conv, norm in zip(self.convs, self.norms, strict=True):
            m = F.relu(norm(conv(h, edge_index, edge_attr)))
            h = keep(self.gru(m[None], h[None])[0].squeeze(0))
        return self.mlp(global_add_pool(h, batch))


@entry("a virtual node with a GRU, all layers concatenated", STACKS)
class VirtualGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.cell = nn.Linear(FEATURES, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(3 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        h, states = self.embed(x), []
        virtual = h.new_zeros(int(batch.max()) + 1, WIDTH)
        for conv in self.convs:
            h = keep(h + virtual[batch])
            h = conv(h, edge_index).relu()
            virtual = self.cell(global_add_pool(h, batch), virtual)
            states.append(h)
        # The next layers consume the states with the virtual node, the readout those without.
        return self.head(global_add_pool(keep_last(torch.cat(states, dim=1), h), batch))


def keep_last(pooled, state):
    """The last state and then what is pooled."""
    keep(state)
    return keep(pooled)


@entry("GCNII, pooled", STACKS)
class Gcn2(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCN2Conv(WIDTH, 0.1, 0.5, layer + 1) for layer in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = first = keep(self.lin(x).relu())
        for conv in self.convs:
            x = keep(conv(F.dropout(x, 0.5, self.training), first, edge_index).relu())
        return self.head(global_mean_pool(x, batch))


@entry("LayerScale: norm before, a learned scale after each convolution", STACKS)
class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(0.1 * torch.ones(WIDTH)) for _ in range(3))
        self.final_norm = nn.LayerNorm(WIDTH)

    def forward(self, x, edge_index, batch):
        h = self.embed(x)
        for norm, conv, scale in zip(self.norms, self.convs, self.scales, strict=True):
            h = h + scale * conv(keep(norm(h)), edge_index).relu()
        return self.head(global_mean_pool(keep(self.final_norm(h)), batch))


# The zeros of the start hold nothing of the graphs: no layer.
@entry("equilibrium: one layer, the input injected in each step", STACKS)
class Equilibrium(nn.Module):
    def __init__(self):
        super().__init__()
        self.inject, self.conv = nn.Linear(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        given = self.inject(x)
        z = torch.zeros_like(given)
        for _ in range(4):
            z = keep(torch.tanh(self.conv(z, edge_index) + given))
        return self.head(global_mean_pool(z, batch))


@entry("ResGatedGraphConv with norms, residual from the second on", STACKS)
class LateResidual(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (FEATURES, WIDTH, WIDTH)
        self.convs = nn.ModuleList(ResGatedGraphConv(size, WIDTH) for size in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in sizes)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for at, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            h = norm(conv(x, edge_index)).relu()
            x = keep(h if at == 0 else x + h)
        return self.head(global_add_pool(x, batch))


class AcmBlock(nn.Module):
    """Low-pass, high-pass and identity, mixed by attention per node."""

    def __init__(self, width):
        super().__init__()
        self.low, self.high = GCNConv(width, WIDTH), GCNConv(width, WIDTH)
        self.full, self.own = nn.Linear(width, WIDTH), nn.Linear(width, WIDTH)
        self.score = nn.Linear(3 * WIDTH, 3)

    def forward(self, x, edge_index):
        low = self.low(x, edge_index).relu()
        high = (self.full(x) - self.high(x, edge_index)).relu()
        own = self.own(x).relu()
        weights = torch.softmax(self.score(torch.cat([low, high, own], dim=1)), dim=1)
        return 3 * (weights[:, :1] * low + weights[:, 1:2] * high + weights[:, 2:] * own)


@entry("ACM-GCN: three filters, mixed per node", STACKS)
class Acm(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([AcmBlock(FEATURES), AcmBlock(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for block in self.blocks:
            x = keep(F.dropout(block(x, edge_index), 0.5, self.training))
        return self.head(global_mean_pool(x, batch))


@entry("positions concatenated before every layer", STACKS)
class PositionsAgain(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCNConv(WIDTH + 3, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, pos, edge_index, batch):
        h = self.embed(x)
        for conv in self.convs:
            h = conv(keep(torch.cat([h, pos], dim=1)), edge_index).relu()
        return self.head(global_mean_pool(keep(h), batch))


class EvolvingLayer(MessagePassing):
    """EvolveGCN: the weights come from a recurrent cell."""

    def __init__(self, width):
        super().__init__(aggr="mean")
        self.weight, self.cell = nn.Parameter(torch.randn(width, WIDTH)), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x @ self.cell(self.weight, self.weight))


@entry("EvolveGCN: weights from a recurrent cell", STACKS)
class Evolving(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([EvolvingLayer(FEATURES), EvolvingLayer(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for layer in self.layers:
            x = keep(F.rrelu(layer(x, edge_index), training=False))
        return self.head(global_mean_pool(x, batch))
