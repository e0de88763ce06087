"""What is read out: experts, centres, pairs of neighbours, forces, raw features, all states."""

from __future__ import annotations

import torch
from torch import nn
from torch_geometric.nn import (
    GCNConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation
from torch_geometric.utils import to_dense_batch

from .branches import mlp
from .conditions import ORDER, Stack
from .graphs import FEATURES, WIDTH
from .registry import entry, keep
from .states import sum_to_nodes

READ = "what is read out"


@entry("experts per node before the pool", READ)
class Experts(Stack):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        weights = torch.softmax(self.router(h), dim=1)  # [num_nodes, experts]
        answers = torch.stack([expert(h).relu() for expert in self.experts], dim=1)
        mixed = (weights[:, :, None] * answers).sum(dim=1)
        return self.head(global_mean_pool(keep(mixed), batch))


# Nodes below a threshold count nothing: a weight per node, the pool's own.
@entry("a hard mask of scores before the pool", READ)
class HardMask(Stack):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        soft = torch.sigmoid(self.score(h))
        hard = (soft > 0.5).float()
        mask = hard - soft.detach() + soft
        return self.head(global_add_pool(h * mask, batch))


# Raw features are no state of a layer: what is pooled is another tensor than the state.
@entry("raw features beside the last state in the pool", READ)
class RawBeside(Stack):
    def __init__(self):
        super().__init__(FEATURES + WIDTH)

    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        return self.head(global_mean_pool(keep(torch.cat([x, h], dim=1)), batch))


@entry("the first node of each graph is read out", READ)
class Root(Stack):
    def forward(self, x, edge_index, ptr):
        return self.head(self.states(x, edge_index)[ptr[:-1]])


@entry("SEAL: the product of two centres", READ)
class Centres(Stack):
    def forward(self, x, edge_index, ptr):
        h, first = self.states(x, edge_index), ptr[:-1]
        return self.head(h[first] * h[first + 1])


@entry("products of neighbours, pooled", READ)
class PairScores(Stack):
    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        pairs = h[edge_index[0]] * h[edge_index[1]]  # [num_edges, width]
        return self.head(global_mean_pool(pairs, batch[edge_index[0]]))


@entry("an attention pool of every layer", READ)
class PoolEach(Stack):
    def __init__(self):
        super().__init__()
        self.pools = nn.ModuleList(
            AttentionalAggregation(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)) for _ in range(3)
        )

    def forward(self, x, edge_index, batch):
        x, total = keep(self.embed(x)), 0
        for conv, pool in zip(self.convs, self.pools, strict=True):
            x = keep(conv(x, edge_index).relu())
            total = total + pool(x, batch)
        return self.head(total)


@entry("noisy nodes: a head for graphs, one that denoises", READ)
class NoisyNodes(Stack):
    def __init__(self):
        super().__init__()
        self.denoise = mlp(WIDTH, WIDTH, 3)

    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        return self.head(global_mean_pool(h, batch)), self.denoise(h)


@entry("forces as gradients of the energy", READ)
class Forces(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.energy = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.convs = nn.ModuleList(ByDistance() for _ in range(2))

    def forward(self, x, pos, edge_index, batch):
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            h = keep(self.embed(x))
            for conv in self.convs:
                h = keep(h + conv(h, pos, edge_index))
            energy = global_add_pool(keep(self.energy(h)), batch)
            forces = -torch.autograd.grad(energy.sum(), pos)[0]
        return {"energy": energy.detach(), "forces": forces}


class ByDistance(nn.Module):
    def __init__(self):
        super().__init__()
        self.filters, self.lin = mlp(1, WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h, pos, edge_index):
        source, target = edge_index
        apart = (pos[source] - pos[target]).pow(2).sum(dim=1, keepdim=True)
        return torch.tanh(self.lin(sum_to_nodes(h[source] * self.filters(apart), target, len(h))))


# GraphTrans: a map leads to a transformer over each graph with a token that is read out.
@entry("GraphTrans: a map, then a transformer with a token", READ)
class GraphTrans(Stack):
    def __init__(self):
        super().__init__()
        self.gnn2transformer = nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x, edge_index, batch):
        h = keep(self.gnn2transformer(self.states(x, edge_index)))
        padded, mask = to_dense_batch(h, batch)
        padded = torch.cat([self.token.expand(len(padded), -1, -1), padded], dim=1)
        mask = torch.cat([mask.new_ones(len(mask), 1), mask], dim=1)
        return self.head(self.encoder(padded, src_key_padding_mask=~mask)[:, 0])


@entry("a GRU over the nodes as the readout", ORDER)
class GruReadout(Stack):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, edge_index, batch):
        padded, mask = to_dense_batch(self.states(x, edge_index), batch)
        out, _ = self.gru(padded)
        last = mask.sum(dim=1) - 1
        return self.head(out[torch.arange(len(out)), last])


@entry("the virtual node is read out beside the pool", READ)
class VirtualRead(Stack):
    def __init__(self):
        super().__init__(2 * WIDTH)
        self.virtual = nn.ModuleList(mlp(WIDTH, WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        h, virtual = self.embed(x), 0
        for conv, update in zip(self.convs, self.virtual, strict=True):
            virtual = virtual + update(global_mean_pool(h, batch))
            h = conv(keep(h + virtual[batch]), edge_index).relu()
        return self.head(torch.cat([global_mean_pool(keep(h), batch), virtual], dim=1))


# Which atoms are carbon is known from the data: a weight per node, the pool's own.
@entry("pools of two kinds of atoms", READ)
class ByKind(Stack):
    def __init__(self):
        super().__init__(2 * WIDTH)

    def forward(self, x, z, edge_index, batch):
        h, heavy = self.states(x, edge_index), (z > 4).float()[:, None]
        pools = global_add_pool(h * heavy, batch), global_add_pool(h * (1 - heavy), batch)
        return self.head(torch.cat(pools, dim=1))


@entry("an encoder that returns all of its states", READ)
class AllStates(Stack):
    def forward(self, x, edge_index):
        x, hidden = keep(self.embed(x)), []
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
            hidden.append(x)
        return hidden


@entry("an encoder that returns its states and a graph's embedding", READ)
class StatesAndGraph(Stack):
    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        return h, global_mean_pool(h, batch)


@entry("where the nodes will be: positions and what is decoded", READ)
class Displacement(Stack):
    def __init__(self):
        super().__init__()
        self.decoder = mlp(WIDTH, WIDTH, 3)

    def forward(self, x, pos, edge_index):
        return pos + self.decoder(self.states(x, edge_index))


@entry("a gate between the last state and the first before the pool", READ)
class HighwayReadout(Stack):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        first = self.embed(x)
        h = self.states(x, edge_index)
        gate = torch.sigmoid(self.gate(torch.cat([h, first], dim=1)))
        return self.head(global_mean_pool(keep(gate * h + (1 - gate) * first), batch))


@entry("norms before the layers, and a norm, a map and an activation at the end", READ)
class PreNorm(Stack):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = self.embed(x)
        for norm, conv in zip(self.norms, self.convs, strict=False):
            h = h + conv(keep(norm(h)), edge_index).relu()
        h = keep(self.norms[3](h))
        return self.head(global_mean_pool(keep(self.last(h).relu()), batch))


@entry("maps of pairs of neighbours, pooled", READ)
class PairMaps(Stack):
    def __init__(self):
        super().__init__()
        self.pairs = mlp(2 * WIDTH, WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = self.states(x, edge_index)
        pairs = self.pairs(torch.cat([h[edge_index[0]], h[edge_index[1]]], dim=1))
        return self.head(global_add_pool(pairs, batch[edge_index[0]]))


@entry("bootstrap: an online encoder, a predictor, a target encoder", READ)
class Bootstrap(nn.Module):
    """Only the online branch has a predictor per node; both are read out, and compared."""

    def __init__(self):
        super().__init__()
        self.online = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.target = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.predictor = mlp(WIDTH, WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        keep(x)
        a = keep(self.online[0](x, edge_index).relu())
        a = keep(self.online[1](a, edge_index).relu())
        predicted = keep(self.predictor(a))
        b = keep(self.target[0](x, edge_index).relu())
        b = keep(self.target[1](b, edge_index).relu())
        return torch.stack([global_mean_pool(predicted, batch), global_mean_pool(b, batch)], dim=1)


@entry("a last layer that is called pooled", READ)
class CalledPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.pooled = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = keep(self.first(keep(x), edge_index).relu())
        return self.head(global_mean_pool(keep(self.pooled(x, edge_index).relu()), batch))
