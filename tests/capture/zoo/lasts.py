"""Between the last layer and the pool: atom-wise outputs, jumping knowledge, reversible blocks."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    GCNConv,
    GINConv,
    GroupAddRev,
    JumpingKnowledge,
    LGConv,
    SAGEConv,
    SchNet,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.models import GIN, NeuralFingerprint

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep, recording

ATOMWISE, JUMPING, REVERSIBLE = "atom-wise output", "jumping knowledge", "reversible"
AFTER = "after the last layer"


def schnet_by_hand(model, data):
    edge_index, distance = model.interaction_graph(data.pos, data.batch)
    smeared = model.distance_expansion(distance)
    history = [model.embedding(data.z)]
    for block in model.interactions:
        history.append(history[-1] + block(history[-1], edge_index, distance, smeared))
    return [*history, model.lin2(model.act(model.lin1(history[-1])))]


class AllPairs(nn.Module):
    """Edges within a radius without torch-cluster."""

    def forward(self, pos, batch):
        near = (batch[:, None] == batch[None]) & ~torch.eye(len(pos), dtype=torch.bool)
        row, col = near.nonzero().T
        return torch.stack([row, col]), (pos[row] - pos[col]).norm(dim=-1)


def make_schnet():
    return SchNet(WIDTH, WIDTH, num_interactions=3, num_gaussians=6, interaction_graph=AllPairs())


add("SchNet", ATOMWISE, make_schnet, by_hand=schnet_by_hand)


def fingerprint_by_hand(model, data):
    history, pooled = [data.x], []
    for conv, lin in zip(model.convs, model.lins, strict=True):
        history.append(conv(history[-1], data.edge_index).sigmoid())
        pooled.append(lin(history[-1]).softmax(dim=-1))
    return [*history, pooled[-1]]


# Every layer is pooled after a map of its own; the last one's is what lies between the last layer
# and the pool. Keeping every map would hold no other state.
add(
    "neural fingerprints",
    ATOMWISE,
    lambda: NeuralFingerprint(FEATURES, WIDTH, out_channels=5, num_layers=3),
    by_hand=fingerprint_by_hand,
)


@entry("neural fingerprints, added per atom", ATOMWISE)
class FingerprintByAtom(nn.Module):
    """The older style: the contributions of all layers are added up per atom, then pooled."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.outputs = nn.ModuleList(nn.Linear(WIDTH, 6) for _ in range(2))

    def forward(self, x, edge_index, batch):
        keep(x)
        fingerprint = 0
        for hidden, output in zip(self.hidden, self.outputs, strict=True):
            x = keep(torch.sigmoid(hidden(x, edge_index)))
            fingerprint = fingerprint + torch.softmax(output(x), dim=-1)
        return global_add_pool(keep(fingerprint), batch)


@entry("a per-node MLP before the pool", ATOMWISE)
class MlpBeforePool(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.mlp = mlp(WIDTH, 16, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_mean_pool(keep(self.mlp(x)), batch))


@entry("atomic energies of width 1", ATOMWISE)
class AtomicEnergies(MlpBeforePool):
    def __init__(self):
        super().__init__()
        self.mlp = mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv in self.convs:
            x = keep(F.silu(conv(x, edge_index)))
        return global_add_pool(keep(self.mlp(x)), batch).squeeze(-1)


class Jumping(nn.Module):
    """Three GIN layers, and a way to join them that is given."""

    def __init__(self, join, width=WIDTH, **modules):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(GINConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(3))
        self.head = nn.Linear(width, 2)
        self.join = join
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index, batch):
        xs = [keep(self.embed(x))]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            xs.append(keep(F.relu(norm(conv(xs[-1], edge_index)))))
        return self.head(global_add_pool(self.join(self, xs), batch))


def add_in_a_loop(self, xs):
    """OGB: ``node_representation += h_list[layer]``."""
    total = 0
    for x in xs:
        total += x
    return keep(total)


def max_of_unsqueezed(self, xs):
    """pretrain-gnns: each layer gets a first dimension for ``cat`` to go along."""
    return keep(torch.max(torch.cat([x.unsqueeze(0) for x in xs], dim=0), dim=0)[0])


def weighted_sum(self, xs):
    """GPR-GNN, DAGNN: a learned number per layer."""
    return keep(sum(weight * x for weight, x in zip(self.weights.weight[0], xs, strict=True)))


def attended(self, xs):
    """A softmax over the layers of each node."""
    stacked = torch.stack(xs, dim=1)  # [num_nodes, num_layers, width]
    weight = torch.softmax(self.score(stacked), dim=1)  # [num_nodes, num_layers, 1]
    return keep((weight * stacked).sum(dim=1))


#: How layers are joined: a function, the width of its result, modules it needs.
JOINS = {
    "JK by cat": (lambda self, xs: torch.cat(xs[1:], dim=-1), 3 * WIDTH),
    "JK by cat with the input": (lambda self, xs: torch.cat(xs, dim=-1), 4 * WIDTH),
    "JK by +": (lambda self, xs: keep(xs[1] + xs[2] + xs[3]), WIDTH),
    "JK by += in a loop": (add_in_a_loop, WIDTH),
    "JK by sum of a list": (lambda self, xs: keep(sum(xs)), WIDTH),
    "JK by stack and sum": (lambda self, xs: keep(torch.stack(xs).sum(dim=0)), WIDTH),
    "JK by stack and max": (lambda self, xs: keep(torch.stack(xs, -1).max(-1).values), WIDTH),
    "JK by cat of unsqueezed and max": (max_of_unsqueezed, WIDTH),
    "JK by maximum": (lambda self, xs: keep(torch.maximum(xs[1], xs[3])), WIDTH),
    "JK by mean of a stack": (lambda self, xs: keep(torch.stack(xs).mean(0)), WIDTH),
    "JK by learned weights": (weighted_sum, WIDTH, {"weights": lambda: nn.Linear(4, 1)}),
    "JK by attention": (attended, WIDTH, {"score": lambda: nn.Linear(WIDTH, 1)}),
    # The concatenation repeats what is there, the map of it is new: weights before the pool.
    "JK by cat and a linear map": (
        lambda self, xs: keep(F.relu(self.lin(torch.cat(xs, dim=-1)))),
        WIDTH,
        {"lin": lambda: nn.Linear(4 * WIDTH, WIDTH)},
    ),
    "JumpingKnowledge cat": (
        lambda self, xs: self.jk(xs),
        4 * WIDTH,
        {"jk": lambda: JumpingKnowledge("cat")},
    ),
    "JumpingKnowledge max": (
        lambda self, xs: keep(self.jk(xs)),
        WIDTH,
        {"jk": lambda: JumpingKnowledge("max")},
    ),
    "JumpingKnowledge lstm": (
        lambda self, xs: keep(self.jk(xs)),
        WIDTH,
        {"jk": lambda: JumpingKnowledge("lstm", WIDTH, 3)},
    ),
}


def make_jumping(join, width, modules=None):
    return Jumping(join, width, **{name: make() for name, make in (modules or {}).items()})


for _name, _parts in JOINS.items():
    add(_name, JUMPING, functools.partial(make_jumping, *_parts))


@entry("PyG's GIN with jk=max, then a pool", JUMPING)
class PooledJumping(nn.Module):
    """What is pooled is a linear map of the maximum over layers."""

    def __init__(self):
        super().__init__()
        self.gnn = GIN(FEATURES, WIDTH, num_layers=3, out_channels=5, jk="max")

    def forward(self, x, edge_index, batch):
        if recording():
            xs = [keep(x)]
            for conv, norm in zip(self.gnn.convs, self.gnn.norms, strict=True):
                xs.append(keep(self.gnn.act(norm(conv(xs[-1], edge_index)))))
        return global_add_pool(keep(self.gnn(x, edge_index)), batch)


class RevBlock(nn.Module):
    """OGB's RevGNN: norm, activation, dropout, convolution on a group of the channels."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), SAGEConv(width, width)

    def forward(self, x, edge_index):
        return self.conv(F.dropout(self.norm(x).relu(), 0.1, self.training), edge_index)


# A block is reversible because each half of the channels sees the other: the state is all of them.
# The convolutions inside consume halves, one after the other: layers by the letter, with the full
# state at the end; as good as blocks, and not required.
@entry("GroupAddRev blocks", REVERSIBLE, either=True, readings=("blocks", "halves"))
class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(
            GroupAddRev(RevBlock(WIDTH // 2), num_groups=2) for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.lin2 = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, batch):
        x = keep(self.lin1(x), "blocks")
        for number, block in enumerate(self.blocks):
            if recording():
                self.halves(block, x, edge_index)
            x = block(x, edge_index)
            if number == 0:
                keep(x, "blocks")
        return self.lin2(global_mean_pool(keep(self.norm(x).relu()), batch))

    def halves(self, block, x, edge_index):
        """y1 = x1 + f1(x2), y2 = x2 + f2(y1); what the convolutions of f1 and f2 consume."""
        x1, x2 = x.chunk(2, dim=-1)
        first, second = block.convs
        keep(first.norm(x2).relu(), "halves")
        keep(second.norm(x1 + first(x2, edge_index)).relu(), "halves")


# --- rows that are wider than the last layer's


class TwoLayers(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.out = nn.Linear(out, 3)

    def encode(self, x, edge_index):
        keep(x)
        for conv in self.convs:
            x = keep(conv(x, edge_index).tanh())
        return x


@entry("a graph's maximum beside each node, then an output per node", AFTER)
class BesideTheGraph(TwoLayers):
    def __init__(self):
        super().__init__(2 * WIDTH)

    def forward(self, x, edge_index, batch):
        x = self.encode(x, edge_index)
        return self.out(torch.cat([x, global_max_pool(x, batch)[batch]], dim=1))


# The exponential and its temperature are the pool's own, as in a mean of powers.
@entry("soft bins of each channel, pooled", AFTER, readings=("distances", "bins"))
class SoftBins(TwoLayers):
    def __init__(self):
        super().__init__(4 * WIDTH)
        self.register_buffer("centres", torch.linspace(-1, 1, 4))

    def forward(self, x, edge_index, batch):
        x = self.encode(x, edge_index)
        distances = -((x.unsqueeze(2) - self.centres) ** 2)  # [num_nodes, width, 4]
        bins = keep((keep(distances, "distances") / 0.1).exp().flatten(1), "bins")
        return self.out(global_add_pool(bins, batch))


@entry("LightGCN: a mean of all layers, each divided by their number", JUMPING)
class LightGcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(LGConv() for _ in range(3))

    def forward(self, x, edge_index):
        x = keep(self.embed(x))
        mean = x / 4
        for conv in self.convs:
            x = keep(conv(x, edge_index))
            mean = mean + x / 4
        return self.out(keep(mean))


class ByType(TwoLayers):
    """What an atom gives depends on its type."""

    def __init__(self):
        super().__init__(WIDTH)
        self.maps, self.vectors = nn.Parameter(torch.randn(10, WIDTH, 2)), nn.Embedding(10, WIDTH)

    def forward(self, x, z, edge_index, batch):
        return global_add_pool(keep(self.read(self.encode(x, edge_index), z)), batch)


_READ = {
    "a map of weights": lambda self, x, z: torch.bmm(x.unsqueeze(1), self.maps[z]).squeeze(1),
    "a vector of weights": lambda self, x, z: (x * self.vectors(z)).sum(1, keepdim=True),
    "a vector of weights, by einsum": lambda self, x, z: torch.einsum(
        "nd,nd->n", x, self.vectors(z)
    ).unsqueeze(1),
}
for _name, _read in _READ.items():
    add(f"{_name} for each type of atom", AFTER, type("ByTypeOf", (ByType,), {"read": _read}))


# A gate per channel is no weight of a node: what is pooled is another tensor than the state.
@entry("a gate of each channel, by the target's sequence", AFTER, data="targets")
class GatedByTarget(TwoLayers):
    def __init__(self):
        super().__init__(WIDTH)
        self.letters, self.gate = nn.Embedding(26, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch, target):
        gate = torch.sigmoid(self.gate(self.letters(target).mean(1)))  # [num_graphs, width]
        x = self.encode(x, edge_index)
        return self.out(global_mean_pool(keep(x * gate[batch]), batch))
