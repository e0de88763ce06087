"""States that are summed, stacked or written side by side before they are read out."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GCNConv,
    GINConv,
    SAGEConv,
    SimpleConv,
    global_add_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

STREAMS, STACKED = "residual streams", "layers stacked per node"


class Stream(nn.Module):
    """Three residual layers; what is pooled is made of the states by a function that is given."""

    def __init__(self, pooled):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.pooled = pooled

    def forward(self, x, edge_index, batch):
        states = [keep(self.embed(x))]
        for conv in self.convs:
            states.append(keep(F.relu(conv(states[-1], edge_index)) + states[-1]))
        return self.head(global_mean_pool(keep(self.pooled(states)), batch))


# Each state is in the stream already: added to it once more, it is a layer among others.
add("the mean of the last two states", STREAMS, lambda: Stream(lambda xs: (xs[-1] + xs[-2]) / 2))
add(
    "the mean of the first and last state", STREAMS, lambda: Stream(lambda xs: (xs[-1] + xs[0]) / 2)
)


# As above by the letter, but every layer does it: a habit of the layers.
@entry("what a layer is given is added twice, in every layer", STREAMS)
class AddedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index) + x) + x)
        return self.head(global_mean_pool(x, batch))


@entry("GraphCON: positions and velocities of oscillators", STREAMS)
class GraphCon(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.conv = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        x = velocity = keep(F.relu(self.encode(x)))
        for _ in range(3):
            force = F.relu(self.conv(x, edge_index)) - velocity - 0.3 * x
            velocity = velocity + 0.5 * force
            x = keep(x + 0.5 * velocity)
        return self.decode(x)


# --- layers side by side, in one tensor


@entry("layers written into a tensor by index, in place", STACKED)
class Buffered(nn.Module):
    """``relu_``, ``add_`` and a buffer: what is pooled is all layers, and no more."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(4 * WIDTH, 2)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        layers = torch.empty(len(x), 4, WIDTH)
        x = layers[:, 0] = keep(self.embed(x))
        for number, conv in enumerate(self.convs, 1):
            new = conv(x, edge_index).relu_()
            new.add_(x)
            x = layers[:, number] = keep(new)
        return self.head(global_add_pool(layers.flatten(1), batch))


# A layer is given its slice; what is pooled is the whole, which is another tensor.
@entry("layers written into slices of one tensor, which is pooled", STACKED)
class Sliced(Buffered):
    def forward(self, x, edge_index, batch):
        parts = torch.zeros(len(x), 4 * WIDTH)
        parts[:, :WIDTH] = self.embed(x)
        keep(parts[:, :WIDTH])
        for number, conv in enumerate(self.convs):
            start, middle, end = WIDTH * number, WIDTH * (number + 1), WIDTH * (number + 2)
            parts[:, middle:end] = conv(parts[:, start:middle], edge_index).relu()
            keep(parts[:, middle:end])
        return self.head(global_add_pool(keep(parts), batch))


@entry("one layer of each node is chosen by two indices", STACKED)
class ChosenByIndex(Buffered):
    def __init__(self):
        super().__init__()
        self.choose, self.head = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        states = [keep(self.embed(x))]
        for conv in self.convs:
            states.append(keep(conv(states[-1], edge_index).relu()))
        chosen = self.choose(states[-1]).argmax(-1)
        joined = torch.stack(states, dim=1)[torch.arange(len(x)), chosen]
        return self.head(global_add_pool(keep(joined), batch))


@entry("layers concatenated one after another", STACKED)
class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(width, WIDTH) for width in widths)
        self.head = nn.Linear(FEATURES + 3 * WIDTH, 2)

    def forward(self, x, edge_index, batch):
        features = keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
            features = torch.cat([features, x], dim=-1)
        return self.head(global_add_pool(features, batch))


class Stacked(nn.Module):
    """An output per node of all layers, joined by a function that is given."""

    def __init__(self, join, **modules):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 3)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.join = join
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index):
        x, layers = keep(self.embed(x)), []
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
            layers.append(x)
        return self.head(keep(self.join(self, torch.stack(layers, dim=1))))


def lstm_attention(self, layers):
    """Jumping knowledge by hand: an LSTM scores the layers of each node."""
    score = self.score(self.lstm(layers)[0]).softmax(dim=1)  # [num_nodes, num_layers, 1]
    return (score * layers).sum(dim=1)


def last_hidden(self, layers):
    return self.lstm(layers)[1][0][-1]


def weighted(self, layers):
    return torch.einsum("l,nlw->nw", self.score.weight[0, :3].softmax(dim=0), layers)


def make_stacked(join, directions=1):
    lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=directions == 2)
    return Stacked(join, lstm=lstm, score=nn.Linear(directions * WIDTH, 1))


add("JK by attention of an LSTM, node level", STACKED, lambda: make_stacked(lstm_attention, 2))
add("JK by an LSTM's last state, node level", STACKED, lambda: make_stacked(last_hidden))
add("JK by learned weights and einsum, node level", STACKED, lambda: make_stacked(weighted))


@entry("NAGphormer: a transformer over the hops of each node", STACKED)
class NagPhormer(nn.Module):
    def __init__(self):
        super().__init__()
        self.hop, self.embed = SimpleConv(aggr="mean"), nn.Linear(FEATURES, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
        self.attention, self.head = nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        hops = [keep(x)]
        for _ in range(3):
            hops.append(keep(self.hop(hops[-1], edge_index)))
        tokens = self.encoder(self.embed(torch.stack(hops, dim=1)))  # [num_nodes, 4, width]
        own, others = tokens[:, :1], tokens[:, 1:]
        pairs = torch.cat([own.expand_as(others), others], dim=-1)  # [num_nodes, 3, 2 * width]
        weight = self.attention(pairs).softmax(dim=1)
        return self.head(keep(own[:, 0] + (weight * others).sum(dim=1)))


# A block that no layer before has, with its norm inside: the state is what goes around it too.
@entry("a feed-forward block with its norm after the last layer", STREAMS)
class LateBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.block = nn.LayerNorm(WIDTH), mlp(WIDTH, 16, WIDTH)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_mean_pool(keep(x + self.block(self.norm(x))), batch))
