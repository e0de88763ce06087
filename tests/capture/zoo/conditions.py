"""What lies between layers: conditions, gates, masks, streams, sequences of nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    AntiSymmetricConv,
    DeepGCNLayer,
    GCNConv,
    GINConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)
from torch_geometric.nn.models import Polynormer
from torch_geometric.utils import softmax, to_dense_batch

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep
from .states import sum_to_nodes

BETWEEN, ORDER, AS_THEY_ARE = (
    "conditions between layers",
    "sequences of nodes",
    "PyG's newer models",
)


class Stack(nn.Module):
    """Three convolutions and a head, for models that differ in what lies around them."""

    def __init__(self, out=WIDTH):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(out, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def states(self, x, edge_index):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return x


@entry("FiLM: a graph's context scales and shifts every layer", BETWEEN)
class Film(Stack):
    def __init__(self):
        super().__init__()
        self.films = nn.ModuleList(nn.Linear(3, 2 * WIDTH) for _ in range(3))

    def forward(self, x, pos, edge_index, batch):
        context = global_mean_pool(pos, batch)  # [num_graphs, 3]
        x = keep(self.embed(x))
        for conv, film in zip(self.convs, self.films, strict=True):
            scale, shift = film(context)[batch].chunk(2, dim=-1)
            x = keep((scale * conv(x, edge_index) + shift).relu())
        return self.head(global_mean_pool(x, batch))


@entry("FiLM and residuals", BETWEEN)
class ResidualFilm(Film):
    def forward(self, x, pos, edge_index, batch):
        context = global_mean_pool(pos, batch)
        x = keep(self.embed(x))
        for conv, film in zip(self.convs, self.films, strict=True):
            scale, shift = film(context)[batch].chunk(2, dim=-1)
            x = keep(x + (scale * conv(x, edge_index) + shift).relu())
        return self.head(global_mean_pool(x, batch))


@entry("ReZero: a learned number before each layer is added", BETWEEN)
class ReZero(Stack):
    def __init__(self):
        super().__init__()
        self.alphas = nn.Parameter(0.1 * torch.ones(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for at, conv in enumerate(self.convs):
            x = keep(x + self.alphas[at] * conv(x, edge_index).relu())
        return self.head(global_mean_pool(x, batch))


@entry("PairNorm by hand between layers", BETWEEN)
class PairNormed(Stack):
    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = conv(x, edge_index)
            x = x - global_mean_pool(x, batch)[batch]
            x = keep(F.relu(x / (1e-6 + x.pow(2).sum(dim=1, keepdim=True).mean()).sqrt()))
        return self.head(global_mean_pool(x, batch))


@entry("masked rows are overwritten between layers", BETWEEN)
class Overwritten(Stack):
    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, z, edge_index, batch):
        x = self.embed(x)
        x[z == 1] = self.token
        keep(x)
        for conv in self.convs:
            x = conv(x, edge_index).relu()
            x[z == 1] = 0.0
            keep(x)
        return self.head(global_mean_pool(x, batch))


@entry("two streams that attend to each other", BETWEEN)
class Streams(nn.Module):
    """Features and positions, each with its convolutions, gated by the other after each."""

    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.second = nn.ModuleList([GCNConv(3, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.gates = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 2)

    def forward(self, x, pos, edge_index, batch):
        a, b = keep(x), pos
        for at in range(2):
            a, b = a if at == 0 else keep(a), keep(b)
            a, b = self.first[at](a, edge_index).relu(), self.second[at](b, edge_index).relu()
            gate = torch.sigmoid(self.gates[at](torch.cat([a, b], dim=1)))
            a, b = a + gate * b, b + (1 - gate) * a
        pooled = keep(torch.cat([a, b], dim=1))
        return self.head(global_mean_pool(pooled, batch))


class Pass(nn.Module):
    """Tuple in, tuple out, for nn.Sequential."""

    def __init__(self, width):
        super().__init__()
        self.lin = nn.Linear(width, WIDTH)

    def forward(self, given):
        x, edge_index = given
        source, target = edge_index
        return F.relu(self.lin(x + sum_to_nodes(x[source], target, len(x)))), edge_index


@entry("nn.Sequential of layers that hand on tuples", BETWEEN)
class Tuples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Pass(FEATURES), Pass(WIDTH), Pass(WIDTH))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        given = keep(x), edge_index
        for layer in self.layers:
            given = layer(given)
            keep(given[0])
        return self.head(global_mean_pool(given[0], batch))


@entry("both directions in turns, one cell for all", BETWEEN)
class Alternating(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.forth, self.back = SAGEConv(WIDTH, WIDTH), SAGEConv(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = keep(self.embed(x))
        for _ in range(2):
            h = keep(self.cell(self.forth(h, edge_index), h))
            h = keep(self.cell(self.back(h, edge_index.flip(0)), h))
        return self.head(global_add_pool(h, batch))


class AntiSymmetric(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.convs = nn.ModuleList(AntiSymmetricConv(WIDTH, num_iters=2) for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(global_mean_pool(x, batch))


def each_step(model, batch):
    """AntiSymmetricConv is no MessagePassing: its layers are the calls of the GCNConv inside."""
    x = model.embed(batch.x)
    kept = [x]
    for conv in model.convs:
        weight = conv.W - conv.W.t() - conv.gamma * conv.eye
        for _ in range(conv.num_iters):
            h = x @ weight.t() + conv.phi(x, batch.edge_index) + conv.bias
            x = x + conv.epsilon * conv.act(h)
            kept.append(x)
    return kept


add("A-DGN: AntiSymmetricConv of several steps", BETWEEN, AntiSymmetric, by_hand=each_step)


class Deep(nn.Module):
    """DeepGCNLayer around SAGEConv."""

    def __init__(self, block):
        super().__init__()
        sizes = [WIDTH * (at + 1) if block == "dense" else WIDTH for at in range(4)]
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(sizes[-1], 1)
        self.layers = nn.ModuleList(
            DeepGCNLayer(SAGEConv(size, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), block)
            for size in sizes[:-1]
        )

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for layer in self.layers:
            x = keep(layer(x, edge_index))
        return self.head(global_mean_pool(x, batch))


for _block in ("res", "dense", "plain"):
    add(f"DeepGCNLayer, {_block}", BETWEEN, lambda block=_block: Deep(block))


class SparseAttention(nn.Module):
    """pyGAT's sparse layer: scores of edges, a sparse matrix of them, a product."""

    def __init__(self, width):
        super().__init__()
        self.W = nn.Parameter(torch.randn(width, WIDTH) / 3)
        self.a = nn.Parameter(torch.randn(2 * WIDTH) / 3)

    def forward(self, x, edge_index):
        h = x @ self.W
        scores = torch.cat([h[edge_index[0]], h[edge_index[1]]], dim=1) @ self.a
        weights = softmax(F.leaky_relu(scores), edge_index[1], num_nodes=len(x))
        matrix = torch.sparse_coo_tensor(edge_index.flip(0), weights, (len(x), len(x)))
        return F.elu(torch.sparse.mm(matrix, h))


@entry("pyGAT: a sparse matrix of scores in each layer", BETWEEN)
class SparseGat(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([SparseAttention(FEATURES), SparseAttention(WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        for layer in self.layers:
            x = keep(layer(x, edge_index))
        return self.head(global_mean_pool(x, batch))


class Sequence(nn.Module):
    """As Graph-Mamba: a convolution, and a GRU over the nodes of each graph, there and back."""

    def __init__(self):
        super().__init__()
        self.conv = GINConv(mlp(WIDTH, WIDTH, WIDTH))
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x, edge_index, batch):
        order = torch.argsort(batch, stable=True)
        padded, mask = to_dense_batch(x[order], batch[order])
        back = torch.argsort(order)
        return x + self.conv(x, edge_index) + self.gru(padded)[0][mask][back]


@entry("Graph-Mamba style: a sequence beside each convolution", ORDER)
class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(Sequence() for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for layer in self.layers:
            x = keep(layer(x, edge_index, batch).relu())
        return self.head(global_mean_pool(x, batch))


def polynormer(model, batch):
    x, total, kept = batch.x, 0, []
    for at, conv in enumerate(model.local_convs):
        kept.append(x)
        h = model.h_lins[at](x).relu()
        x = model.post_bns[at](conv(x, batch.edge_index) + model.lins[at](x)).relu()
        x = (1 - model.beta) * model.lns[at](h * x) + model.beta * x
        total = total + x
    return [*kept, x, total]


add(
    "Polynormer, local",
    AS_THEY_ARE,
    lambda: Polynormer(FEATURES, WIDTH, 3, local_layers=3),
    by_hand=polynormer,
)


@entry("a U of layers on the same nodes, concatenated across", BETWEEN)
class Unpooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.bottom = GCNConv(WIDTH, WIDTH)
        self.up = nn.ModuleList([GCNConv(2 * WIDTH, WIDTH), GCNConv(2 * WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        skips = []
        for conv in self.down:
            x = conv(keep(x), edge_index).relu()
            skips.append(x)
        x = self.bottom(keep(x), edge_index).relu()
        for conv in self.up:
            x = conv(keep(torch.cat([x, skips.pop()], dim=1)), edge_index).relu()
        return self.head(global_mean_pool(keep(x), batch))


# The first pass only makes weights of edges: what its last layer returns is consumed by no layer
# and no readout as a state.
@entry(
    "GSAT: a first pass that weighs the edges of the second", BETWEEN, readings=("both", "second")
)
class TwoPasses(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.extract, self.head = mlp(2 * WIDTH, WIDTH, 1), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        keep(x)
        h = keep(self.convs[0](x, edge_index).relu(), "both")
        h = self.convs[1](h, edge_index).relu()
        pairs = torch.cat([h[edge_index[0]], h[edge_index[1]]], dim=1)
        weights = torch.sigmoid(self.extract(pairs)).view(-1)
        h = keep(self.convs[0](x, edge_index, weights).relu())
        h = keep(self.convs[1](h, edge_index, weights).relu())
        return self.head(global_mean_pool(h, batch))


@entry("dropout of whole nodes by a mask of ones", BETWEEN)
class NodeDropout(Stack):
    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            kept = F.dropout(torch.ones(len(x), 1), 0.2, training=self.training)
            x = keep(conv(x, edge_index).relu() * kept)
        return self.head(global_mean_pool(x, batch))


# Each convolution consumes its part of the channels; as good is the whole of which they are parts.
@entry("a convolution for each part of the channels", BETWEEN, readings=("parts", "whole"))
class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.ModuleList(
            nn.ModuleList(GCNConv(4, 4) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for convs in self.layers:
            keep(x, "whole")
            parts = [keep(part, "parts") for part in x.chunk(2, dim=1)]
            parts = [conv(part, edge_index) for conv, part in zip(convs, parts, strict=True)]
            x = torch.cat(parts, dim=1).relu()
        return self.head(global_mean_pool(keep(x), batch))
