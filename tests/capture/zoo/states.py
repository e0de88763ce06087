"""Layers with several node tensors: coordinates beside features, vectors beside scalars."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import global_add_pool, global_mean_pool

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep

FAMILY = "equivariant, several node tensors"


def sum_to_nodes(messages, target, num_nodes):
    """Add up messages by node, as ``unsorted_segment_sum`` of EGNN's code does."""
    out = messages.new_zeros(num_nodes, *messages.shape[1:])
    return out.index_add_(0, target, messages)


class EgnnLayer(nn.Module):
    """E_GCL of the EGNN code: ``layer(h, edge_index, coord) -> h, coord``."""

    def __init__(self):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * WIDTH + 1, WIDTH), nn.SiLU())
        self.node_mlp = mlp(2 * WIDTH, WIDTH, WIDTH)
        self.coord_mlp = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, h, edge_index, coord):
        row, col = edge_index
        difference = coord[row] - coord[col]  # [num_edges, 3]
        radial = difference.pow(2).sum(1, keepdim=True)
        messages = self.edge_mlp(torch.cat([h[row], h[col], radial], dim=1))
        coord = coord + sum_to_nodes(difference * self.coord_mlp(messages), row, len(h))
        gathered = sum_to_nodes(messages, row, len(h))
        return h + self.node_mlp(torch.cat([h, gathered], dim=1)), coord


class Egnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding_in = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(EgnnLayer() for _ in range(3))
        self.head = mlp(WIDTH, WIDTH, 1)


@entry("EGNN: h first, then coordinates", FAMILY)
class EgnnFeaturesFirst(Egnn):
    def forward(self, x, pos, edge_index, batch):
        h = keep(self.embedding_in(x))
        for layer in self.layers:
            h, pos = layer(h, edge_index, pos)
            keep(h)
        return self.head(global_add_pool(h, batch))


class PositionsFirst(EgnnLayer):
    """``layer(pos, h, edge_index) -> pos, h``."""

    def forward(self, pos, h, edge_index):
        h, pos = super().forward(h, edge_index, pos)
        return pos, h


@entry("layer(pos, h, edge_index)", FAMILY)
class EgnnPositionsFirst(Egnn):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PositionsFirst() for _ in range(3))

    def forward(self, x, pos, edge_index, batch):
        h = keep(self.embedding_in(x))
        for layer in self.layers:
            pos, h = layer(pos, h, edge_index)
            keep(h)
        return self.head(global_mean_pool(h, batch))


# The first layer consumes the positions of the data as they are: the embedded input is `pos`.
@entry("layer(h, edge_index, pos), coordinates read out", FAMILY)
class EgnnPositionsOut(Egnn):
    """A model of dynamics: its output is where the nodes are in the end."""

    def forward(self, x, pos, edge_index):
        h = self.embedding_in(x)
        keep(pos)
        for layer in self.layers:
            h, pos = layer(h, edge_index, pos)
            keep(pos)
        return pos


# The readout consumes both: refused, or both are kept.
@entry("EGNN: both are pooled", FAMILY, either=True)
class EgnnBothPooled(Egnn):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH + 3, 1)

    def forward(self, x, pos, edge_index, batch):
        h = keep(self.embedding_in(x))
        keep(pos)
        for layer in self.layers:
            h, pos = layer(h, edge_index, pos)
            keep(h)
            keep(pos)
        return self.head(
            torch.cat([global_add_pool(h, batch), global_mean_pool(pos, batch)], dim=1)
        )


class PainnInteraction(nn.Module):
    """The message part of PaiNN (schnetpack): ``(q, mu)`` with mu ``[num_nodes, 3, width]``."""

    def __init__(self):
        super().__init__()
        self.context = mlp(WIDTH, WIDTH, 3 * WIDTH)

    def forward(self, q, mu, filters, direction, idx_i, idx_j, n_atoms):
        x = self.context(q)[idx_j] * filters
        dq, dmu_r, dmu_mu = x.split(WIDTH, dim=-1)
        dmu = dmu_r.unsqueeze(1) * direction.unsqueeze(-1) + dmu_mu.unsqueeze(1) * mu[idx_j]
        return q + sum_to_nodes(dq, idx_i, n_atoms), mu + sum_to_nodes(dmu, idx_i, n_atoms)


class PainnMixing(nn.Module):
    """The update part: scalars and vectors of a node see each other."""

    def __init__(self):
        super().__init__()
        self.context = mlp(2 * WIDTH, WIDTH, 3 * WIDTH)
        self.channels = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, q, mu):
        mu_v, mu_w = self.channels(mu).split(WIDTH, dim=-1)  # each [num_nodes, 3, width]
        norm = (mu_v.pow(2).sum(1) + 1e-8).sqrt()
        dq, dmu, dqmu = self.context(torch.cat([q, norm], dim=-1)).split(WIDTH, dim=-1)
        return q + dq + dqmu * (mu_v * mu_w).sum(1), mu + dmu.unsqueeze(1) * mu_w


class Painn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.filters = nn.Linear(4, 3 * WIDTH)
        self.interactions = nn.ModuleList(PainnInteraction() for _ in range(3))
        self.mixing = nn.ModuleList(PainnMixing() for _ in range(3))
        self.head = mlp(WIDTH, WIDTH, 1)

    def geometry(self, pos, edge_index):
        r_ij = pos[edge_index[0]] - pos[edge_index[1]]  # [num_edges, 3]
        d_ij = r_ij.norm(dim=1, keepdim=True)
        return self.filters(torch.cat([d_ij, d_ij.cos(), d_ij.sin(), 1 / d_ij], 1)), r_ij / d_ij


# What a message layer consumes is the state after the mixing of the layer before.
@entry("PaiNN: scalars read out", FAMILY)
class PainnScalars(Painn):
    def forward(self, z, pos, edge_index, batch):
        filters, direction = self.geometry(pos, edge_index)
        idx_j, idx_i = edge_index
        q = keep(self.embedding(z))
        mu = q.new_zeros(len(q), 3, WIDTH)
        for interaction, mixing in zip(self.interactions, self.mixing, strict=True):
            q, mu = interaction(q, mu, filters, direction, idx_i, idx_j, len(q))
            q, mu = mixing(q, mu)
            keep(q)
        return self.head(global_add_pool(q, batch))


@entry("PaiNN: an atom-wise MLP to width 1, then the pool", FAMILY)
class PainnAtomwise(Painn):
    def forward(self, z, pos, edge_index, batch):
        filters, direction = self.geometry(pos, edge_index)
        idx_j, idx_i = edge_index
        q = keep(self.embedding(z))
        mu = q.new_zeros(len(q), 3, WIDTH)
        for interaction, mixing in zip(self.interactions, self.mixing, strict=True):
            q, mu = interaction(q, mu, filters, direction, idx_i, idx_j, len(q))
            q, mu = mixing(q, mu)
            keep(q)
        return global_add_pool(keep(self.head(q)), batch)


# Dipole moments take both at once; refused, or both are kept.
@entry("PaiNN: dipoles of scalars and vectors", FAMILY, refused=r"--layers", either=True)
class PainnDipole(Painn):
    def forward(self, z, pos, edge_index, batch):
        filters, direction = self.geometry(pos, edge_index)
        idx_j, idx_i = edge_index
        q = keep(self.embedding(z))
        mu = keep(q.new_zeros(len(q), 3, WIDTH))
        for interaction, mixing in zip(self.interactions, self.mixing, strict=True):
            q, mu = interaction(q, mu, filters, direction, idx_i, idx_j, len(q))
            q, mu = mixing(q, mu)
            keep(q)
            keep(mu)
        charges = self.head(q)  # [num_nodes, 1]
        dipoles = keep(charges * pos + mu.mean(-1))  # [num_nodes, 3]
        return global_add_pool(dipoles, batch)


class TupleLayer(nn.Module):
    """Vectors first, in one tuple: ``layer((mu, q), edge_index) -> (mu, q)``."""

    def __init__(self):
        super().__init__()
        self.scalar = nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, state, edge_index):
        mu, q = state
        row, col = edge_index
        mu = mu + sum_to_nodes(torch.tanh(self.gate(q))[row].unsqueeze(1) * mu[row], col, len(q))
        q = q + torch.tanh(self.scalar(torch.cat([sum_to_nodes(q[row], col, len(q)), q], dim=1)))
        return mu, q + mu.pow(2).sum(1)


@entry("a state (mu, q), vectors first", FAMILY)
class TupleState(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.layers = nn.ModuleList(TupleLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, pos, edge_index, batch):
        q = keep(self.embed(x))
        mu = pos.unsqueeze(-1).expand(-1, -1, WIDTH) * 0.1
        for layer in self.layers:
            mu, q = layer((mu, q), edge_index)
            keep(q)
        return self.head(global_mean_pool(q, batch))


class GatedGcnLayer(nn.Module):
    """Benchmarking-gnns and GraphGPS: ``layer(h, e, edge_index) -> h, e``."""

    def __init__(self):
        super().__init__()
        self.A, self.B, self.C, self.D, self.E = (nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.bn_h, self.bn_e = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, h, e, edge_index):
        row, col = edge_index
        e_new = self.C(e) + self.D(h)[col] + self.E(h)[row]
        sigma = torch.sigmoid(e_new)  # [num_edges, width]
        weighted = sum_to_nodes(sigma * self.B(h)[row], col, len(h))
        h_new = self.A(h) + weighted / (sum_to_nodes(sigma, col, len(h)) + 1e-6)
        return h + torch.relu(self.bn_h(h_new)), e + torch.relu(self.bn_e(e_new))


class GatedGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_h, self.embed_e = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(GatedGcnLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, edge_attr, batch):
        h, e = keep(self.embed_h(x)), self.embed_e(edge_attr)
        for layer in self.layers:
            h, e = layer(h, e, edge_index)
            keep(h)
        return self.head(global_mean_pool(h, batch))
