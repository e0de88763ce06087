"""Branches that part, meet and exchange; graphs that get more rows than nodes."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool, global_mean_pool

from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep
from .running import Plain

MEETING, MORE = "branches that meet", "more rows than nodes"
WEIGHTS = "weights of experts, nodes and channels"


@entry("a trunk, then a tower for each task", MEETING)
class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.towers = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.trunk:
            x = keep(F.relu(conv(x, edge_index)))
        outputs = []
        for tower, head in zip(self.towers, self.heads, strict=True):
            outputs.append(head(global_mean_pool(keep(F.relu(tower(x, edge_index))), batch)))
        return torch.cat(outputs, dim=1)


# Each branch consumes a sum of both: the sums are what the layers consume.
@entry("towers that exchange after each layer", MEETING)
class CrossStitch(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.left = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))
        self.right = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x, edge_index, batch):
        a = b = keep(self.embed(x))
        for left, right in zip(self.left, self.right, strict=True):
            new_a, new_b = left(a, edge_index).relu(), right(b, edge_index).relu()
            a, b = keep(0.7 * new_a + 0.3 * new_b), keep(0.3 * new_a + 0.7 * new_b)
        return self.head(torch.cat([global_add_pool(a, batch), global_add_pool(b, batch)], dim=1))


# The same atoms before and after a reaction: two branches, and their difference is pooled.
@entry("reactant and product, the difference pooled", MEETING, data="views")
class Reaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def encode(self, x, edge_index):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu())
        return x

    def forward(self, data):
        before = self.encode(data.x, data.edge_index)
        after = self.encode(data.x2, data.edge_index2)
        return self.head(global_add_pool(keep(after - before), data.batch))


# In eval no edge is dropped, so both views hold the same numbers; they are two runs all the same.
@entry("two augmented views that are one in eval", MEETING, readings=("twice", "once"))
class Augmented(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.project = nn.Linear(WIDTH, 4)

    def encode(self, x, edge_index, batch, *readings):
        for conv in self.convs:
            x = keep(conv(x, edge_index).relu(), *readings)
        return self.project(global_add_pool(x, batch))

    def forward(self, x, edge_index, batch):
        keep(x)
        return self.encode(x, edge_index, batch), self.encode(x, edge_index, batch, "twice")


@entry("BGRL: an encoder and its slow copy", MEETING)
class SlowCopy(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = Plain(), Plain()
        self.predictor = nn.Linear(2, 2)

    def forward(self, x, edge_index, batch):
        prediction = self.predictor(self.online(x, edge_index, batch))
        with torch.no_grad():
            target = self.target(x, edge_index, batch)
        return prediction, target


# The last layer feeds an output of nodes alone; the graph's output ends a layer earlier.
@entry("an auxiliary layer for nodes after the readout", MEETING, readings=("graphs", "all"))
class Auxiliary(Plain):
    def __init__(self):
        super().__init__()
        self.extra = GCNConv(WIDTH, 3)

    def forward(self, x, edge_index, batch):
        h = self.encode(x, edge_index)
        out = self.head(global_mean_pool(h, batch))
        return out, keep(self.extra(h, edge_index), "all")


@entry("an autoencoder with layers in its decoder", MEETING)
class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [FEATURES, WIDTH, 4, WIDTH, FEATURES]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, x, edge_index):
        keep(x)
        for conv in self.convs[:-1]:
            x = keep(conv(x, edge_index).relu())
        return keep(self.convs[-1](x, edge_index))


class WithVirtual(nn.Module):
    """Virtual nodes are rows of their own, after those of the nodes."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)
        self.virtual = nn.Parameter(torch.randn(1, WIDTH))
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, edge_index, batch):
        num_nodes, num_graphs = len(x), int(batch.max()) + 1
        x = torch.cat([self.embed(x), self.virtual.expand(num_graphs, -1)])
        links = torch.stack([torch.arange(num_nodes), num_nodes + batch])
        edge_index = torch.cat([edge_index, links, links.flip(0)], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.head(x[num_nodes:])


_ROWS = r"rows.*--layers|--layers"
add("virtual nodes as rows, read out", MORE, WithVirtual, refused=_ROWS)


@entry("virtual nodes as rows, the nodes pooled", MORE, refused=_ROWS, either=True)
class VirtualNodesPooled(WithVirtual):
    def forward(self, x, edge_index, batch):
        num_nodes, num_graphs = len(x), int(batch.max()) + 1
        x = torch.cat([self.embed(x), self.virtual.expand(num_graphs, -1)])
        keep(x[:num_nodes])
        links = torch.stack([torch.arange(num_nodes), num_nodes + batch])
        edge_index = torch.cat([edge_index, links, links.flip(0)], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
            keep(x[:num_nodes])
        return self.head(global_mean_pool(x[:num_nodes], batch))


# Two copies of each graph, with another mark: rows are of copies, not of nodes.
@entry("DropGNN: copies of each graph", MORE, refused=_ROWS)
class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        num_nodes = len(x)
        x = torch.cat([x, -x])  # [2 * num_nodes, features]
        edge_index = torch.cat([edge_index, edge_index + num_nodes], dim=1)
        for conv in self.convs:
            x = F.relu(conv(x, edge_index))
        return self.head(global_mean_pool(x.view(2, num_nodes, -1).mean(0), batch))


# --- weights of experts, layers, nodes and channels


class Weighed(nn.Module):
    """Three layers, and a way to make an output of their states, the embedded input among them."""

    def __init__(self, **modules):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        for name, module in modules.items():
            setattr(self, name, module)

    def states(self, x, edge_index):
        xs = [keep(self.embed(x))]
        for conv in self.convs:
            xs.append(keep(conv(xs[-1], edge_index).relu()))
        return xs

    def pool(self, x, batch):
        return self.head(global_add_pool(keep(x), batch))


# All nodes of a probe may be routed to one expert: the zeros they are written into are no state.
@entry("experts: each node is written by the one it is routed to", WEIGHTS)
class Routed(Weighed):
    def __init__(self):
        super().__init__(gates=nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3)))
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.gates[2].bias.data[0] += 100

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for number, (conv, gate) in enumerate(zip(self.convs, self.gates, strict=True)):
            x = conv(x, edge_index).relu()
            weight, chosen = gate(x).softmax(-1).max(-1)
            written = torch.zeros_like(x)
            for at in range(2):
                rows = chosen == at
                written[rows] = weight[rows, None] * self.experts[2 * number + at](x[rows])
            x = keep(x + written)
        return self.head(global_add_pool(x, batch))


@entry("experts: two for each node, added up by index_add_", WEIGHTS)
class TwoRoutes(Routed):
    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for number, (conv, gate) in enumerate(zip(self.convs, self.gates, strict=True)):
            x = x + conv(x, edge_index).relu()
            weights, chosen = gate(x).softmax(-1).topk(2, -1)  # [num_nodes, 2]
            added = torch.zeros_like(x)
            for at in range(2):
                row, place = torch.where(chosen == at)
                answer = self.experts[2 * number + at](x[row])
                added.index_add_(0, row, answer * weights[row, place, None])
            x = keep(x + added)
        return self.head(global_add_pool(x, batch))


@entry("layers weighed per node, by the raw features", WEIGHTS)
class RawGate(Weighed):
    def __init__(self):
        super().__init__(gate=nn.Linear(FEATURES, 4))

    def forward(self, x, edge_index, batch):
        weight = self.gate(x).softmax(-1)  # [num_nodes, 4]
        xs = self.states(x, edge_index)
        return self.pool(sum(weight[:, i : i + 1] * h for i, h in enumerate(xs)), batch)


# A skip connection would leave the last state as it is.
@entry("two of the layers weighed per node", WEIGHTS)
class TwoWeighed(RawGate):
    def forward(self, x, edge_index, batch):
        weight = self.gate(x).sigmoid()
        _, first, _, last = self.states(x, edge_index)
        return self.pool(weight[:, :1] * first + weight[:, 1:2] * last, batch)


@entry("one of two layers is chosen for each node", WEIGHTS)
class Chosen(RawGate):
    def forward(self, x, edge_index, batch):
        weight = self.gate(x)
        _, first, _, last = self.states(x, edge_index)
        return self.pool(torch.where(weight[:, :1] > 0, last, first), batch)


@entry("adaptive halting: what remains for a layer weighs its state", WEIGHTS)
class Halting(Weighed):
    def __init__(self):
        super().__init__(halt=nn.Linear(WIDTH, 1))

    def forward(self, x, edge_index, batch):
        left, total = torch.ones(len(x), 1), 0
        _, *rest, last = self.states(x, edge_index)
        for h in rest:
            weight = left * self.halt(h).sigmoid()
            total, left = total + weight * h, left - weight
        return self.pool(total + left * last, batch)


@entry("two towers, mixed per node by the raw features", WEIGHTS)
class MixedTowers(Weighed):
    def __init__(self):
        super().__init__(gate=nn.Linear(FEATURES, 2))
        self.towers = nn.ModuleList(
            nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(2)) for _ in range(2)
        )

    def forward(self, x, edge_index, batch):
        weight, start, mixed = self.gate(x).softmax(-1), keep(self.embed(x)), 0
        for number, tower in enumerate(self.towers):
            h = start
            for conv in tower:
                h = keep(conv(h, edge_index).relu())
            mixed = mixed + weight[:, number, None] * h
        return self.pool(mixed, batch)


# The next layer is given the product, so that is the state.
@entry("layers times a number each, then their sum", WEIGHTS)
class ScaledLayers(Weighed):
    def __init__(self):
        super().__init__(scale=nn.Parameter(torch.rand(3) + 0.5))

    def forward(self, x, edge_index, batch):
        xs = [keep(self.embed(x))]
        for scale, conv in zip(self.scale, self.convs, strict=True):
            xs.append(keep(scale * conv(xs[-1], edge_index).relu()))
        return self.pool(sum(xs), batch)


@entry("a weight per layer and channel", WEIGHTS)
class ChannelWeights(Weighed):
    def __init__(self):
        super().__init__(weight=nn.Parameter(torch.rand(4, WIDTH)))

    def forward(self, x, edge_index, batch):
        xs = self.states(x, edge_index)
        return self.pool(sum(w * h for w, h in zip(self.weight, xs, strict=True)), batch)


class Scale(nn.Module):
    """An RMSNorm that is not called one."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.scale * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


@entry("a scale of channels before the pool, as a module", WEIGHTS)
class LastScale(Weighed):
    def __init__(self):
        super().__init__(scale=Scale())

    def forward(self, x, edge_index, batch):
        return self.pool(self.scale(self.states(x, edge_index)[-1]), batch)


@entry("a norm before the pool, as a function", WEIGHTS)
class FunctionalNorm(Weighed):
    def __init__(self):
        super().__init__(scale=nn.Parameter(torch.rand(WIDTH) + 0.5))

    def forward(self, x, edge_index, batch):
        last = self.states(x, edge_index)[-1]
        return self.pool(F.layer_norm(last, (WIDTH,), self.scale), batch)


@entry("raw features beside every state", WEIGHTS)
class RawBeside(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [FEATURES, WIDTH + FEATURES, WIDTH + FEATURES]
        self.convs = nn.ModuleList(GCNConv(width, WIDTH) for width in widths)
        self.out = nn.Linear(WIDTH + FEATURES, 5)

    def states(self, x, edge_index):
        raw = keep(x)
        for conv in self.convs:
            x = keep(torch.cat([conv(x, edge_index).relu(), raw], dim=-1))
        return x

    def forward(self, x, edge_index, batch):
        return self.out(global_mean_pool(self.states(x, edge_index), batch))


@entry("raw features beside every state, a map before the pool", WEIGHTS)
class RawBesideThenMap(RawBeside):
    def forward(self, x, edge_index, batch):
        return global_mean_pool(keep(self.out(self.states(x, edge_index))), batch)


@entry("raw features beside every state, a map per node", WEIGHTS)
class RawBesidePerNode(RawBeside):
    def forward(self, x, edge_index):
        return self.out(self.states(x, edge_index))
