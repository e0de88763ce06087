"""Written without a library: sparse and dense matrices, functions only, layers in a tuple."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import DenseGCNConv, global_add_pool, global_mean_pool
from torch_geometric.utils import to_dense_adj, to_dense_batch

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import entry, keep, recording
from .states import sum_to_nodes

PLAIN, FUNCTIONS, DENSE = "plain PyTorch", "functions only", "dense adjacency"
WITHOUT = "without edges"


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


# Weights without modules: no module is given anything.
@entry("F.linear and index_add, no modules", FUNCTIONS, either=True)
class FunctionsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(
            [torch.randn(WIDTH, FEATURES), torch.randn(WIDTH, WIDTH), torch.randn(2, WIDTH)]
        )

    def forward(self, x, edge_index, batch):
        keep(x)
        for weight in self.weights[:2]:
            gathered = sum_to_nodes(x[edge_index[0]], edge_index[1], len(x))
            x = keep(torch.tanh(F.linear(x + gathered, weight) / 8))
        return F.linear(global_mean_pool(x, batch), self.weights[2])


# The neighbours are added up between linear modules that know nothing of edges.
@entry("index_add between linear modules", FUNCTIONS, either=True)
class AddedBetween(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList(
            [nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for lin in self.lins:
            gathered = x.clone().index_add_(0, edge_index[1], x[edge_index[0]])
            x = keep(F.relu(lin(gathered)))
        return self.head(global_add_pool(x, batch))


# One module does it all: its layers are a loop over functions inside.
@entry("an encoder module with a loop inside", FUNCTIONS, either=True)
class LoopInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = AddedBetween()
        self.out = nn.Linear(2, 1)

    def forward(self, x, edge_index, batch):
        return self.out(self.encoder(x, edge_index, batch))


class DenseStack(nn.Module):
    """Dense convolutions on padded graphs, as DiffPool's and Graph U-Net's first code."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([DenseGCNConv(FEATURES, WIDTH), DenseGCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        dense, mask = to_dense_batch(x, batch)  # [num_graphs, most_nodes, features]
        adjacency = to_dense_adj(edge_index, batch)
        keep(dense[mask])
        for conv in self.convs:
            dense = F.relu(conv(dense, adjacency, mask))
            keep(dense[mask])
        return self.head(dense.sum(dim=1))


# Rows of padded graphs are no rows of nodes: refused, or brought back to those of the nodes.
entry("dense convolutions on padded graphs", DENSE, refused=r"--layers", either=True)(DenseStack)


# The matrix of the whole batch has a row for each node, so rows are rows of nodes.
@entry("one dense adjacency for the batch", DENSE, either=True)
class DenseBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        adjacency = to_dense_adj(edge_index, max_num_nodes=len(x))[0]  # [num_nodes, num_nodes]
        keep(x)
        x = keep(F.relu(self.lin1(adjacency @ x)))
        x = keep(F.relu(self.lin2(adjacency @ x)))
        return self.head(global_mean_pool(x, batch))


# No messages pass: there are no layers to find, and the line says to name some.
@entry("DeepSets", WITHOUT, refused=r"no message-passing layers.*--layers")
class DeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.phi, self.rho = mlp(FEATURES, WIDTH, WIDTH), mlp(WIDTH, WIDTH, 1)

    def forward(self, x, batch):
        return self.rho(global_add_pool(self.phi(x), batch))


@entry("an MLP per node", WITHOUT, refused=r"no message-passing layers.*--layers")
class MlpBaseline(nn.Module):
    """Takes the edges as its rivals do, and leaves them."""

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)])

    def forward(self, x, edge_index):
        return self.lins[1](F.dropout(F.relu(self.lins[0](x)), 0.5, training=self.training))
