"""More published models: GraphDTA, CGCNN, SchNetPack, InfoGraph, ResGCN, DNA, GeniePath, MGCN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    DNAConv,
    GATConv,
    GCNConv,
    GINConv,
    SAGPooling,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import entry, keep
from .states import sum_to_nodes

MOLECULES, NODES, LIFESCI = "molecule models", "node level", "DGL-LifeSci style"
CONTRASTIVE = "contrastive pretraining"


# A molecule and a protein: the protein's branch has rows of graphs from the start.
@entry("GraphDTA: a GIN and a protein's sequence", MOLECULES, data="targets")
class GraphDta(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(width, WIDTH, WIDTH)) for width in widths)
        self.bns = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in widths)
        self.fc1_xd, self.embedding_xt = nn.Linear(WIDTH, WIDTH), nn.Embedding(26, 4)
        self.conv_xt_1 = nn.Conv1d(20, 3, kernel_size=2)
        self.fc1_xt, self.fc = nn.Linear(9, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        x, edge_index, batch, target = data.x, data.edge_index, data.batch, data.target
        keep(x)
        for conv, norm in zip(self.convs, self.bns, strict=True):
            x = keep(norm(F.relu(conv(x, edge_index))))
        x = F.dropout(F.relu(self.fc1_xd(global_add_pool(x, batch))), 0.2, self.training)
        sequence = self.conv_xt_1(self.embedding_xt(target))  # [num_graphs, 3, 3]
        return self.fc(torch.cat([x, self.fc1_xt(sequence.flatten(1))], dim=1))


class CrystalConv(nn.Module):
    """CGCNN: a fixed number of neighbours of each atom, in a table instead of edges."""

    def __init__(self):
        super().__init__()
        self.fc_full = nn.Linear(2 * WIDTH + 2, 2 * WIDTH)
        self.bn1, self.bn2 = nn.BatchNorm1d(2 * WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, atom_in_fea, nbr_fea, nbr_fea_index):
        num_atoms, most = nbr_fea_index.shape
        neighbours = atom_in_fea[nbr_fea_index]  # [num_nodes, most, width]
        own = atom_in_fea.unsqueeze(1).expand(num_atoms, most, WIDTH)
        gated = self.fc_full(torch.cat([own, neighbours, nbr_fea], dim=2))
        gated = self.bn1(gated.view(-1, 2 * WIDTH)).view(num_atoms, most, 2 * WIDTH)
        share, core = gated.chunk(2, dim=2)
        summed = self.bn2((torch.sigmoid(share) * F.softplus(core)).sum(dim=1))
        return F.softplus(atom_in_fea + summed)


# Neighbours are in a table of the nodes, which nothing calls edges.
@entry("CGCNN: a table of neighbours", MOLECULES, data="neighbours", either=True)
class CrystalGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc_out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.convs = nn.ModuleList(CrystalConv() for _ in range(3))

    def forward(self, x, nbr_fea, nbr_fea_index, batch):
        atom_fea = keep(self.embedding(x))
        for conv in self.convs:
            atom_fea = keep(conv(atom_fea, nbr_fea, nbr_fea_index))
        return self.fc_out(F.softplus(global_mean_pool(atom_fea, batch)))


class PackInteraction(nn.Module):
    """SchNetPack: continuous filters, indices of atoms instead of edges."""

    def __init__(self):
        super().__init__()
        self.in2f, self.f2out = nn.Linear(WIDTH, WIDTH, bias=False), mlp(WIDTH, WIDTH, WIDTH)
        self.filter_network = mlp(2, WIDTH, WIDTH)

    def forward(self, x, f_ij, idx_i, idx_j):
        x_ij = self.in2f(x)[idx_j] * self.filter_network(f_ij)
        return self.f2out(sum_to_nodes(x_ij, idx_i, len(x)))


class PackRepresentation(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.interactions = nn.ModuleList(PackInteraction() for _ in range(3))

    def forward(self, inputs):
        idx_i, idx_j = inputs["edge_index"]
        distance = (inputs["pos"][idx_i] - inputs["pos"][idx_j]).norm(dim=1, keepdim=True)
        x = keep(self.embedding(inputs["z"]))
        f_ij = torch.cat([distance, torch.exp(-distance)], dim=1)
        for interaction in self.interactions:
            x = keep(x + interaction(x, f_ij, idx_i, idx_j))
        inputs["scalar_representation"] = x
        return inputs


class Atomwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.outnet = mlp(WIDTH, 4, 1)

    def forward(self, inputs):
        energies = keep(self.outnet(inputs["scalar_representation"]))
        return {"energy": sum_to_nodes(energies, inputs["batch"], int(inputs["batch"][-1]) + 1)}


@entry("SchNetPack: modules that hand on a dictionary", MOLECULES)
class SchNetPack(nn.Module):
    def __init__(self):
        super().__init__()
        self.representation, self.output = PackRepresentation(), Atomwise()

    def forward(self, inputs):
        return self.output(self.representation(dict(inputs.to_dict())))


# Every block is read out by a pooling of its own before its norm; the next consumes it after. The
# last state is what the last pooling consumes: the norm behind it reaches nothing.
@entry("SSI-DDI: SAGPooling beside each layer", MOLECULES)
class SsiDdi(nn.Module):
    def __init__(self):
        super().__init__()
        self.initial_norm = nn.LayerNorm(FEATURES)
        self.convs = nn.ModuleList([GATConv(FEATURES, 4, heads=2), GATConv(WIDTH, 4, heads=2)])
        self.readouts = nn.ModuleList(SAGPooling(WIDTH, min_score=-1) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        x, pooled = self.initial_norm(data.x), []
        for conv, readout, norm in zip(self.convs, self.readouts, self.norms, strict=True):
            made = conv(keep(x), data.edge_index)
            chosen, _, _, batch, _, _ = readout(made, data.edge_index, batch=data.batch)
            pooled.append(global_add_pool(chosen, batch))
            x = F.elu(norm(made))
        keep(made)
        return self.head(torch.cat(pooled, dim=-1))


@entry("one graph at a time, a mean over all nodes", MOLECULES, data="one graph")
class SingleGraph(nn.Module):
    """Code that knows no batches: the output has no row for the graph."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, data):
        x = keep(F.relu(self.conv1(keep(data.x), data.edge_index)))
        x = keep(F.relu(self.conv2(x, data.edge_index)))
        return self.fc(x.mean(dim=0))


@entry("InfoGraph: layers pooled, and nodes beside them", CONTRASTIVE)
class InfoGraph(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(width, WIDTH, WIDTH)) for width in widths)
        self.bns = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in widths)

    def forward(self, x, edge_index, batch):
        xs, x = [], keep(x)
        for conv, norm in zip(self.convs, self.bns, strict=True):
            x = keep(norm(F.relu(conv(x, edge_index))))
            xs.append(x)
        pooled = [global_add_pool(x, batch) for x in xs]
        return torch.cat(pooled, dim=1), torch.cat(xs, dim=1)


# The first "convolution" of features is a linear map; norms stand before the convolutions.
@entry("GraphCL: ResGCN with norms before the layers", CONTRASTIVE)
class ResGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn_feat, self.conv_feat = nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, WIDTH)
        self.bns_conv = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.bn_hidden, self.lin = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, data):
        x = F.relu(self.conv_feat(self.bn_feat(data.x)))
        for norm, conv in zip(self.bns_conv, self.convs, strict=True):
            x = x + F.relu(conv(keep(norm(x)), data.edge_index))
        return self.lin(self.bn_hidden(global_add_pool(keep(x), data.batch)))


@entry("GraphMAE: a map between encoder and decoder", CONTRASTIVE)
class GraphMae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([GATConv(FEATURES, 4, heads=2), GATConv(WIDTH, 4, heads=2)])
        self.encoder_to_decoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder = GATConv(WIDTH, FEATURES)

    def forward(self, x, edge_index):
        h = keep(F.elu(self.encoder[0](keep(x), edge_index)))
        h = F.elu(self.encoder[1](h, edge_index))
        return keep(self.decoder(keep(self.encoder_to_decoder(h)), edge_index))


# The weights of the sum are the readout's; the maximum is of the states as they are.
@entry("WeightedSumAndMax", LIFESCI)
class WeightedSumAndMax(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCNConv(width, WIDTH) for width in widths)
        self.residuals = nn.ModuleList(nn.Linear(width, WIDTH) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in widths)
        self.atom_weighting = nn.Sequential(nn.Linear(WIDTH, 1), nn.Sigmoid())
        self.predict = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv, residual, norm in zip(self.convs, self.residuals, self.norms, strict=True):
            new = F.relu(conv(x, edge_index)) + F.relu(residual(x))
            x = keep(norm(new))
        total = global_add_pool(self.atom_weighting(x) * x, batch)
        return self.predict(torch.cat([total, global_max_pool(x, batch)], dim=1))


# All levels are concatenated and mapped to a number per atom: the last state, and what is pooled.
@entry("MGCN: levels concatenated, an atom-wise output", LIFESCI)
class Mgcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.predict = mlp(4 * WIDTH, WIDTH, 1)

    def forward(self, z, edge_index, batch):
        levels = [keep(self.embed(z))]
        for conv in self.convs:
            levels.append(keep(levels[-1] + F.softplus(conv(levels[-1], edge_index))))
        return global_add_pool(keep(self.predict(torch.cat(levels, dim=1))), batch)


# A layer consumes all layers before it, in a dimension of their own.
@entry("DNA: each layer attends to all before it", NODES)
class Dna(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.convs = nn.ModuleList(DNAConv(WIDTH, heads=2) for _ in range(2))

    def forward(self, x, edge_index):
        x_all = F.relu(self.lin1(x)).view(-1, 1, WIDTH)
        for conv in self.convs:
            x = F.relu(conv(keep(x_all), edge_index)).view(-1, 1, WIDTH)
            x_all = torch.cat([x_all, x], dim=1)  # [num_nodes, layers, width]
        return self.lin2(keep(x_all[:, -1]))


@entry("GeniePath: an LSTM after each layer", NODES)
class GeniePath(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.breadths = nn.ModuleList(GATConv(WIDTH, WIDTH) for _ in range(3))
        self.depths = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, edge_index):
        x = keep(self.lin1(x))
        h = c = torch.zeros(1, len(x), WIDTH)
        for breadth, depth in zip(self.breadths, self.depths, strict=True):
            x = torch.tanh(breadth(x, edge_index))
            x, (h, c) = depth(x.unsqueeze(0), (h, c))
            x = keep(x.squeeze(0))
        return self.lin2(x)


# The lazy variant runs all layers on the same state first: branches, joined one after another by
# a network per node. Each is a state; what the readout consumes is new.
@entry("GeniePath, lazy: layers side by side, then LSTMs", NODES, either=True)
class GeniePathLazy(GeniePath):
    def __init__(self):
        super().__init__()
        self.depths = nn.ModuleList(nn.LSTM(2 * WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x, edge_index):
        x = keep(self.lin1(x))
        h = c = torch.zeros(1, len(x), WIDTH)
        made = [keep(torch.tanh(breadth(x, edge_index))) for breadth in self.breadths]
        x = x.unsqueeze(0)
        for state, depth in zip(made, self.depths, strict=True):
            x, (h, c) = depth(torch.cat([state.unsqueeze(0), x], dim=-1), (h, c))
        return self.lin2(keep(x.squeeze(0)))
