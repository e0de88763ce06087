"""What a readout computes of the states before it pools them, and what the history then lacks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.utils import scatter, softmax

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

POOLS, LACKING, FOUND = "a pool's own functions", "parts that are read out", "edges by distance"


class Pooled(nn.Module):
    """Three layers, and a readout that is given."""

    def __init__(self, readout, width=WIDTH, **modules):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.readout, self.head = readout, nn.Linear(width, 2)
        for name, module in modules.items():
            setattr(self, name, module if isinstance(module, nn.Module) else nn.Parameter(module))

    def forward(self, x, z, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(self.readout(self, x, z, batch))


def mass(self, x, z, batch):
    weight = z.float()[:, None]
    return global_add_pool(x * weight, batch) / global_add_pool(weight, batch)


def deviation(self, x, z, batch):
    mean = global_mean_pool(x, batch)
    return torch.cat([mean, global_mean_pool((x - mean[batch]) ** 2, batch).sqrt()], dim=-1)


def products(self, x, z, batch):
    return global_add_pool((x[:, :, None] * x[:, None, :]).flatten(1), batch)


def powers(self, x, z, batch):
    return global_mean_pool(x.clamp(min=1e-4) ** 3, batch) ** (1 / 3)


def clusters(self, x, z, batch):
    soft = self.assign(x).softmax(-1)  # [num_nodes, clusters]
    return global_add_pool((soft.unsqueeze(-1) * x.unsqueeze(1)).flatten(1), batch)


def heads(self, x, z, batch):
    weighed = torch.einsum("nk,nd->nkd", softmax(self.assign(x), batch), x)
    sums = x.new_zeros(int(batch.max()) + 1, 3, WIDTH).index_add(0, batch, weighed)
    return sums.flatten(1)


def mapped_clusters(self, x, z, batch):
    soft, mapped = torch.sigmoid(self.assign(x)), keep(self.map(x))
    return global_add_pool((mapped[:, :, None] * soft[:, None, :]).flatten(1), batch)


def outer_by_bmm(self, x, z, batch):
    soft = self.assign(x).softmax(-1)
    return global_add_pool(torch.bmm(soft.unsqueeze(2), x.unsqueeze(1)).view(len(x), -1), batch)


def split_heads(self, x, z, batch):
    weight = softmax(self.assign(x), batch)  # [num_nodes, heads], each of its own channels
    weighed = x.view(len(x), 2, WIDTH // 2) * weight.unsqueeze(-1)
    return global_add_pool(weighed.reshape(len(x), WIDTH), batch)


def clusters_shared_out(self, x, z, batch):
    """Means of the clusters: the weights are added up, too."""
    soft = self.assign(x).softmax(-1)
    sums = scatter(soft.unsqueeze(-1) * x.unsqueeze(1), batch)  # [num_graphs, clusters, width]
    return (sums / scatter(soft, batch).unsqueeze(-1)).flatten(1)


def softmax_by_channel(self, x, z, batch):
    return global_add_pool(x * softmax(x, batch), batch)


def with_temperature(self, x, z, batch):
    return global_add_pool((self.temperature * x).exp(), batch).log() / self.temperature


def own_norm(self, x, z, batch):
    return global_mean_pool(keep(self.norm(x)), batch)


add("pool: weighted by mass", POOLS, lambda: Pooled(mass))
add("pool: mean and deviation", POOLS, lambda: Pooled(deviation, 2 * WIDTH))
add("pool: products of channels", POOLS, lambda: Pooled(products, WIDTH**2))
add("pool: mean of powers", POOLS, lambda: Pooled(powers))
add(
    "pool: exp and log", POOLS, lambda: Pooled(lambda s, x, z, b: global_add_pool(x.exp(), b).log())
)
add("pool: a softmax over the nodes of each channel", POOLS, lambda: Pooled(softmax_by_channel))
add(
    "pool: exp and log with a temperature",
    POOLS,
    lambda: Pooled(with_temperature, temperature=torch.tensor(1.5)),
)
for name, (readout, number, width) in {
    "soft clusters": (clusters, 3, 3 * WIDTH),
    "heads of attention by einsum": (heads, 3, 3 * WIDTH),
    "soft clusters by bmm": (outer_by_bmm, 3, 3 * WIDTH),
    "means of soft clusters": (clusters_shared_out, 3, 3 * WIDTH),
    "heads of parts of the channels": (split_heads, 2, WIDTH),
}.items():
    add(
        f"pool: {name}",
        POOLS,
        lambda readout=readout, number=number, width=width: Pooled(
            readout, width, assign=nn.Linear(WIDTH, number)
        ),
    )
add(
    "pool: soft clusters of mapped states",
    POOLS,
    lambda: Pooled(mapped_clusters, 3 * 5, assign=nn.Linear(WIDTH, 3), map=nn.Linear(WIDTH, 5)),
)


# The weights of the nodes come from a network of their own, which is no branch of the readout.
@entry("pool: weights by a network of their own", POOLS)
class OwnScores(Pooled):
    def __init__(self):
        super().__init__(None)
        self.score = nn.ModuleList([GCNConv(FEATURES, 4), GCNConv(4, 1)])

    def forward(self, x, edge_index, batch):
        score = self.score[1](self.score[0](x, edge_index).relu(), edge_index)
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_add_pool(x * softmax(score, batch), batch))


add("a norm for the readout alone", LACKING, lambda: Pooled(own_norm, norm=nn.BatchNorm1d(WIDTH)))


@entry("JK by cat of norms for the readout alone", LACKING)
class NormedJumping(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, x, edge_index, batch):
        xs = []
        keep(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = keep(F.relu(conv(x, edge_index)))
            xs.append(norm(x))
        return self.head(global_mean_pool(keep(torch.cat(xs, dim=-1)), batch))


@entry("DenseNet with a map before each layer", LACKING)
class Bottlenecks(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.maps = nn.ModuleList(nn.Linear(WIDTH * at, WIDTH) for at in (1, 2, 3))
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        xs = [self.embed(x)]
        for conv, linear in zip(self.convs, self.maps, strict=True):
            xs.append(F.relu(conv(keep(F.relu(linear(torch.cat(xs, dim=-1)))), edge_index)))
        keep(xs[-1])
        return global_mean_pool(keep(torch.cat(xs, dim=-1)), batch)


@entry("towers with an MLP each, concatenated per node", LACKING)
class MappedTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = GCNConv(FEATURES, WIDTH), SAGEConv(FEATURES, WIDTH)
        self.maps = nn.ModuleList([mlp(WIDTH, WIDTH, 5), mlp(WIDTH, WIDTH, 6)])

    def forward(self, x, edge_index, batch):
        keep(x)
        a, b = keep(F.relu(self.first(x, edge_index))), keep(F.relu(self.second(x, edge_index)))
        both = torch.cat([self.maps[0](a), self.maps[1](b)], dim=-1)
        return global_mean_pool(keep(both), batch)


@entry("JK by an encoder layer of torch", LACKING)
class EncodedJumping(Pooled):
    def __init__(self):
        super().__init__(None)
        self.over = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)

    def forward(self, x, edge_index, batch):
        xs = [keep(self.embed(x))]
        for conv in self.convs:
            xs.append(keep(F.relu(conv(xs[-1], edge_index))))
        return self.head(global_mean_pool(keep(self.over(torch.stack(xs, 1)).mean(1)), batch))


@entry("states of several time steps, averaged for the pool", LACKING)
class TimeSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 4), nn.Linear(4, 1)
        self.convs = nn.ModuleList(SAGEConv(4, 4, node_dim=0) for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x.unsqueeze(-1)))  # [num_nodes, steps, 4]
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_mean_pool(keep(x.mean(1)), batch))


class Nearby(nn.Module):
    """Messages by hand, along whatever edges it is given."""

    def __init__(self):
        super().__init__()
        self.lin, self.filter = nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x, edges, distance):
        messages = self.lin(x)[edges[0]] * self.filter(distance)
        return torch.zeros_like(x).index_add_(0, edges[1], messages)


@entry("layers by hand, edges found by distance", FOUND)
class ByDistance(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.first, self.layers = GCNConv(WIDTH, WIDTH), nn.ModuleList(Nearby() for _ in range(2))

    def forward(self, x, pos, edge_index, batch):
        near = (torch.cdist(pos, pos) < 3) & (batch[:, None] == batch[None])
        edges = near.nonzero().T
        distance = (pos[edges[0]] - pos[edges[1]]).norm(dim=-1, keepdim=True)
        x = keep(F.relu(self.first(keep(self.embed(x)), edge_index)))
        for layer in self.layers:
            x = keep(x + layer(x, edges, distance))
        return self.head(global_mean_pool(x, batch))


@entry("messages by distance in forward itself", FOUND, refused=r"outside of the layers.*--layers")
class ByDistanceInForward(ByDistance):
    def forward(self, x, pos, edge_index, batch):
        near = (torch.cdist(pos, pos) < 3) & (batch[:, None] == batch[None])
        source, target = near.nonzero().T
        x = F.relu(self.first(self.embed(x), edge_index))
        x = x + torch.zeros_like(x).index_add_(0, target, self.layers[0].lin(x)[source])
        return self.head(global_mean_pool(x, batch))
