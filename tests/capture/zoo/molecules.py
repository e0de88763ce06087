"""Molecule models as published: OGB, pretrain-gnns, MolCLR, DeeperGCN, GraphMVP, PNA, MPNN."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    AttentiveFP,
    GCNConv,
    GENConv,
    MessagePassing,
    NNConv,
    PNAConv,
    Set2Set,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .lasts import make_schnet
from .registry import add, entry, keep, recording

OGB, PRETRAINED, CHEMISTRY = "OGB", "pretrained molecule encoders", "molecule models"


class CategoryEncoder(nn.Module):
    """AtomEncoder and BondEncoder: a sum of embeddings, one for each column."""

    def __init__(self, sizes=(5, 5)):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, WIDTH) for size in sizes)

    def forward(self, x):
        return sum(embed(x[:, at]) for at, embed in enumerate(self.embeddings))


class OgbGin(MessagePassing):
    """GIN with bonds that each layer embeds for itself."""

    def __init__(self):
        super().__init__(aggr="add")
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, WIDTH)
        )
        self.eps = nn.Parameter(torch.zeros(1))
        self.bond_encoder = CategoryEncoder((3, 3))

    def forward(self, x, edge_index, edge_attr):
        bonds = self.bond_encoder(edge_attr)
        return self.mlp((1 + self.eps) * x + self.propagate(edge_index, x=x, edge_attr=bonds))

    def message(self, x_j, edge_attr):
        return F.relu(x_j + edge_attr)


class GnnNode(nn.Module):
    """OGB's GNN_node, with a virtual node if asked for."""

    def __init__(self, jk="last", residual=False, virtual=False):
        super().__init__()
        self.jk, self.residual, self.virtual = jk, residual, virtual
        self.atom_encoder = CategoryEncoder()
        self.convs = nn.ModuleList(OgbGin() for _ in range(3))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        if virtual:
            self.virtualnode_embedding = nn.Embedding(1, WIDTH)
            self.mlp_virtualnode_list = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(2))

    def forward(self, batched_data):
        x, edge_index = batched_data.x, batched_data.edge_index
        edge_attr, batch = batched_data.edge_attr, batched_data.batch
        if self.virtual:
            zeros = torch.zeros(int(batch[-1]) + 1, dtype=edge_index.dtype)
            virtualnode = self.virtualnode_embedding(zeros)  # [num_graphs, width]
        h_list = [self.atom_encoder(x)]
        for layer in range(3):
            if self.virtual:
                h_list[layer] = h_list[layer] + virtualnode[batch]
            keep(h_list[layer])
            h = self.batch_norms[layer](self.convs[layer](h_list[layer], edge_index, edge_attr))
            h = F.dropout(h if layer == 2 else F.relu(h), 0.5, training=self.training)
            if self.residual:
                h = h + h_list[layer]
            h_list.append(h)
            if self.virtual and layer < 2:
                pooled = global_add_pool(h_list[layer], batch) + virtualnode
                update = self.mlp_virtualnode_list[layer](pooled)
                virtualnode = F.dropout(update, 0.5, training=self.training)
        keep(h_list[-1])
        if self.jk == "last":
            return h_list[-1]
        node_representation = 0
        for layer in range(4):
            node_representation += h_list[layer]
        return keep(node_representation)


class OgbGnn(nn.Module):
    def __init__(self, pool=global_mean_pool, width=WIDTH, **options):
        super().__init__()
        self.gnn_node = GnnNode(**options)
        self.pool = pool
        self.graph_pred_linear = nn.Linear(width, 2)

    def forward(self, batched_data):
        h_node = self.gnn_node(batched_data)
        return self.graph_pred_linear(self.pool(h_node, batched_data.batch))


def gate():
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


for _name, _make in {
    "OGB GIN, JK=last": OgbGnn,
    "OGB GIN, residual": lambda: OgbGnn(residual=True),
    "OGB GIN, JK=sum": lambda: OgbGnn(jk="sum"),
    "OGB GIN with a virtual node": lambda: OgbGnn(virtual=True, residual=True),
    "OGB GIN with a virtual node, JK=sum": lambda: OgbGnn(virtual=True, jk="sum"),
    "OGB GIN, attention pooling": lambda: OgbGnn(AttentionalAggregation(gate())),
    "OGB GIN, Set2Set": lambda: OgbGnn(Set2Set(WIDTH, processing_steps=2), width=2 * WIDTH),
}.items():
    add(_name, OGB, _make, data="integers")


@entry("OGB code2: a head per token", OGB, data="integers")
class ManyHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gnn_node = GnnNode()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(3))

    def forward(self, batched_data):
        h_graph = global_max_pool(self.gnn_node(batched_data), batched_data.batch)
        return [head(h_graph) for head in self.heads]


@entry("DeeperGCN, res+ blocks", OGB, data="integers")
class DeeperGcn(nn.Module):
    """Norm, activation and dropout before each convolution, and once more after the last one."""

    def __init__(self):
        super().__init__()
        self.atom_encoder, self.bond_encoder = CategoryEncoder(), CategoryEncoder((3, 3))
        self.gcns = nn.ModuleList(GENConv(WIDTH, WIDTH, num_layers=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(4))
        self.graph_pred_linear = nn.Linear(WIDTH, 2)

    def forward(self, input_batch):
        edge_index, batch = input_batch.edge_index, input_batch.batch
        h = keep(self.atom_encoder(input_batch.x))
        bonds = self.bond_encoder(input_batch.edge_attr)
        h = self.gcns[0](h, edge_index, bonds)
        for layer in range(1, 4):
            h2 = F.dropout(F.relu(self.norms[layer - 1](h)), p=0.5, training=self.training)
            h = self.gcns[layer](keep(h2), edge_index, bonds) + h
        h = F.dropout(self.norms[3](h), p=0.5, training=self.training)
        return self.graph_pred_linear(global_mean_pool(keep(h), batch))


class PretrainGnn(nn.Module):
    """pretrain-gnns: ``forward(*argv)``, and JK with a dimension of layers."""

    def __init__(self, jk="last"):
        super().__init__()
        self.JK = jk
        self.x_embedding1, self.x_embedding2 = nn.Embedding(5, WIDTH), nn.Embedding(5, WIDTH)
        self.gnns = nn.ModuleList(OgbGin() for _ in range(3))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.graph_pred_linear = nn.Linear(4 * WIDTH if jk == "concat" else WIDTH, 2)

    def forward(self, *argv):
        if len(argv) == 4:
            x, edge_index, edge_attr, batch = argv
        else:
            data = argv[0]
            x, edge_index, edge_attr, batch = data.x, data.edge_index, data.edge_attr, data.batch
        h_list = [keep(self.x_embedding1(x[:, 0]) + self.x_embedding2(x[:, 1]))]
        for layer in range(3):
            h = self.batch_norms[layer](self.gnns[layer](h_list[layer], edge_index, edge_attr))
            h = F.dropout(h if layer == 2 else F.relu(h), 0.2, training=self.training)
            h_list.append(keep(h))
        if self.JK == "concat":
            h = torch.cat(h_list, dim=1)
        elif self.JK == "max":
            h = keep(torch.max(torch.cat([h.unsqueeze_(0) for h in h_list], dim=0), dim=0)[0])
        elif self.JK == "sum":
            h = keep(torch.sum(torch.cat([h.unsqueeze_(0) for h in h_list], dim=0), dim=0))
        return self.graph_pred_linear(global_mean_pool(h, batch))


for _jk in ("last", "concat", "max", "sum"):
    add(
        f"pretrain-gnns, JK={_jk}",
        PRETRAINED,
        lambda jk=_jk: PretrainGnn(jk),
        data="integers",
    )


@entry("MolCLR: features and projection", PRETRAINED, data="integers")
class MolClr(PretrainGnn):
    """Returns what it pooled beside the projection of it."""

    def __init__(self):
        super().__init__()
        self.feat_lin = nn.Linear(WIDTH, 12)
        self.out_lin = nn.Sequential(nn.Linear(12, 12), nn.ReLU(inplace=True), nn.Linear(12, 6))

    def forward(self, data):
        h = keep(self.x_embedding1(data.x[:, 0]) + self.x_embedding2(data.x[:, 1]))
        for layer in range(3):
            h = self.batch_norms[layer](self.gnns[layer](h, data.edge_index, data.edge_attr))
            h = keep(F.dropout(h if layer == 2 else F.relu(h), 0.3, training=self.training))
        h = self.feat_lin(global_mean_pool(h, data.batch))
        return h, self.out_lin(h)


# A molecule by its bonds and by its shape: both encoders are read out, one after the other.
@entry("GraphMVP: a GIN and a SchNet", PRETRAINED)
class GraphMvp(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.gnns = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))
        self.schnet = make_schnet()

    def forward(self, data):
        h = keep(self.embed(data.x))
        for gnn in self.gnns:
            h = keep(F.relu(gnn(h, data.edge_index)))
        flat = global_mean_pool(h, data.batch)
        if recording():
            for tensor in self.schnet_states(data.z, data.pos, data.batch):
                keep(tensor)
        return flat, self.schnet(data.z, data.pos, data.batch)

    def schnet_states(self, z, pos, batch):
        net = self.schnet
        edge_index, distance = net.interaction_graph(pos, batch)
        smeared = net.distance_expansion(distance)
        states = [net.embedding(z)]
        for block in net.interactions:
            states.append(states[-1] + block(states[-1], edge_index, distance, smeared))
        return [*states, net.lin2(net.act(net.lin1(states[-1])))]


@entry("PNA on ZINC", CHEMISTRY, data="integers")
class Pna(nn.Module):
    def __init__(self):
        super().__init__()
        self.node_emb, self.edge_emb = nn.Embedding(5, WIDTH), nn.Embedding(3, 4)
        degrees = torch.tensor([0, 9, 9, 9, 4])
        options = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
        self.convs = nn.ModuleList(
            PNAConv(WIDTH, WIDTH, **options, deg=degrees, edge_dim=4, towers=2) for _ in range(3)
        )
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.mlp = mlp(WIDTH, 6, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        x, edge_attr = keep(self.node_emb(x[:, 0])), self.edge_emb(edge_attr[:, 0])
        for conv, norm in zip(self.convs, self.batch_norms, strict=True):
            x = keep(F.relu(norm(conv(x, edge_index, edge_attr))))
        return self.mlp(global_add_pool(x, batch))


@entry("MPNN: NNConv, GRU, Set2Set", CHEMISTRY)
class Mpnn(nn.Module):
    """One convolution and one GRU, three times."""

    def __init__(self):
        super().__init__()
        self.lin0 = nn.Linear(FEATURES, WIDTH)
        self.conv = NNConv(WIDTH, WIDTH, mlp(EDGE_FEATURES, 12, WIDTH * WIDTH), aggr="mean")
        self.gru = nn.GRU(WIDTH, WIDTH)
        self.set2set = Set2Set(WIDTH, processing_steps=2)
        self.lin1 = nn.Linear(2 * WIDTH, 1)

    def forward(self, data):
        out = keep(F.relu(self.lin0(data.x)))
        h = out.unsqueeze(0)
        for _ in range(3):
            m = F.relu(self.conv(out, data.edge_index, data.edge_attr))
            out, h = self.gru(m.unsqueeze(0), h)
            out = keep(out.squeeze(0))
        return self.lin1(self.set2set(out, data.batch)).view(-1)


def attentive_by_hand(model, data):
    x = F.leaky_relu(model.lin1(data.x))
    history = [x]
    x = model.gru(F.elu(model.gate_conv(x, data.edge_index, data.edge_attr)), x).relu()
    history.append(x)
    for conv, gru in zip(model.atom_convs, model.atom_grus, strict=True):
        history.append(gru(F.elu(conv(history[-1], data.edge_index)), history[-1]).relu())
    return history


add(
    "AttentiveFP",
    CHEMISTRY,
    lambda: AttentiveFP(FEATURES, WIDTH, 2, EDGE_FEATURES, num_layers=3, num_timesteps=2),
    by_hand=attentive_by_hand,
)
