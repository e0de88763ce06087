"""Graph transformers: attention beside or instead of message passing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GINEConv, GPSConv, TransformerConv, global_add_pool, global_mean_pool
from torch_geometric.utils import to_dense_adj, to_dense_batch

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep

FAMILY = "graph transformers"

NO_LAYERS = r"no message-passing layers.*--layers|--layers"


@entry("GPSConv with GINE", FAMILY)
class GpsGine(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(
            GPSConv(WIDTH, GINEConv(mlp(WIDTH, WIDTH, WIDTH)), heads=2) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, edge_attr, batch):
        x, e = keep(self.embed(x)), self.edges(edge_attr)
        for layer in self.layers:
            x = keep(layer(x, edge_index, batch, edge_attr=e))
        return self.head(global_add_pool(x, batch))


# Without a convolution no edge is used: the layers pass no messages along the graph's edges.
@entry("GPSConv without a convolution", FAMILY, refused=NO_LAYERS, either=True)
class GpsAttentionOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(GPSConv(WIDTH, None, heads=2) for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for layer in self.layers:
            x = keep(layer(x, edge_index, batch))
        return self.head(global_add_pool(x, batch))


class BiasedAttention(nn.Module):
    """Graphormer: attention over all pairs, with a bias by whether they are connected."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = mlp(WIDTH, 16, WIDTH)

    def forward(self, x, bias):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)  # each [num_graphs, most_nodes, width]
        weight = torch.softmax(q @ k.transpose(1, 2) / WIDTH**0.5 + bias, dim=-1)
        x = x + self.out(weight @ v)
        return x + self.ffn(self.norm2(x))


# Rows of padded graphs are no rows of nodes.
@entry("Graphormer on padded graphs", FAMILY, refused=NO_LAYERS, either=True)
class Graphormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.edge_bias = nn.Parameter(torch.randn(()))
        self.layers = nn.ModuleList(BiasedAttention() for _ in range(2))

    def forward(self, x, edge_index, batch):
        dense, mask = to_dense_batch(self.embed(x), batch)
        adjacency = to_dense_adj(edge_index, batch)
        bias = self.edge_bias * adjacency + torch.where(mask, 0.0, -1e9).unsqueeze(1)
        keep(dense[mask])
        for layer in self.layers:
            dense = layer(dense, bias)
            keep(dense[mask])
        return self.head((dense * mask.unsqueeze(-1)).sum(dim=1))


# As Graphormer, with a token in front of each graph that is read out: no node is.
@entry("Graphormer with a graph token", FAMILY, refused=NO_LAYERS)
class GraphToken(Graphormer):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x, edge_index, batch):
        dense, mask = to_dense_batch(self.embed(x), batch)
        dense = torch.cat([self.token.expand(len(dense), -1, -1), dense], dim=1)
        adjacency = F.pad(to_dense_adj(edge_index, batch), (1, 0, 1, 0))
        mask = F.pad(mask, (1, 0), value=True)
        bias = self.edge_bias * adjacency + torch.where(mask, 0.0, -1e9).unsqueeze(1)
        for layer in self.layers:
            dense = layer(dense, bias)
        return self.head(dense[:, 0])


class ThereAndBack(nn.Module):
    """An attention layer that pads the nodes it is given and returns rows of nodes."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, batch):
        dense, mask = to_dense_batch(x, batch)
        attended, _ = self.attention(dense, dense, dense, key_padding_mask=~mask)
        return self.norm(x + attended[mask])


# Layers of attention have no edges; those that have them are layers of the history, and what
# attention made of a state belongs to the layer before it.
@entry("convolutions first, attention after them", FAMILY, either=True)
class ConvsThenAttention(nn.Module):
    """GraphTrans: what is pooled has been through attention, with weights."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [TransformerConv(FEATURES, WIDTH), TransformerConv(WIDTH, WIDTH)]
        )
        self.attention, self.head = ThereAndBack(), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_mean_pool(keep(self.attention(x, batch)), batch))


@entry("convolutions and attention in turns", FAMILY)
class InTurns(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(TransformerConv(WIDTH, WIDTH) for _ in range(3))
        self.attentions = nn.ModuleList(ThereAndBack() for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv, attention in zip(self.convs, self.attentions, strict=True):
            x = keep(attention(F.relu(conv(x, edge_index)), batch))
        return self.head(global_mean_pool(x, batch))


@entry("attention alone, there and back", FAMILY, refused=NO_LAYERS, either=True)
class AttentionAlone(nn.Module):
    """Structure comes in by encodings of positions; the layers see the batch vector alone."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES + 3, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(ThereAndBack() for _ in range(2))

    def forward(self, x, pos, batch):
        x = keep(self.embed(torch.cat([x, pos], dim=1)))
        for layer in self.layers:
            x = keep(layer(x, batch))
        return self.head(global_mean_pool(x, batch))
