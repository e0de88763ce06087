"""How depth is arranged: dense and gated stacks, propagation without weights, spectral layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    FAConv,
    GATv2Conv,
    GCN2Conv,
    GCNConv,
    GINConv,
    HypergraphConv,
    MessagePassing,
    PNAConv,
    ResGatedGraphConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import dropout_edge

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep
from .states import sum_to_nodes

STACKS, HOPS, KINDS = "stacks of layers", "propagation without weights", "kinds of layers"


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
            keep(z)
            z = torch.tanh(self.conv(z, edge_index) + given)
        return self.head(global_mean_pool(keep(z), batch))


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


# --- propagation without weights


class Hop(MessagePassing):
    def forward(self, x, edge_index):
        edge_index, weight = gcn_norm(edge_index, None, x.size(0), dtype=x.dtype)
        return self.propagate(edge_index, x=x, weight=weight)

    def message(self, x_j, weight):
        return weight[:, None] * x_j


# The head maps every hop: the history is the hops.
@entry("SIGN: hops first, a map of each, per node", HOPS)
class Sign(nn.Module):
    def __init__(self):
        super().__init__()
        self.hop = Hop()
        self.lins = nn.ModuleList(nn.Linear(FEATURES, WIDTH) for _ in range(3))
        self.head = nn.Linear(3 * WIDTH, 3)

    def hops(self, x, edge_index):
        xs = [keep(x)]
        for _ in range(2):
            xs.append(keep(self.hop(xs[-1], edge_index)))
        return torch.cat([lin(x).relu() for lin, x in zip(self.lins, xs, strict=True)], dim=1)

    def forward(self, x, edge_index):
        return self.head(self.hops(x, edge_index))


@entry("SIGN: hops first, a map of each, pooled", HOPS)
class PooledSign(Sign):
    def forward(self, x, edge_index, batch):
        return self.head(global_mean_pool(keep(self.hops(x, edge_index)), batch))


@entry("GRAND: the mean of all hops, then an MLP per node", HOPS)
class Grand(nn.Module):
    def __init__(self):
        super().__init__()
        self.hop, self.mlp = Hop(), mlp(FEATURES, WIDTH, 3)

    def forward(self, x, edge_index):
        total = h = keep(x)
        for _ in range(3):
            h = keep(self.hop(h, edge_index))
            total = total + h
        return F.log_softmax(self.mlp(keep(total / 4)), dim=-1)


@entry("FAGCN: the first state beside the current one", HOPS)
class Fagcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.t1, self.t2 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.convs = nn.ModuleList(FAConv(WIDTH, eps=0.3) for _ in range(3))

    def forward(self, x, edge_index):
        h = raw = keep(F.relu(self.t1(F.dropout(x, 0.5, self.training))))
        for conv in self.convs:
            h = keep(conv(h, raw, edge_index))
        return F.log_softmax(self.t2(h), dim=1)


@entry("predict, then propagate, pooled", HOPS)
class PredictThenPropagate(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp, self.hop, self.head = mlp(FEATURES, WIDTH, WIDTH), Hop(), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        z = start = keep(self.mlp(x))
        for _ in range(3):
            z = keep(0.9 * self.hop(z, edge_index) + 0.1 * start)
        return self.head(global_mean_pool(z, batch))


# --- kinds of layers


class ChebyshevByHand(nn.Module):
    """Polynomials of a dense Laplacian, made in the layer."""

    def __init__(self, width):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(width, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, edge_index):
        adjacency = x.new_zeros(len(x), len(x))
        adjacency[edge_index[0], edge_index[1]] = 1.0
        scale = adjacency.sum(dim=1).clamp(min=1).rsqrt()
        laplacian = -scale[:, None] * adjacency * scale
        terms = [x, laplacian @ x]
        terms.append(2 * laplacian @ terms[1] - terms[0])
        return sum(lin(term) for lin, term in zip(self.lins, terms, strict=True))


@entry("ChebNet by hand: a dense Laplacian in each layer", KINDS)
class ChebNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([ChebyshevByHand(FEATURES), ChebyshevByHand(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for layer in self.layers:
            x = keep(layer(x, edge_index).relu())
        return self.head(global_mean_pool(x, batch))


@entry("HypergraphConv", KINDS)
class Hypergraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([HypergraphConv(FEATURES, WIDTH), HypergraphConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.leaky_relu(conv(x, edge_index)))
        return self.head(global_mean_pool(x, batch))


def exp_map(u):
    length = u.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return torch.tanh(length) * u / length


def log_map(y):
    length = y.norm(dim=-1, keepdim=True).clamp(min=1e-6, max=1 - 1e-5)
    return torch.atanh(length) * y / length


class HyperbolicLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, edge_index):
        source, target = edge_index
        tangent = self.lin(log_map(h))
        return exp_map(F.relu(tangent + sum_to_nodes(tangent[source], target, len(h))))


# The readout takes the states back to the tangent space: without weights, so that is the state.
@entry("hyperbolic layers, pooled in the tangent space", KINDS)
class Hyperbolic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(HyperbolicLayer() for _ in range(2))

    def forward(self, x, edge_index, batch):
        h = keep(exp_map(self.embed(x)))
        for at, layer in enumerate(self.layers):
            h = layer(h, edge_index)
            if at == 0:
                keep(h)
        return self.head(global_mean_pool(keep(log_map(h)), batch))
