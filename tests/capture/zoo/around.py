"""Pools by hand, kinds of layers, and what may stand between the last layer and the pool."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    ARMAConv,
    ChebConv,
    DirGNNConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    MetaLayer,
    SAGEConv,
    TAGConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import scatter, unbatch

from .branches import mlp
from .graphs import EDGE_FEATURES, FEATURES, WIDTH
from .registry import add, entry, keep
from .running import Plain

POOLS, LAYERS, LAST = "pools by hand", "kinds of layers", "around the last layer"


class PooledByHand(Plain):
    """The same layers; the pool is a function that is given."""

    def __init__(self, pool):
        super().__init__()
        self.pool = pool

    def forward(self, x, edge_index, batch):
        return self.head(self.pool(self.encode(x, edge_index), batch))


def by_one_hot(x, batch):
    members = F.one_hot(batch).to(x.dtype)  # [num_nodes, num_graphs]
    return members.t() @ x / members.sum(0).unsqueeze(-1)


def by_scatter_add(x, batch):
    pooled = x.new_zeros(int(batch.max()) + 1, x.shape[1])
    return pooled.scatter_add_(0, batch.view(-1, 1).expand_as(x), x)


def by_loop(x, batch):
    return torch.stack([x[batch == graph].mean(0) for graph in range(int(batch.max()) + 1)])


def by_padding(x, batch):
    padded = nn.utils.rnn.pad_sequence(unbatch(x, batch), batch_first=True)
    return padded.max(dim=1).values


for _name, _pool in {
    "a matrix of members": by_one_hot,
    "scatter_add_": by_scatter_add,
    "a loop over graphs": by_loop,
    "unbatch and mean": lambda x, batch: torch.stack([h.mean(0) for h in unbatch(x, batch)]),
    "pad_sequence and max": by_padding,
    "torch.segment_reduce": lambda x, batch: torch.segment_reduce(
        x, "mean", lengths=batch.bincount()
    ),
    "index_reduce": lambda x, batch: x.new_zeros(int(batch.max()) + 1, WIDTH).index_reduce(
        0, batch, x, "amax"
    ),
}.items():
    add(f"pool: {_name}", POOLS, lambda pool=_pool: PooledByHand(pool))


class Kinds(nn.Module):
    """Two layers of a kind, a ReLU after each."""

    def __init__(self, make):
        super().__init__()
        self.convs = nn.ModuleList([make(FEATURES, WIDTH), make(WIDTH, WIDTH)])

    def forward(self, x, edge_index, batch):
        keep(x)
        for conv in self.convs:
            x = keep(F.relu(conv(x, edge_index)))
        return global_mean_pool(x, batch)


class Relations(nn.Module):
    """A convolution for each kind of edge, added up."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.kinds = nn.ModuleList(GraphConv(width_in, width_out) for _ in range(2))

    def forward(self, x, edge_index):
        even = edge_index.sum(0) % 2 == 0
        parts = (edge_index[:, even], edge_index[:, ~even])
        return sum(conv(x, part) for conv, part in zip(self.kinds, parts, strict=True))


class WithAttention(GATv2Conv):
    """Returns the attention as well; the caller takes it apart."""

    def forward(self, x, edge_index):
        return super().forward(x, edge_index, return_attention_weights=True)[0]


for _name, _make in {
    "ChebConv": lambda a, b: ChebConv(a, b, K=2),
    "TAGConv": TAGConv,
    "ARMAConv": lambda a, b: ARMAConv(a, b, num_stacks=2, num_layers=2),
    "SAGEConv with a projection": lambda a, b: SAGEConv(a, b, aggr="max", project=True),
    "DirGNNConv: both directions": lambda a, b: DirGNNConv(GCNConv(a, b)),
    "a convolution for each kind of edge": Relations,
    "GATv2Conv that returns attention": WithAttention,
}.items():
    add(_name, LAYERS, lambda make=_make: Kinds(make))


class NodeModel(nn.Module):
    def __init__(self, width_in):
        super().__init__()
        self.mlp = mlp(width_in + EDGE_FEATURES + 2, WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_attr, u, batch):
        row, col = edge_index
        gathered = scatter(torch.cat([x[row], edge_attr], 1), col, dim_size=len(x), reduce="mean")
        return self.mlp(torch.cat([gathered, u[batch]], dim=1)).relu()


class GlobalModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Linear(WIDTH + 2, 2)

    def forward(self, x, edge_index, edge_attr, u, batch):
        return self.mlp(torch.cat([u, global_mean_pool(x, batch)], dim=1))


# The readout is the global state: it consumes the nodes at every layer, the last one included.
@entry("MetaLayer: globals beside the nodes", LAYERS)
class GraphNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            MetaLayer(None, NodeModel(width), GlobalModel()) for width in (FEATURES, WIDTH)
        )
        self.head = nn.Linear(2, 1)

    def forward(self, x, edge_index, edge_attr, batch):
        u = torch.zeros(int(batch.max()) + 1, 2)
        keep(x)
        for layer in self.layers:
            x, edge_attr, u = layer(x, edge_index, edge_attr, u, batch)
            keep(x)
        return self.head(u)


class LastPart(Plain):
    """Something between the last layer and the pool, as given."""

    def __init__(self, after, width=WIDTH, **modules):
        super().__init__()
        self.after, self.head = after, nn.Linear(width, 2)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for number in range(2):
            x = keep(self.layer(number, x, edge_index))
        x = self.after(self, self.convs[2](x, edge_index), edge_index)
        return self.head(global_max_pool(x, batch))


for _name, _parts in {
    # Norms, activations and dropout are the layer's, as between layers.
    "a norm, an activation and a dropout": (
        lambda self, x, e: keep(F.dropout(F.relu(self.bn(x)), 0.5, self.training)),
        WIDTH,
        {"bn": lambda: nn.BatchNorm1d(WIDTH)},
    ),
    "F.normalize": (lambda self, x, e: keep(F.normalize(x, dim=-1)), WIDTH),
    "a linear map": (
        lambda self, x, e: keep(self.lin(keep(x))),
        5,
        {"lin": lambda: nn.Linear(WIDTH, 5)},
    ),
    "an activation and a bare weight": (
        lambda self, x, e: keep(keep(x.relu()) @ self.lin.weight.t()),
        5,
        {"lin": lambda: nn.Linear(WIDTH, 5)},
    ),
    "a last layer of width 1": (
        lambda self, x, e: keep(self.conv(keep(x.relu()), e)),
        1,
        {"conv": lambda: GATConv(WIDTH, 1)},
    ),
}.items():
    add(
        f"before the pool: {_name}",
        LAST,
        lambda parts=_parts: LastPart(
            *parts[:2], **{name: make() for name, make in dict(*parts[2:]).items()}
        ),
    )


# With one layer there is nothing to compare with: weights before the pool are kept beside it.
@entry("one layer, an MLP, the pool", LAST)
class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.mlp = GCNConv(FEATURES, WIDTH), mlp(WIDTH, WIDTH, 4)

    def forward(self, x, edge_index, batch):
        x = keep(F.relu(self.conv(keep(x), edge_index)))
        return global_add_pool(keep(self.mlp(x)), batch)


@entry("one layer, an MLP per node", LAST)
class OneLayerNodes(OneLayer):
    """Without a pool the MLP is the readout."""

    def forward(self, x, edge_index):
        return self.mlp(keep(F.relu(self.conv(keep(x), edge_index))))


@entry("a linear map before each layer", LAST)
class LinearFirst(nn.Module):
    """What the convolution consumes is the mapped state; the last is pooled as it is."""

    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.convs = nn.ModuleList(GraphConv(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, edge_index, batch):
        for lin, conv in zip(self.lins, self.convs, strict=True):
            x = F.relu(conv(keep(lin(x)), edge_index))
        return global_mean_pool(keep(x), batch)
