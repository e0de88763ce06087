"""Propagation without weights, and kinds of layers by hand: spectral, hyperbolic, hypergraphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    FAConv,
    HypergraphConv,
    MessagePassing,
    global_mean_pool,
)
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import entry, keep
from .states import sum_to_nodes

HOPS, KINDS = "propagation without weights", "kinds of layers"


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
