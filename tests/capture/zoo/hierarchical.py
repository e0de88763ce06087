"""Graphs that get smaller on the way: U-Nets, TopK, SAG, ASA and edge pooling, DiffPool, MinCut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    ASAPooling,
    DenseGraphConv,
    DenseSAGEConv,
    EdgePooling,
    GCNConv,
    GraphConv,
    GraphUNet,
    SAGPooling,
    TopKPooling,
    dense_diff_pool,
    dense_mincut_pool,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import to_dense_adj, to_dense_batch

from .graphs import FEATURES, WIDTH
from .registry import entry, keep, recording

UNETS, POOLINGS, DENSE = "U-Nets", "hierarchical pooling", "dense pooling"

#: Layers work on fewer rows than there are nodes: which, and what to type.
FEWER = r"rows.*--layers|pool.*--layers"


def mean_and_max(x, batch):
    return torch.cat([global_mean_pool(x, batch), global_max_pool(x, batch)], dim=1)


# Two levels work on some of the nodes; the last convolution works on all of them again. Refused, or
# the layers that work on the nodes: the first, what the last consumes, and its result.
@entry("GraphUNet, pooled", UNETS, refused=FEWER, either=True)
class PooledUnet(nn.Module):
    def __init__(self):
        super().__init__()
        self.unet = GraphUNet(FEATURES, WIDTH, WIDTH, depth=2, pool_ratios=0.5)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        consumed = []
        if recording():
            weight = torch.ones(edge_index.shape[1])
            keep(x)
            keep(F.relu(self.unet.down_convs[0](x, edge_index, weight)))
            last = self.unet.up_convs[-1]
            handle = last.register_forward_pre_hook(lambda _, args: consumed.append(args[0]))
        x = F.relu(self.unet(x, edge_index, batch))
        if recording():
            handle.remove()
            keep(consumed[0])
        return self.head(global_mean_pool(keep(x), batch))


class Level(nn.Module):
    """A convolution and a pooling after it."""

    def __init__(self, make_pool, width_in=WIDTH):
        super().__init__()
        self.conv, self.pool = GraphConv(width_in, WIDTH), make_pool()

    def forward(self, x, edge_index, batch):
        x = F.relu(self.conv(x, edge_index))
        out = self.pool(x, edge_index, batch=batch)
        # EdgePooling returns the batch in the third place, the others in the fourth.
        return out[0], out[1], out[2 if isinstance(self.pool, EdgePooling) else 3]


def hierarchy(make_pool):
    class Hierarchy(nn.Module):
        """A readout after each level, added up: the TopK and SAGPool examples."""

        def __init__(self):
            super().__init__()
            self.levels = nn.ModuleList([Level(make_pool, FEATURES), Level(make_pool)])
            self.last, self.head = GraphConv(WIDTH, WIDTH), nn.Linear(2 * WIDTH, 2)

        def forward(self, x, edge_index, batch):
            total = 0
            for level in self.levels:
                x, edge_index, batch = level(x, edge_index, batch)
                total = total + mean_and_max(x, batch)
            x = F.relu(self.last(x, edge_index))
            return self.head(total + mean_and_max(x, batch))

    return Hierarchy


entry("TopKPooling", POOLINGS, refused=FEWER)(hierarchy(lambda: TopKPooling(WIDTH, ratio=0.6)))
entry("SAGPooling", POOLINGS, refused=FEWER)(hierarchy(lambda: SAGPooling(WIDTH, ratio=0.6)))
entry("EdgePooling", POOLINGS, refused=FEWER)(hierarchy(lambda: EdgePooling(WIDTH)))


# Pooling once, after all layers: every layer works on the nodes, the pooling is the readout.
@entry("SAGPooling once, at the end", POOLINGS)
class GlobalSagPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.pool, self.head = SAGPooling(2 * WIDTH, ratio=0.5), nn.Linear(4 * WIDTH, 2)

    def forward(self, x, edge_index, batch):
        xs, x = [], keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
            xs.append(x)
        x, _, _, batch, _, _ = self.pool(torch.cat(xs, dim=-1), edge_index, batch=batch)
        return self.head(mean_and_max(x, batch))


# The network goes on, but without layers: fewer rows go through a linear map.
@entry("ASAPooling once, then a linear map", POOLINGS)
class AsaPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.pool, self.lin = ASAPooling(WIDTH, ratio=0.5), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        x, edge_index, _, batch, _ = self.pool(x, edge_index, batch=batch)
        return global_mean_pool(self.lin(x), batch)


@entry("DiffPool", DENSE, refused=r"--layers")
class DiffPool(nn.Module):
    """Dense convolutions for states and for clusters, on padded graphs from the start."""

    def __init__(self):
        super().__init__()
        self.embed1, self.assign1 = DenseSAGEConv(FEATURES, WIDTH), DenseSAGEConv(FEATURES, 4)
        self.embed2, self.head = DenseSAGEConv(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, data):
        x, mask = to_dense_batch(data.x, data.batch)
        adj = to_dense_adj(data.edge_index, data.batch)
        s = self.assign1(x, adj, mask)
        x, adj, link_loss, ent_loss = dense_diff_pool(
            F.relu(self.embed1(x, adj, mask)), adj, s, mask
        )
        return self.head(F.relu(self.embed2(x, adj)).mean(dim=1)), link_loss, ent_loss


# One layer on the nodes, then one on clusters.
@entry("MinCut after a convolution on the nodes", DENSE, refused=r"--layers", either=True)
class MinCut(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.assign = GCNConv(FEATURES, WIDTH), nn.Linear(WIDTH, 4)
        self.conv2, self.head = DenseGraphConv(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = keep(F.relu(self.conv1(keep(x), edge_index)))
        x, mask = to_dense_batch(x, batch)
        adj = to_dense_adj(edge_index, batch)
        x, adj, _, _ = dense_mincut_pool(x, adj, self.assign(x), mask)
        return self.head(F.relu(self.conv2(x, adj)).mean(dim=1))


# Clusters and back: each node is given the state of its cluster, and layers go on.
@entry("a coarse graph between layers on the nodes", POOLINGS, refused=FEWER, either=True)
class CoarseBetween(nn.Module):
    """Sub-structures (rings, fragments): here two clusters in each graph."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.fine = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))
        self.coarse = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        cluster = 2 * batch + (torch.arange(len(batch)) % 2)  # [num_nodes]
        x = keep(self.embed(x))
        for conv in self.fine:
            x = F.relu(conv(x, edge_index))
            clusters = self.coarse(global_add_pool(x, cluster))  # [num_clusters, width]
            x = keep(x + torch.tanh(clusters)[cluster])
        return self.head(global_mean_pool(x, batch))
