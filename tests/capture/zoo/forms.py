"""Forms of programs: layers from dictionaries and closures, identities, siblings, own readouts."""

from __future__ import annotations

import functools
import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    NNConv,
    SAGEConv,
    TransformerConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import SortAggregation
from torch_geometric.utils import to_dense_batch

from .branches import mlp
from .edges import EdgesFirst
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep

PROGRAMS, OWN, SELF = "forms of programs", "readouts of papers", "self-supervised"


@entry("a search space: layers from a ModuleDict, by a list of names", PROGRAMS)
class SearchSpace(nn.Module):
    PATH = ("gcn", "skip", "gat", "sage")

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.ops = nn.ModuleDict(
            {
                "gcn": GCNConv(WIDTH, WIDTH),
                "gat": GATConv(WIDTH, WIDTH),
                "sage": SAGEConv(WIDTH, WIDTH),
                "gin": GINConv(mlp(WIDTH, WIDTH, WIDTH)),
            }
        )

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for name in self.PATH:
            x = x if name == "skip" else keep(self.ops[name](x, edge_index).relu())
        return self.head(global_mean_pool(x, batch))


@entry("closures, composed by reduce", PROGRAMS)
class Closures(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        def step(conv):
            return lambda h: keep(torch.relu(conv(h, edge_index)))

        out = functools.reduce(lambda h, f: f(h), map(step, self.convs), keep(x))
        return self.head(global_max_pool(out, batch))


@entry("layers that call the next one", PROGRAMS)
class Recursive(nn.Module):
    def __init__(self, depth=3, width=FEATURES):
        super().__init__()
        self.conv = GCNConv(width, WIDTH)
        self.rest = Recursive(depth - 1, WIDTH) if depth > 1 else None
        self.head = nn.Linear(WIDTH, 1) if depth == 1 else None

    def forward(self, x, edge_index, batch):
        h = self.conv(keep(x), edge_index).relu()
        if self.rest is not None:
            return self.rest(h, edge_index, batch)
        return self.head(global_mean_pool(keep(h), batch))


# Some nodes are changed in place by an index: not told from messages, and refused.
@entry("ID-GNN: another layer for marked nodes", PROGRAMS, either=True)
class IdentityAware(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (FEATURES, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(size, WIDTH) for size in sizes)
        self.marked = nn.ModuleList(nn.Linear(size, WIDTH) for size in sizes)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, z, edge_index, batch):
        chosen = (z < 4).nonzero().view(-1)
        keep(x)
        for conv, marked in zip(self.convs, self.marked, strict=True):
            h = conv(x, edge_index)
            h = h.index_add(0, chosen, marked(x[chosen]))
            x = keep(h.relu())
        return self.head(global_mean_pool(x, batch))


@entry("Exphormer: edges and random edges through one attention", PROGRAMS)
class Exphormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.kinds = nn.Embedding(2, WIDTH)
        self.local = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(2))
        self.wide = nn.ModuleList(
            TransformerConv(WIDTH, WIDTH // 2, heads=2, edge_dim=WIDTH) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.ffs = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(2))

    def forward(self, x, edge_index, batch):
        far = torch.stack([edge_index[0], edge_index[1].flip(0)])
        far = far[:, batch[far[0]] == batch[far[1]]]
        edges = torch.cat([edge_index, far], dim=1)
        kinds = self.kinds((torch.arange(edges.shape[1]) >= edge_index.shape[1]).long())
        h = keep(self.embed(x))
        for local, wide, norm, ff in zip(self.local, self.wide, self.norms, self.ffs, strict=True):
            h = h + local(h, edge_index) + wide(h, edges, kinds)
            h = norm(h)
            h = keep(h + ff(h))
        return self.head(global_mean_pool(h, batch))


@entry("a siamese network: the distance of two pooled views", PROGRAMS, data="views")
class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def encode(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return global_mean_pool(x, batch)

    def forward(self, x, x2, edge_index, edge_index2, batch):
        first, second = self.encode(x, edge_index, batch), self.encode(x2, edge_index2, batch)
        return self.head((first - second).abs())


# --- readouts as papers have them


@entry("GIN as published: a map of each layer's pool, added", OWN)
class GinScores(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(
            [GINConv(mlp(FEATURES, WIDTH, WIDTH)), GINConv(mlp(WIDTH, WIDTH, WIDTH))]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(2))
        self.predictions = nn.ModuleList(nn.Linear(w, 2) for w in (FEATURES, WIDTH, WIDTH))

    def forward(self, x, edge_index, batch):
        hidden = [keep(x)]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            hidden.append(keep(norm(conv(hidden[-1], edge_index)).relu()))
        score = 0
        for h, predict in zip(hidden, self.predictions, strict=True):
            score = score + F.dropout(predict(global_add_pool(h, batch)), 0.5, self.training)
        return score


@entry("GGNN: gates and values of the last state and the first", OWN)
class GatedReadout(nn.Module):
    """Gilmer's MPNN: sum of sigmoid(i(h, h0)) * j(h), as wide as the output."""

    def __init__(self):
        super().__init__()
        self.lin0, self.gru = nn.Linear(FEATURES, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.conv = NNConv(WIDTH, WIDTH, mlp(EDGE_FEATURES, WIDTH, WIDTH * WIDTH), aggr="mean")
        self.i, self.j = mlp(2 * WIDTH, WIDTH, 3), mlp(WIDTH, WIDTH, 3)

    def forward(self, x, edge_index, edge_attr, batch):
        h = first = keep(self.lin0(x).relu())
        for _ in range(3):
            h = keep(self.gru(self.conv(h, edge_index, edge_attr).relu(), h))
        gated = torch.sigmoid(self.i(torch.cat([h, first], dim=1))) * self.j(h)
        return global_add_pool(keep(gated), batch)


@entry("SortPool: four layers, the last of width 1, concatenated", OWN)
class SortPool(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (FEATURES, WIDTH, WIDTH, WIDTH, 1)
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(sizes))
        self.pool = SortAggregation(k=5)
        self.conv1 = nn.Conv1d(1, 4, 3 * WIDTH + 1, 3 * WIDTH + 1)
        self.head = nn.Linear(20, 2)

    def forward(self, x, edge_index, batch):
        xs = [keep(x)]
        for conv in self.convs:
            xs.append(keep(conv(xs[-1], edge_index).tanh()))
        sorted_rows = self.pool(torch.cat(xs[1:], dim=-1), batch)  # [num_graphs, k * width]
        return self.head(self.conv1(sorted_rows.unsqueeze(1)).relu().flatten(1))


@entry("JK by an LSTM over layers, its last state", OWN)
class LastOfLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, edge_index, batch):
        x, states = keep(self.embed(x)), []
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
            states.append(x)
        _, (hidden, _) = self.lstm(torch.stack(states, dim=1))
        return self.head(global_mean_pool(keep(hidden[-1]), batch))


@entry("Deep Sets on the last states", OWN)
class DeepSets(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.phi, self.rho = mlp(WIDTH, 12, 12), mlp(12, WIDTH, 1)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return self.rho(global_add_pool(keep(self.phi(x).relu()), batch))


@entry("nodes and edges pooled apart", OWN)
class BothPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.nodes, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.layers = nn.ModuleList(EdgesFirst() for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        h, e = keep(self.nodes(x)), self.edges(edge_attr)
        for layer in self.layers:
            e, h = layer(e, h, edge_index)
            keep(h)
        pooled = global_mean_pool(h, batch), global_mean_pool(e, batch[edge_index[0]])
        return self.head(torch.cat(pooled, dim=1))


@entry("a decoder of queries over the padded states", OWN)
class Queries(nn.Module):
    """As DETR: learned queries attend to the nodes of a graph."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.queries = nn.Parameter(torch.randn(2, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        padded, mask = to_dense_batch(x, batch)  # [num_graphs, most_nodes, width]
        queries = self.queries.expand(len(padded), -1, -1)
        found, _ = self.attention(queries, padded, padded, key_padding_mask=~mask)
        return self.head(found.flatten(1))


@entry("prototypes: cosines of the states with a vector per class", OWN)
class Prototypes(nn.Module):
    """An output per node; the cosines are the head's, and so is the length."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.prototypes = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x, edge_index):
        x = self.convs[0](keep(x), edge_index)
        x = self.convs[1](keep(x.relu()), edge_index)
        normed = keep(F.normalize(x, dim=1))  # without weights, it belongs to the state
        return normed @ F.normalize(self.prototypes, dim=1).t()


# --- self-supervised


@entry("GraphMAE: an encoder, a map, a decoder that is a convolution", SELF)
class GraphMae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([GATConv(FEATURES, WIDTH), GATConv(WIDTH, WIDTH)])
        self.encoder_to_decoder = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decoder = GATConv(WIDTH, FEATURES)

    def forward(self, x, edge_index):
        keep(x)
        h = keep(F.prelu(self.encoder[0](x, edge_index), torch.tensor(0.25)))
        h = F.prelu(self.encoder[1](h, edge_index), torch.tensor(0.25))
        return keep(self.decoder(keep(self.encoder_to_decoder(h)), edge_index))


@entry("DGI: states and those of shuffled features, by a bilinear score", SELF)
class Infomax(nn.Module):
    """In eval() the summary of each graph; the scores of its nodes are a second output."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        h = keep(self.conv1(keep(x), edge_index).relu())
        h = keep(self.conv2(h, edge_index).relu())
        summary = torch.sigmoid(global_mean_pool(h, batch))
        scores = ((h @ self.weight) * summary[batch]).sum(dim=1)
        return {"logits": self.head(summary), "scores": scores}
