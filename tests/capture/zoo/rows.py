"""What has a row per node: numbers, pairs of nodes, some of the nodes, all of a graph's tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, SAGEConv, global_add_pool, global_mean_pool
from torch_geometric.utils import scatter

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, entry, keep

NUMBERS, PAIRS, SOME = "a number per node", "pairs of nodes", "rows of some nodes"
WHOLE, ATOMS = "layers that are given a graph", "atoms in space"


class Interaction(nn.Module):
    """MACE without its products of angles: messages by distance, and a skip."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.radial, self.skip = mlp(2, 8, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, node_feats, edge_feats, edge_index):
        sender, receiver = edge_index
        messages = self.up(node_feats)[sender] * self.radial(edge_feats)
        gathered = scatter(messages, receiver, 0, len(node_feats), reduce="sum")
        return self.down(gathered), self.skip(node_feats)


class Product(nn.Module):
    def __init__(self):
        super().__init__()
        self.powers, self.linear = nn.Parameter(torch.randn(2, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, node_feats, skip):
        return self.linear(self.powers[0] * node_feats + self.powers[1] * node_feats**2) + skip


class Energies(nn.Module):
    """A readout after each layer gives a number per atom, ``[num_nodes]``."""

    def __init__(self):
        super().__init__()
        self.node_embedding = nn.Embedding(10, WIDTH)
        self.interactions = nn.ModuleList(Interaction() for _ in range(2))
        self.products = nn.ModuleList(Product() for _ in range(2))
        self.readouts = nn.ModuleList([nn.Linear(WIDTH, 1, bias=False), mlp(WIDTH, 4, 1)])
        self.scale, self.shift = nn.Parameter(torch.rand(10)), nn.Parameter(torch.rand(10))

    def energies(self, data):
        sender, receiver = data.edge_index
        distance = (data.pos[receiver] - data.pos[sender]).norm(dim=1, keepdim=True)
        edge_feats = torch.cat([distance, torch.exp(-distance)], dim=1)
        node_feats = keep(self.node_embedding(data.z))
        for interaction, product, readout in zip(
            self.interactions, self.products, self.readouts, strict=True
        ):
            node_feats = keep(product(*interaction(node_feats, edge_feats, data.edge_index)))
            yield readout(node_feats).squeeze(-1)  # [num_nodes]


# Every layer's map is pooled; the last one's is what lies between the last state and the pool.
@entry("MACE: energies of each layer, pooled", NUMBERS)
class Mace(Energies):
    def forward(self, data):
        energies = list(self.energies(data))
        keep(energies[-1].unsqueeze(-1))
        pooled = [scatter(each, data.batch, 0, reduce="sum") for each in energies]
        return torch.stack(pooled, dim=-1).sum(dim=-1)


@entry("MACE: energies added per atom, then scaled and shifted", NUMBERS)
class ScaledMace(Energies):
    def forward(self, data):
        energies = torch.stack(list(self.energies(data))).sum(dim=0)
        energies = self.scale[0] * energies + self.shift[0]  # [num_nodes]
        keep(energies.unsqueeze(-1))
        return scatter(energies, data.batch, 0, reduce="sum")


@entry("PhysNet: energies scaled and shifted by element", NUMBERS)
class PhysNet(Energies):
    def forward(self, data):
        total = 0
        for energies in self.energies(data):
            total = total + energies
        total = self.scale[data.z] * total + self.shift[data.z]  # [num_nodes]
        keep(total.unsqueeze(-1))
        return torch.zeros(data.num_graphs).index_add_(0, data.batch, total)


class TensorLayer(nn.Module):
    """A matrix for each channel of a node."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.radial = nn.Linear(2, WIDTH)

    def forward(self, x, edge_index, edge_feats):
        mapped = self.inner(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        messages = self.radial(edge_feats)[..., None, None] * mapped[edge_index[0]]
        gathered = scatter(messages, edge_index[1], 0, len(x), reduce="sum")
        product = (gathered @ mapped + mapped @ gathered).permute(0, 2, 3, 1)
        return x + self.outer(product).permute(0, 3, 1, 2)  # [num_nodes, width, 3, 3]


# Trace, antisymmetric and symmetric part are computed side by side: none of them is the state.
@entry("TensorNet: matrices as states, invariants before the pool", ATOMS)
class TensorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(10, WIDTH),
            nn.ModuleList(TensorLayer() for _ in range(2)),
        )
        self.norm, self.linear = nn.LayerNorm(3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, z, pos, edge_index, batch):
        vector = pos[edge_index[1]] - pos[edge_index[0]]
        distance, one = vector.norm(dim=1, keepdim=True), torch.eye(3)
        edge_feats = torch.cat([distance, torch.exp(-distance)], dim=1)
        around = scatter(vector[:, :, None] * vector[:, None] + one, edge_index[0], 0, len(z))
        x = keep(self.embed(z)[:, :, None, None] * around[:, None])
        for layer in self.layers:
            x = keep(layer(x, edge_index, edge_feats))
        trace = x.diagonal(dim1=-1, dim2=-2).mean(dim=-1)[..., None, None] * one
        swapped = x.transpose(-1, -2)
        parts = (trace, (x - swapped) / 2, (x + swapped) / 2 - trace)
        invariants = torch.cat([part.square().sum(dim=(-1, -2)) for part in parts], dim=-1)
        return global_add_pool(keep(self.out(F.silu(self.linear(self.norm(invariants))))), batch)


# --- pairs of nodes: as wide as there are nodes in the batch


@entry("GAE: the output is the whole adjacency", PAIRS)
class Reconstruction(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, 4)

    def forward(self, x, edge_index):
        z = keep(self.conv2(keep(F.relu(self.conv1(keep(x), edge_index))), edge_index))
        return torch.sigmoid(z @ z.t())  # [num_nodes, num_nodes]


@entry("DOMINANT: the adjacency and the features are decoded", PAIRS)
class Dominant(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder1, self.encoder2 = GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)
        self.decoder1, self.decoder2 = GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, FEATURES)
        self.structure = GCNConv(WIDTH, WIDTH)

    def forward(self, x, edge_index):
        h = keep(F.relu(self.encoder1(keep(x), edge_index)))
        h = keep(F.relu(self.encoder2(h, edge_index)))
        decoded = keep(F.relu(self.decoder1(h, edge_index)))
        decoded = keep(F.relu(self.decoder2(decoded, edge_index)))
        structure = keep(F.relu(self.structure(h, edge_index)))
        return structure @ structure.t(), decoded


@entry("similarities of all nodes beside their classes", PAIRS)
class Similarities(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(FEATURES, WIDTH), GCNConv(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, edge_index):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        unit = F.normalize(x, dim=1)
        return self.head(x), unit @ unit.t()


# The graphs cannot be changed, so nothing tells rows of twelve channels from pairs of the nodes.
@entry("an embedding of each node, as wide as there are nodes", PAIRS, data="one size")
class FixedNodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, 12), nn.Linear(12, 2)
        self.node_embedding = nn.Parameter(torch.randn(12, 12))
        self.convs = nn.ModuleList(GCNConv(12, 12) for _ in range(2))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x) + self.node_embedding)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return self.head(global_mean_pool(x, batch))


# --- rows of some nodes: a map of all rows before they are chosen is the output's own


class Chosen(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, WIDTH), SAGEConv(WIDTH, WIDTH)])
        self.head, self.rows = nn.Linear(WIDTH, 3), rows

    def forward(self, data):
        x = keep(data.x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, data.edge_index)))
        return F.log_softmax(self.head(x)[self.rows(data)], dim=-1)


add("classes of the nodes in a mask", SOME, lambda: Chosen(lambda data: data.z > 4))
add("classes of the first node of each graph", SOME, lambda: Chosen(lambda data: data.ptr[:-1]))
# As of a batch of seeds, which stand first, and their neighbours.
add("classes of the first nodes", SOME, lambda: Chosen(lambda data: slice(len(data.z) // 2)))


# --- layers that are given the graph beside the state


class GraphLayer(nn.Module):
    """torchdrug: ``layer(graph, input)``, with ``message``, ``aggregate`` and ``combine``."""

    def __init__(self, width, by_place=False):
        super().__init__()
        self.linear, self.edge_linear = nn.Linear(width, WIDTH), nn.Linear(EDGE_FEATURES, width)
        self.gate = nn.Linear(3, width) if by_place else None

    def message(self, graph, x):
        source, target = graph.edge_index
        messages = x[source] + self.edge_linear(graph.edge_attr)
        if self.gate is not None:
            messages = messages * torch.sigmoid(self.gate(graph.pos[source] - graph.pos[target]))
        return messages

    def forward(self, graph, x):
        gathered = scatter(self.message(graph, x), graph.edge_index[1], 0, graph.num_nodes)
        return F.relu(self.linear(x + gathered))


class GivenGraphs(nn.Module):
    """The graph holds positions, which a layer leaves alone or uses beside its state."""

    def __init__(self, by_place):
        super().__init__()
        widths = (FEATURES, WIDTH, WIDTH)
        self.layers = nn.ModuleList(GraphLayer(width, by_place) for width in widths)
        self.head = nn.Linear(3 * WIDTH, 2)

    def forward(self, data):
        x, states = keep(data.x), []
        for layer in self.layers:
            new = layer(data, x)
            x = keep(new + x if new.shape == x.shape else new)
            states.append(x)
        return self.head(global_mean_pool(torch.cat(states, dim=-1), data.batch))


add(
    "torchdrug: layers are given the graph, which holds positions",
    WHOLE,
    lambda: GivenGraphs(False),
)
add("layers use positions of the graph beside the state", WHOLE, lambda: GivenGraphs(True))
