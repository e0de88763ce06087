"""States on edges: bonds that pass messages, meshes, line graphs; and as many edges as nodes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, GINEConv, global_add_pool, global_mean_pool

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import entry, keep
from .states import GatedGcn, sum_to_nodes

EDGES, BONDS, LINES = "edge states", "bond messages", "line graphs"
EQUAL = "as many edges as nodes"

# Per-graph counts of the cycles are equal, so a tensor's rows do not say whose they are.
entry("GatedGCN", EDGES)(GatedGcn)
entry("GatedGCN on cycles", EQUAL, data="cycles")(GatedGcn)


class EdgesFirst(nn.Module):
    """A layer that is given and returns edge states before node states."""

    def __init__(self):
        super().__init__()
        self.edge_mlp = mlp(3 * WIDTH, WIDTH, WIDTH)
        self.node_mlp = mlp(2 * WIDTH, WIDTH, WIDTH)

    def forward(self, e, h, edge_index):
        row, col = edge_index
        e = e + self.edge_mlp(torch.cat([e, h[row], h[col]], dim=-1))  # [num_edges, width]
        gathered = sum_to_nodes(e, col, len(h))
        return e, h + self.node_mlp(torch.cat([h, gathered], dim=-1))


class MeshGraphNet(nn.Module):
    """Encode, process, decode: an output per node."""

    def __init__(self):
        super().__init__()
        self.node_encoder = mlp(FEATURES, WIDTH, WIDTH)
        self.edge_encoder = mlp(EDGE_FEATURES, WIDTH, WIDTH)
        self.processor = nn.ModuleList(EdgesFirst() for _ in range(3))
        self.decoder = mlp(WIDTH, WIDTH, 2)

    def forward(self, x, edge_index, edge_attr):
        h, e = keep(self.node_encoder(x)), self.edge_encoder(edge_attr)
        for layer in self.processor:
            e, h = layer(e, h, edge_index)
            keep(h)
        return self.decoder(h)


entry("MeshGraphNet, edges before nodes", EDGES)(MeshGraphNet)
entry("MeshGraphNet on cycles", EQUAL, data="cycles")(MeshGraphNet)


class EdgePooling(MeshGraphNet):
    """The readout pools the edges' states: no node state is read out."""

    def forward(self, x, edge_index, edge_attr, batch):
        h, e = self.node_encoder(x), self.edge_encoder(edge_attr)
        for layer in self.processor:
            e, h = layer(e, h, edge_index)
        return self.decoder(global_add_pool(e, batch[edge_index[0]]))


# Node states are consumed by every layer, yet the last one is consumed by nothing.
entry("edge states are pooled", EDGES, refused=r"edge|--layers")(EdgePooling)
entry("edge states are pooled, on cycles", EQUAL, data="cycles", refused=r"edge|--layers")(
    EdgePooling
)


class Gine(nn.Module):
    """Edge features are embedded once and given to every layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.convs = nn.ModuleList(GINEConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        x, e = keep(self.embed(x)), self.edges(edge_attr)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index, e)))
        return self.head(global_mean_pool(x, batch))


entry("GINE on cycles", EQUAL, data="cycles")(Gine)


class EdgeKeywords(Gine):
    """Edge features first, by keyword."""

    def forward(self, x, edge_index, edge_attr, batch):
        x, e = keep(self.embed(x)), self.edges(edge_attr)
        for conv in self.convs:
            x = keep(F.relu(conv(edge_attr=e, edge_index=edge_index, x=x)))
        return self.head(global_mean_pool(x, batch))


entry("GINE on cycles, edges by keyword", EQUAL, data="cycles")(EdgeKeywords)


class Dmpnn(nn.Module):
    """chemprop: hidden states live on directed bonds, the readout on atoms."""

    def __init__(self):
        super().__init__()
        self.W_i = nn.Linear(FEATURES + EDGE_FEATURES, WIDTH, bias=False)
        self.W_h = nn.Linear(WIDTH, WIDTH, bias=False)
        self.W_o = nn.Linear(FEATURES + WIDTH, WIDTH)
        self.ffn = mlp(WIDTH, WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        source, target = edge_index
        reverse = torch.arange(len(source)) ^ 1  # each bond is followed by its reverse
        keep(x)
        start = self.W_i(torch.cat([x[source], edge_attr], dim=1))  # [num_bonds, width]
        message = F.relu(start)
        for _ in range(3):
            gathered = sum_to_nodes(message, target, len(x))
            message = F.relu(start + self.W_h(gathered[source] - message[reverse]))
        gathered = sum_to_nodes(message, target, len(x))
        atoms = keep(F.relu(self.W_o(torch.cat([x, gathered], dim=1))))
        return self.ffn(global_mean_pool(atoms, batch))


# States of bonds have no row per node: refused, or the atoms' input and what is pooled.
entry("D-MPNN", BONDS, refused=r"--layers", either=True)(Dmpnn)


class CycleDmpnn(Dmpnn):
    """Without reverse bonds; there are none in a directed cycle."""

    def forward(self, x, edge_index, edge_attr, batch):
        source, target = edge_index
        keep(x)
        start = self.W_i(torch.cat([x[source], edge_attr], dim=1))  # [num_bonds, width]
        message = F.relu(start)
        for _ in range(3):
            gathered = sum_to_nodes(message, target, len(x))
            message = F.relu(start + self.W_h(gathered[source]))
        gathered = sum_to_nodes(message, target, len(x))
        atoms = keep(F.relu(self.W_o(torch.cat([x, gathered], dim=1))))
        return self.ffn(global_mean_pool(atoms, batch))


entry("D-MPNN on cycles", EQUAL, data="cycles", refused=r"--layers", either=True)(CycleDmpnn)


def line_graph(edge_index):
    """Connect each edge to those that start where it ends: ``[2, num_pairs]``."""
    source, target = edge_index
    return (target[:, None] == source[None]).nonzero().T


class BondConvolutions(nn.Module):
    """PyG convolutions on the line graph; the pool is over bonds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2 * FEATURES + EDGE_FEATURES, WIDTH)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        source, target = edge_index
        e = self.embed(torch.cat([x[source], x[target], edge_attr], dim=1))
        lines = line_graph(edge_index)
        for conv in self.convs:
            e = F.relu(conv(e, lines))
        return self.head(global_mean_pool(e, batch[source]))


_ON_EDGES = r"(edge|bond|rows).*--layers"
entry("convolutions on the line graph", LINES, refused=_ON_EDGES)(BondConvolutions)
entry("convolutions on the line graph of cycles", EQUAL, data="cycles", refused=_ON_EDGES)(
    BondConvolutions
)


class Alignn(nn.Module):
    """ALIGNN: bonds are updated on the line graph, then atoms with the bonds' states."""

    def __init__(self):
        super().__init__()
        self.embed, self.edges = nn.Linear(FEATURES, WIDTH), nn.Linear(EDGE_FEATURES, WIDTH)
        self.line_convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(2))
        self.atom_convs = nn.ModuleList(GINEConv(mlp(WIDTH, WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        x, e, lines = keep(self.embed(x)), self.edges(edge_attr), line_graph(edge_index)
        for line_conv, atom_conv in zip(self.line_convs, self.atom_convs, strict=True):
            e = F.silu(line_conv(e, lines))
            x = keep(x + F.silu(atom_conv(x, edge_index, e)))
        return self.head(global_mean_pool(x, batch))


# The readout descends from atoms alone; that layers on bonds ran too may be a reason to refuse.
entry("ALIGNN: bonds on the line graph, then atoms", LINES, refused=_ON_EDGES, either=True)(Alignn)
entry("ALIGNN on cycles", EQUAL, data="cycles", refused=_ON_EDGES, either=True)(Alignn)
