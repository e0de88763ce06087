"""The molecule GCN and GraphSAGE of "Strategies for Pre-training Graph Neural Networks".

    histograph cache --model examples/pretrain_gnns_gcn.py:GNN \
        --checkpoint chem_gcn_contextpred.pth --data smiles:BBBP.csv \
        --data-args mol_features=pretrain -o bbbp.cache

``GNN`` is for the checkpoints chem_gcn_*.pth of pretrain-gnns, ``GraphSAGE`` for chem_graphsage_*.
They have no classifier: they return the node embeddings of their last layer, pre-trained on two
million molecules. Atoms come as (atomic number - 1, chirality), bonds as (bond type, direction).
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch_geometric.nn import MessagePassing
from torch_geometric.utils import add_self_loops, degree

NUM_ATOM_TYPES = 120
NUM_CHIRALITY_TAGS = 3
NUM_BOND_TYPES = 6
NUM_BOND_DIRECTIONS = 3
SELF_LOOP_BOND = 4


class BondConv(MessagePassing):
    """A convolution of bonds and self loops, whose messages carry the embedding of their bond."""

    aggregation = "add"

    def __init__(self, emb_dim):
        super().__init__(aggr=self.aggregation)
        self.linear = nn.Linear(emb_dim, emb_dim)
        self.edge_embedding1 = nn.Embedding(NUM_BOND_TYPES, emb_dim)
        self.edge_embedding2 = nn.Embedding(NUM_BOND_DIRECTIONS, emb_dim)

    def forward(self, x, edge_index, edge_attr):
        edge_index, _ = add_self_loops(edge_index, num_nodes=x.shape[0])
        self_loop = edge_attr.new_tensor([SELF_LOOP_BOND, 0]).expand(x.shape[0], 2)
        edge_attr = torch.cat([edge_attr, self_loop])  # [num_edges + num_nodes, 2]
        bond = self.edge_embedding1(edge_attr[:, 0]) + self.edge_embedding2(edge_attr[:, 1])
        norm = self.norm(edge_index, x.shape[0])
        return self.propagate(edge_index, x=self.linear(x), bond=bond, norm=norm)

    def message(self, x_j, bond, norm):
        return norm.view(-1, 1) * (x_j + bond)  # [num_edges + num_nodes, emb_dim]


class GCNConv(BondConv):
    """Messages are added up, each divided by the root of the degrees at its two ends."""

    def norm(self, edge_index, num_nodes):
        source, target = edge_index
        scale = degree(source, num_nodes).pow(-0.5)  # [num_nodes], at least one: the self loop
        return scale[source] * scale[target]  # [num_edges + num_nodes]


class SAGEConv(BondConv):
    """The mean of the messages, brought to length one."""

    aggregation = "mean"

    def norm(self, edge_index, num_nodes):
        return torch.ones(edge_index.shape[1], device=edge_index.device)

    def update(self, aggregated):
        return F.normalize(aggregated, dim=-1)  # [num_nodes, emb_dim]


class GNN(nn.Module):
    """Atom embeddings and five convolutions, each with batch norm; no ReLU after the last."""

    conv = GCNConv

    def __init__(self, num_layer=5, emb_dim=300, drop_ratio=0.0):
        super().__init__()
        self.drop_ratio = drop_ratio
        self.x_embedding1 = nn.Embedding(NUM_ATOM_TYPES, emb_dim)
        self.x_embedding2 = nn.Embedding(NUM_CHIRALITY_TAGS, emb_dim)
        self.gnns = nn.ModuleList(self.conv(emb_dim) for _ in range(num_layer))
        self.batch_norms = nn.ModuleList(nn.BatchNorm1d(emb_dim) for _ in range(num_layer))

    def forward(self, x, edge_index, edge_attr):
        h = self.x_embedding1(x[:, 0]) + self.x_embedding2(x[:, 1])  # [num_nodes, emb_dim]
        for gnn, batch_norm in zip(self.gnns, self.batch_norms, strict=True):
            h = batch_norm(gnn(h, edge_index, edge_attr))
            if gnn is not self.gnns[-1]:
                h = F.relu(h)
            h = F.dropout(h, self.drop_ratio, training=self.training)
        return h  # [num_nodes, emb_dim]


class GraphSAGE(GNN):
    """The same network with the convolution of GraphSAGE."""

    conv = SAGEConv
