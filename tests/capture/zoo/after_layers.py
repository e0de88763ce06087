"""Between the last layer and the pool: chemprop's W_o, bottleneck masks, split channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    MessagePassing,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, entry, keep
from .states import sum_to_nodes

AFTER, MASKS, REVERSIBLE = "after the last layer", "bottleneck masks", "reversible"


# --- chemprop


class AtomMessages(nn.Module):
    """Sums of the neighbours' states and bonds, mapped, with the first state added."""

    def __init__(self):
        super().__init__()
        self.W_h = nn.Linear(WIDTH + EDGE_FEATURES, WIDTH, bias=False)

    def forward(self, message, first, edge_index, bonds):
        source, target = edge_index
        sent = torch.cat([message[source], bonds], dim=1)  # [num_edges, width + bonds]
        return F.relu(first + self.W_h(sum_to_nodes(sent, target, len(message))))


class Neighbours(nn.Module):
    def forward(self, message, edge_index):
        source, target = edge_index
        return sum_to_nodes(message[source], target, len(message))


# The sum over the neighbours is a layer too, without weights: its result is the last state, and
# W_o, which maps it together with the atoms' features, lies between that and the pool.
@entry("chemprop with atom messages: W_o after the last sum", AFTER)
class AtomDmpnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_i = nn.Linear(FEATURES, WIDTH, bias=False)
        self.steps = nn.ModuleList(AtomMessages() for _ in range(2))
        self.neighbours = Neighbours()
        self.W_o = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.ffn = mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        first = self.W_i(x)
        message = keep(F.relu(first))
        for step in self.steps:
            message = keep(step(message, first, edge_index, edge_attr))
        summed = keep(self.neighbours(message, edge_index))
        atoms = keep(F.relu(self.W_o(torch.cat([x, summed], dim=1))))
        return self.ffn(global_mean_pool(atoms, batch))


@entry("chemprop with one W_h for all steps, then W_o", AFTER)
class SharedDmpnn(AtomDmpnn):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList([AtomMessages()] * 3)


# W_o is given the features and the last state, and no sum comes between.
@entry("W_o of the features and the last state", AFTER)
class FeaturesOnceMore(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_i = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.W_o = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.ffn = mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, batch):
        h = keep(F.relu(self.W_i(x)))
        for conv in self.convs:
            h = keep(F.relu(conv(h, edge_index)))
        atoms = keep(F.relu(self.W_o(torch.cat([x, h], dim=1))))
        return self.ffn(global_add_pool(atoms, batch))


class SumConv(MessagePassing):
    def forward(self, x, edge_index):
        return self.propagate(edge_index, x=x)


# The maps after the layers are W_h, and W_o after the last one: another map, of more.
@entry("chemprop with atom messages: W_h in forward, W_o after the last sum", AFTER)
class MapsInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.W_i, self.W_h = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.W_o = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.conv, self.ffn = SumConv(), mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, batch):
        first = self.W_i(x)
        h = keep(F.relu(first))
        for _ in range(2):
            h = keep(F.relu(first + self.W_h(self.conv(h, edge_index))))
        summed = keep(self.conv(h, edge_index))
        atoms = keep(F.relu(self.W_o(torch.cat([x, summed], dim=1))))
        return self.ffn(global_mean_pool(atoms, batch))


# --- information bottlenecks


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))

    def forward(self, x, edge_index):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return x


# A mask that mixes each state with the mean of its graph is more than a weight per node: what is
# pooled is another tensor than the state.
@entry("GIB: a mask between the states and their mean", MASKS)
class GraphBottleneck(nn.Module):
    """VGIB in eval(): what the mask leaves out is replaced by the mean of the graph."""

    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.compressor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        h = self.encoder(x, edge_index)
        kept = torch.sigmoid(self.compressor(h))  # [num_nodes, 1]
        noisy = kept * h + (1 - kept) * global_mean_pool(h, batch)[batch]
        return self.head(global_mean_pool(keep(noisy), batch)), kept.mean()


# A weight per node, as in attention: the pool's own.
@entry("GIB: a mask of the states, nothing in its place", MASKS)
class PlainMask(GraphBottleneck):
    def forward(self, x, edge_index, batch):
        h = self.encoder(x, edge_index)
        kept = torch.sigmoid(self.compressor(h))
        return self.head(global_mean_pool(h * kept, batch)), kept.mean()


# Assignments to two classes, of which the first is the subgraph: a weight per node again.
@entry("GIB: the first of two assignments", MASKS)
class Assignment(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.assign = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        h = self.encoder(x, edge_index)
        assignment = torch.softmax(self.assign(h), dim=1)  # [num_nodes, 2]
        return self.head(global_add_pool(assignment[:, :1] * h, batch))


# --- reversible layers in forward itself


# What the convolutions consume are halves, the state is both: as many layers as convolutions.
class SplitInForward(nn.Module):
    """y1 = x1 + f(x2), y2 = x2 + g(y1), without a module for the pair."""

    def __init__(self, split):
        super().__init__()
        self.split = split
        self.embed = nn.Linear(FEATURES, 2 * WIDTH)
        self.first = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.second = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for first, second in zip(self.first, self.second, strict=True):
            x1, x2 = self.split(x)
            y1 = keep(x1 + F.relu(first(keep(x2), edge_index)))
            y2 = x2 + F.relu(second(y1, edge_index))
            x = torch.cat([y1, y2], dim=-1)
        return self.head(global_mean_pool(keep(x), batch))


add(
    "RevGNN in forward: chunk and cat", REVERSIBLE, lambda: SplitInForward(lambda x: x.chunk(2, -1))
)
add(
    "RevGNN in forward: slices and cat",
    REVERSIBLE,
    lambda: SplitInForward(lambda x: (x[:, :WIDTH], x[:, WIDTH:])),
)


@entry("RevGNN in forward, a norm before each convolution", REVERSIBLE)
class NormedSplit(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, 2 * WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x1, x2 = self.embed(x).chunk(2, dim=-1)
        for at in (0, 2):
            x1 = x1 + self.convs[at](keep(F.relu(self.norms[at](x2))), edge_index)
            x2 = x2 + self.convs[at + 1](keep(F.relu(self.norms[at + 1](x1))), edge_index)
        x = keep(torch.cat([x1, x2], dim=-1))
        return self.head(global_mean_pool(x, batch))


@entry("heads of attention, averaged for the pool alone", AFTER)
class AveragedHeads(nn.Module):
    """An aggregation lies between the last state and the pool: both are kept."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GATConv(FEATURES, WIDTH, 2), GATConv(2 * WIDTH, WIDTH, 2)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.elu(conv(x, edge_index)))
        return global_mean_pool(keep(x.view(-1, 2, WIDTH).mean(1)), batch)


class Attentive(nn.Module):
    """AttentiveFP's readout: the states are mapped in each of its steps, to the same rows."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.score, self.attend = nn.Linear(2 * WIDTH, 1), nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        molecule = global_add_pool(x, batch)
        for step in range(2):
            weight = self.score(torch.cat([molecule[batch], x], 1)).sigmoid()
            mapped = self.attend(x) if step else keep(self.attend(x))
            molecule = self.cell(global_add_pool(weight * mapped, batch), molecule)
        return molecule


add("AttentiveFP's readout in two steps", AFTER, Attentive)


@entry("half of the channels pooled by maximum, the rest by mean", AFTER)
class HalvesPooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        first, second = x.chunk(2, dim=1)
        return torch.cat([global_max_pool(first, batch), global_mean_pool(second, batch)], dim=1)
