"""Models drawn at random from common parts: what goes wrong is often a meeting of two of them.

Every part says itself what it adds to the history, so the whole is known by construction.
"""

from __future__ import annotations

import functools
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GraphNorm,
    JumpingKnowledge,
    SAGEConv,
    Set2Set,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation
from torch_geometric.utils import softmax

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, keep
from .states import sum_to_nodes

FAMILY = "drawn at random"

#: The ones the tests look at: the first, and some that were once taken wrongly.
SEEDS = (*range(18), 25, 44, 92, 105, 148, 204, 214)


class ByHand(nn.Module):
    """A layer without PyG."""

    def __init__(self):
        super().__init__()
        self.own, self.neighbours = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        gathered = sum_to_nodes(self.neighbours(x)[edge_index[0]], edge_index[1], len(x))
        return self.own(x) + gathered / 4


CONVS = {
    "hand": ByHand,
    "gcn": lambda: GCNConv(WIDTH, WIDTH),
    "sage": lambda: SAGEConv(WIDTH, WIDTH),
    "gin": lambda: GINConv(mlp(WIDTH, WIDTH, WIDTH)),
    "gat": lambda: GATConv(WIDTH, WIDTH // 2, heads=2),
}
NORMS = {
    "none": nn.Identity,
    "batch": lambda: nn.BatchNorm1d(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "graph": lambda: GraphNorm(WIDTH),
}
ACTIVATIONS = {
    "relu": F.relu,
    "elu in place": lambda x: F.elu(x, inplace=True),
    "method": lambda x: x.tanh(),
    "module": nn.LeakyReLU(),
}
LAYERS = ("plain", "residual", "before", "cat", "add", "feed", "gated", "twice", "virtual")
JOINS = ("last", "cat", "sum", "sum relu", "max", "jk max", "jk lstm", "weighted", "mean", "linear")
LASTS = ("nothing", "linear", "mlp", "atomwise")
POOLS = ("mean", "add", "mean max", "attention", "gate", "set2set", "every layer", "nodes")
SHAPES = ("one", "towers", "views", "short and long", "trunk")


class Layer(nn.Module):
    """One layer of the network with all that belongs to it."""

    def __init__(self, draw, kind, norm, activation):
        super().__init__()
        self.kind, self.act = kind, ACTIVATIONS[activation]
        self.conv, self.norm = CONVS[draw(CONVS)](), NORMS[norm]()
        self.by_graph, self.drop = norm == "graph", nn.Dropout(0.3)
        if kind in ("cat", "add"):
            self.other = CONVS[draw(CONVS)]()
        if kind == "cat":
            self.down = GCNConv(2 * WIDTH, WIDTH)
        if kind in ("feed", "virtual"):
            self.block = mlp(WIDTH, 16, WIDTH)
        if kind == "gated":
            self.gate = nn.Linear(2 * WIDTH, WIDTH)

    def finish(self, x, batch):
        return self.drop(self.act(self.norm(x, batch) if self.by_graph else self.norm(x)))

    def forward(self, x, edge_index, batch, keep_input):
        """Return the state after the layer; keep what its convolutions consume."""
        if self.kind == "before":
            given = keep(self.finish(x.clone(), batch))
            return x + self.conv(given, edge_index)
        keep_input(x)
        if self.kind == "plain":
            return self.finish(self.conv(x, edge_index), batch)
        if self.kind == "residual":
            return x + self.finish(self.conv(x, edge_index), batch)
        if self.kind == "cat":
            both = torch.cat([self.conv(x, edge_index), self.other(x, edge_index)], dim=-1)
            return self.finish(self.down(keep(both.relu()), edge_index), batch)
        if self.kind == "add":
            return self.finish(self.conv(x, edge_index) + self.other(x, edge_index), batch)
        if self.kind == "feed":
            x = x + self.finish(self.conv(x, edge_index), batch)
            return x + self.block(x)
        if self.kind == "gated":
            new = self.finish(self.conv(x, edge_index), batch)
            share = torch.sigmoid(self.gate(torch.cat([x, new], dim=-1)))
            return share * new + (1 - share) * x
        if self.kind == "twice":
            inner = keep(self.finish(self.conv(x, edge_index), batch))
            return self.finish(self.conv(inner, edge_index), batch)
        new = self.finish(self.conv(x, edge_index), batch)  # a virtual node
        return new + self.block(global_add_pool(new, batch))[batch]


class Branch(nn.Module):
    """Layers of one kind, one after the other; the caller keeps the last state."""

    def __init__(self, draw, count, kind):
        super().__init__()
        norm, activation = draw(NORMS), draw(ACTIVATIONS)
        self.layers = nn.ModuleList(Layer(draw, kind, norm, activation) for _ in range(count))
        self.last = nn.LayerNorm(WIDTH) if kind == "before" else nn.Identity()

    def forward(self, x, edge_index, batch, *, seen=False):
        """Return the states from the first on; ``seen``: the first is in the history."""
        xs = [x]
        for number, layer in enumerate(self.layers):
            keep_input = (lambda x: x) if seen and number == 0 else keep
            xs.append(layer(xs[-1], edge_index, batch, keep_input))
        xs[-1] = self.last(xs[-1])
        return xs


class Drawn(nn.Module):
    """A network of drawn parts; ``recipe`` says which."""

    def __init__(self, seed):
        super().__init__()
        source = random.Random(seed)

        def draw(options):
            return source.choice(list(options))

        kind = self.kind = draw(LAYERS)
        self.shape, self.join, self.after, self.pool = (
            draw(options) for options in (SHAPES, JOINS, LASTS, POOLS)
        )
        if kind == "before" or self.shape != "one":
            # With a residual stream the layers are fed norms of the states, so what is joined
            # would not be what is in the history; with branches it is their ends that are joined.
            self.join = "last"
        if self.pool == "every layer" and (self.join != "last" or self.after != "nothing"):
            self.pool = "mean"
        if self.pool == "every layer" and (kind == "before" or self.shape != "one"):
            self.pool = "add"
        if self.pool == "gate" and self.after == "atomwise":
            self.pool = "add"  # a gate of one number per node would be a part of it
        if self.pool == "nodes":
            # A linear map of the nodes is the readout itself, after a join as well.
            self.after, self.join = "nothing", "cat" if self.join == "linear" else self.join
        self.readings = ("",)
        if self.pool == "nodes" and self.shape != "one":
            self.readings = ("apart", "together")
        self.count = source.randint(2, 4)
        self.recipe = f"{self.shape}, {kind}, {self.join}, {self.after}, {self.pool}"
        self.embed = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU())
        counts = {"one": [self.count], "short and long": [self.count + 1, 2]}
        counts = counts.get(self.shape, [self.count, self.count])
        self.branches = nn.ModuleList(Branch(draw, count, kind) for count in counts)
        self.trunk = Branch(draw, 2, "plain") if self.shape == "trunk" else None
        self.jk = JumpingKnowledge("lstm", WIDTH, 3) if self.join == "jk lstm" else None
        self.weights = nn.Parameter(torch.rand(self.count + 1))
        self.joined = nn.Linear((self.count + 1) * WIDTH, WIDTH)
        width = WIDTH * (self.count + 1) if self.join == "cat" else WIDTH
        self.lin, self.mlp = nn.Linear(width, WIDTH), mlp(width, 16, WIDTH)
        self.atoms = mlp(width, 4, 1)
        width = {"linear": WIDTH, "mlp": WIDTH, "atomwise": 1}.get(self.after, width)
        self.gate, self.set2set = nn.Linear(width, 1), Set2Set(width, 2)
        self.attention = AttentionalAggregation(mlp(width, 4, 1))
        width *= {"mean max": 2, "set2set": 2}.get(self.pool, 1)
        self.head = nn.Linear(width * len(self.branches), 2)

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        if self.trunk is not None:
            x = self.trunk(x, edge_index, batch)[-1]
            if self.kind != "before":  # there, the branches consume norms of it
                keep(x)
        pooled = []
        for number, branch in enumerate(self.branches):
            seen = self.trunk is not None or (number > 0 and self.branches[0] is not branch)
            edges = edge_index.flip(0) if self.shape == "views" and number else edge_index
            xs = (self.branches[0] if self.shape == "views" else branch)(x, edges, batch, seen=seen)
            # Ends of branches that meet in one tensor of the nodes: apart, or as they meet.
            keep(xs[-1], *self.readings[:1])
            pooled.append(self.read_out(self.between(self.join_layers(xs)), xs, batch))
        if len(self.readings) > 1:
            return self.head(keep(torch.cat(pooled, dim=-1), "together"))
        return self.head(torch.cat(pooled, dim=-1))

    def join_layers(self, xs):
        if self.join == "last":
            return xs[-1]
        if self.join == "cat":
            return torch.cat(xs, dim=-1)
        if self.join == "jk lstm":
            joined = self.jk(xs)
        elif self.join == "jk max":
            joined = JumpingKnowledge("max")(xs)
        elif self.join == "sum":
            joined = sum(xs)
        elif self.join == "sum relu":
            joined = F.relu(xs[0] + xs[1] + xs[-1])
        elif self.join == "max":
            joined = torch.stack(xs, dim=0).max(dim=0)[0]
        elif self.join == "weighted":
            joined = sum(weight * x for weight, x in zip(self.weights, xs, strict=True))
        elif self.join == "mean":
            joined = torch.stack(xs, dim=1).mean(dim=1)
        else:
            joined = F.relu(self.joined(torch.cat(xs, dim=-1)))
        return joined if self.after != "nothing" else keep(joined)

    def between(self, x):
        """What lies between the last state (or the join) and the pool."""
        if self.after == "linear":
            return keep(self.lin(x))
        if self.after == "mlp":
            return keep(self.mlp(x))
        if self.after == "atomwise":
            return keep(self.atoms(x))
        return x

    def read_out(self, x, xs, batch):
        if self.pool == "every layer":
            return sum(global_mean_pool(each, batch) for each in xs)
        if self.pool == "mean max":
            return torch.cat([global_mean_pool(x, batch), global_max_pool(x, batch)], dim=-1)
        if self.pool == "attention":
            return self.attention(x, batch)
        if self.pool == "gate":
            return global_add_pool(softmax(self.gate(x), batch) * x, batch)
        if self.pool == "set2set":
            return self.set2set(x, batch)
        if self.pool == "nodes":
            return x
        return {"mean": global_mean_pool, "add": global_add_pool}[self.pool](x, batch)


def add_drawn(seeds) -> None:
    """Register the models of these seeds; their recipes are their names."""
    for seed in seeds:
        make = functools.partial(Drawn, seed)
        model = Drawn(seed)
        add(f"drawn {seed}: {model.recipe}", FAMILY, make, readings=model.readings)


add_drawn(SEEDS)
