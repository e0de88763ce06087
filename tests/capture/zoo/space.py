"""Atoms and points in space, by hand: SchNet, PaiNN, EGNN, GVP, DGCNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    EdgeConv,
    MessagePassing,
    PointTransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import entry, keep
from .states import sum_to_nodes

ATOMS, POINTS = "atoms in space", "point clouds"


class CfConv(MessagePassing):
    """SchNet's continuous filters."""

    def __init__(self):
        super().__init__(aggr="add")
        self.lin1, self.lin2 = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.filters = mlp(1, WIDTH, WIDTH)

    def forward(self, x, edge_index, distances):
        return self.lin2(self.propagate(edge_index, x=self.lin1(x), w=self.filters(distances)))

    def message(self, x_j, w):
        return x_j * w


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.lin = CfConv(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, distances):
        return self.lin(F.softplus(self.conv(x, edge_index, distances)))


@entry("SchNet by hand: interactions on the bonds", ATOMS)
class SchNetByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.interactions = nn.ModuleList(Interaction() for _ in range(3))
        self.lin1, self.lin2 = nn.Linear(WIDTH, 4), nn.Linear(4, 1)

    def forward(self, z, pos, edge_index, batch):
        distances = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1, keepdim=True)
        h = keep(self.embedding(z))
        for interaction in self.interactions:
            h = keep(h + interaction(h, edge_index, distances))
        energies = self.lin2(F.softplus(self.lin1(h)))  # [num_nodes, 1]
        return global_add_pool(keep(energies), batch)


class PainnMessage(nn.Module):
    """Returns what is to be added to the scalars and to the vectors."""

    def __init__(self):
        super().__init__()
        self.phi, self.filters = mlp(WIDTH, WIDTH, 3 * WIDTH), nn.Linear(1, 3 * WIDTH)

    def forward(self, s, v, edge_index, lengths, directions):
        source, target = edge_index
        parts = (self.phi(s)[source] * self.filters(lengths)).chunk(3, dim=-1)
        ds = sum_to_nodes(parts[0], target, len(s))
        dv = parts[1][:, None] * v[source] + parts[2][:, None] * directions[..., None]
        return ds, sum_to_nodes(dv, target, len(s))


class PainnUpdate(nn.Module):
    """Mixes scalars and vectors of each atom."""

    def __init__(self):
        super().__init__()
        self.U, self.V = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mix = mlp(2 * WIDTH, WIDTH, 3 * WIDTH)

    def forward(self, s, v):
        u, w = self.U(v), self.V(v)
        a, b, c = self.mix(torch.cat([s, w.norm(dim=1)], dim=-1)).chunk(3, dim=-1)
        return a + b * (u * w).sum(dim=1), c[:, None] * u


@entry("PaiNN by hand: messages and updates that are added", ATOMS)
class PainnByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.messages = nn.ModuleList(PainnMessage() for _ in range(2))
        self.updates = nn.ModuleList(PainnUpdate() for _ in range(2))
        self.readout = mlp(WIDTH, WIDTH, 1)

    def forward(self, z, pos, edge_index, batch):
        vectors = pos[edge_index[1]] - pos[edge_index[0]]
        lengths = vectors.norm(dim=-1, keepdim=True)
        s = keep(self.embedding(z))
        v = s.new_zeros(len(s), 3, WIDTH)
        for message, update in zip(self.messages, self.updates, strict=True):
            ds, dv = message(s, v, edge_index, lengths, vectors / (lengths + 1e-6))
            s, v = s + ds, v + dv
            ds, dv = update(s, v)
            s, v = keep(s + ds), v + dv
        return global_add_pool(keep(self.readout(s)), batch)


class QmEgnnLayer(nn.Module):
    """EGNN with attention on the edges, as for QM9: coordinates stay."""

    def __init__(self):
        super().__init__()
        self.edge_mlp = nn.Sequential(mlp(2 * WIDTH + 1, WIDTH, WIDTH), nn.SiLU())
        self.att_mlp = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())
        self.node_mlp = mlp(2 * WIDTH, WIDTH, WIDTH)

    def forward(self, h, edge_index, coord):
        row, col = edge_index
        radial = ((coord[row] - coord[col]) ** 2).sum(dim=1, keepdim=True)
        m = self.edge_mlp(torch.cat([h[row], h[col], radial], dim=1))
        m = m * self.att_mlp(m)
        return h + self.node_mlp(torch.cat([h, sum_to_nodes(m, row, len(h))], dim=1)), coord


@entry("EGNN for QM9: node_dec, sum, graph_dec", ATOMS)
class QmEgnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(FEATURES, WIDTH)
        for at in range(3):
            self.add_module(f"gcl_{at}", QmEgnnLayer())
        self.node_dec = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.graph_dec = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 1))

    def forward(self, x, pos, edge_index, batch):
        h = keep(self.embedding(x))
        for at in range(3):
            h, pos = self._modules[f"gcl_{at}"](h, edge_index, pos)
            keep(h)
        return self.graph_dec(global_add_pool(keep(self.node_dec(h)), batch)).squeeze(1)


@entry("EGNN of bodies that move: coordinates and velocities", ATOMS)
class MovingBodies(nn.Module):
    """The output is where the bodies will be: coordinates, which every layer moves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MovingLayer() for _ in range(2))
        self.embed = nn.Linear(FEATURES, WIDTH)

    def forward(self, x, pos, edge_index):
        h, vel = self.embed(x), torch.zeros_like(pos)
        keep(pos)
        for layer in self.layers:
            h, pos, vel = layer(h, pos, vel, edge_index)
            keep(pos)
        return pos


class MovingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.edge_mlp, self.coord_mlp = mlp(2 * WIDTH + 1, WIDTH, WIDTH), mlp(WIDTH, WIDTH, 1)
        self.vel_mlp, self.node_mlp = mlp(WIDTH, WIDTH, 1), mlp(2 * WIDTH, WIDTH, WIDTH)

    def forward(self, h, pos, vel, edge_index):
        row, col = edge_index
        apart = pos[row] - pos[col]
        m = self.edge_mlp(torch.cat([h[row], h[col], apart.square().sum(1, keepdim=True)], dim=1))
        vel = self.vel_mlp(h) * vel + sum_to_nodes(apart * self.coord_mlp(m), row, len(h))
        h = h + self.node_mlp(torch.cat([h, sum_to_nodes(m, row, len(h))], dim=1))
        return h, pos + vel, vel


class GvpLayer(nn.Module):
    """Scalars and vectors as a pair in and out, residuals inside."""

    def __init__(self):
        super().__init__()
        self.scalars, self.vectors = mlp(2 * WIDTH + 4, WIDTH, WIDTH), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, states, edge_index):
        s, v = states
        source, target = edge_index
        given = torch.cat([s[source], s[target], v[source].norm(dim=1)], dim=1)
        ds = sum_to_nodes(self.scalars(given), target, len(s))
        dv = sum_to_nodes(self.vectors(v[source]), target, len(s))
        return self.norm(s + ds), v + dv


# The readout takes the scalars and the lengths of the vectors: two tensors of the last layer.
@entry("GVP: pairs of scalars and vectors, both read out", ATOMS, refused="--layers")
class Gvp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Linear(FEATURES, WIDTH),
            nn.ModuleList([GvpLayer(), GvpLayer()]),
        )
        self.W_out = nn.Linear(WIDTH + 4, WIDTH)
        self.dense = nn.Linear(WIDTH, 1)

    def forward(self, x, pos, edge_index, batch):
        states = self.embed(x), pos[..., None].expand(-1, -1, 4)
        for layer in self.layers:
            states = layer(states, edge_index)
        s, v = states
        out = self.W_out(torch.cat([s, v.norm(dim=1)], dim=1)).relu()
        return self.dense(global_mean_pool(out, batch))


@entry("GVP: pairs of scalars and vectors, scalars read out", ATOMS)
class ScalarGvp(Gvp):
    def forward(self, x, pos, edge_index, batch):
        states = keep(self.embed(x)), pos[..., None].expand(-1, -1, 4)
        for layer in self.layers:
            states = layer(states, edge_index)
            keep(states[0])
        return self.dense(global_mean_pool(states[0], batch))


# --- points


def nearest(from_points, to_points, from_batch, to_batch, k):
    """The k nearest points of the same cloud: which, of which, and how far."""
    far = torch.cdist(to_points, from_points)
    far = far.masked_fill(to_batch[:, None] != from_batch[None], float("inf"))
    apart, source = far.topk(k, largest=False)  # [to, k]
    target = torch.arange(len(to_points)).repeat_interleave(k)
    return source.flatten(), target, apart.flatten()


@entry("DGCNN: neighbours anew, all layers through an MLP to the pool", POINTS)
class Dgcnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = EdgeConv(mlp(2 * 3, WIDTH, WIDTH), aggr="max")
        self.conv2 = EdgeConv(mlp(2 * WIDTH, WIDTH, WIDTH), aggr="max")
        self.lin1 = nn.Linear(2 * WIDTH, 12)
        self.mlp = mlp(12, WIDTH, 2)

    def forward(self, pos, batch):
        x = keep(pos)
        source, target, _ = nearest(x, x, batch, batch, 3)
        x1 = keep(self.conv1(x, torch.stack([source, target])))
        source, target, _ = nearest(x1, x1, batch, batch, 3)
        x2 = keep(self.conv2(x1, torch.stack([source, target])))
        out = keep(self.lin1(torch.cat([x1, x2], dim=1)).relu())
        return self.mlp(global_max_pool(out, batch))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin_in, self.lin_out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.transformer = PointTransformerConv(WIDTH, WIDTH)

    def forward(self, x, pos, edge_index):
        h = keep(self.lin_in(x).relu())
        return x + self.lin_out(self.transformer(h, pos, edge_index)).relu()


# Every convolution is given a map of the state; the last state is what the blocks hand on.
@entry("point transformers: maps around each convolution", POINTS)
class PointTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp_input = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, pos, edge_index, batch):
        x = self.mlp_input(x).relu()
        for block in self.blocks:
            x = block(x, pos, edge_index)
        return self.head(global_mean_pool(keep(x), batch))
