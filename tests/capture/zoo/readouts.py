"""Readouts, norms and loops around ordinary layers: what is the layer's, what is the readout's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    DeepGCNLayer,
    GatedGraphConv,
    GCNConv,
    GraphConv,
    GraphNorm,
    InstanceNorm,
    PairNorm,
    SAGEConv,
    Set2Set,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import (
    AttentionalAggregation,
    GraphMultisetTransformer,
    MultiAggregation,
    SoftmaxAggregation,
    SortAggregation,
)
from torch_geometric.utils import softmax, to_dense_batch

from .branches import mlp
from .graphs import FEATURES, WIDTH
from .registry import add, entry, keep

READOUTS, NORMS, LOOPS = "readouts", "norms and residuals", "recurrent"


class Stack(nn.Module):
    """Three layers and a readout that is given."""

    def __init__(self, readout, width=WIDTH, **modules):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.readout, self.head = readout, nn.Linear(width, 2)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index, batch):
        xs = [keep(self.embed(x))]
        for conv in self.convs:
            xs.append(keep(F.elu(conv(xs[-1], edge_index))))
        return self.head(self.readout(self, xs, batch))


def gate_by_hand(self, xs, batch):
    return global_add_pool(softmax(self.gate(xs[-1]), batch) * xs[-1], batch)


def sigmoid_gate(self, xs, batch):
    return global_add_pool(torch.sigmoid(self.gate(xs[-1])) * xs[-1], batch)


def gated_sum(self, xs, batch):
    """Gated graph networks: a gate and a map of the last state (and of the input)."""
    gate = torch.sigmoid(self.gate(torch.cat([xs[-1], xs[0]], dim=-1)))  # [num_nodes, width]
    mapped = keep(torch.tanh(self.map(xs[-1])), "mapped")
    return global_add_pool(keep(gate * mapped, "gated"), batch)


def layers_pooled(self, xs, batch):
    return sum(lin(global_add_pool(x, batch)) for lin, x in zip(self.lins, xs, strict=True))


def first_nodes(self, xs, batch):
    """A master node, or the root of a neighbourhood: one node of each graph is read out."""
    start = torch.cat([batch.new_ones(1), batch.diff()]).nonzero().flatten()  # [num_graphs]
    return xs[-1][start]


def sorted_nodes(self, xs, batch):
    """DGCNN: all layers concatenated, the first k of the sorted nodes, a 1-d convolution."""
    rows = self.sort(torch.cat(xs, dim=-1), batch)  # [num_graphs, k * 4 * width]
    return self.conv1d(rows.unsqueeze(1)).mean(dim=-1)


def transformer_readout(self, xs, batch):
    dense, mask = to_dense_batch(xs[-1], batch)  # [num_graphs, most_nodes, width]
    return self.encoder(dense, src_key_padding_mask=~mask).masked_fill(~mask[..., None], 0).sum(1)


#: A readout, the width of its result, modules it needs, the readings of its history.
KINDS = {
    "mean": (lambda self, xs, batch: global_mean_pool(xs[-1], batch), WIDTH),
    "mean and max": (
        lambda self, xs, batch: torch.cat(
            [global_mean_pool(xs[-1], batch), global_max_pool(xs[-1], batch)], dim=-1
        ),
        2 * WIDTH,
    ),
    "AttentionalAggregation": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        WIDTH,
        {"pool": lambda: AttentionalAggregation(nn.Linear(WIDTH, 1))},
    ),
    # The map inside the aggregation is a part of that module, which consumes the state.
    "AttentionalAggregation with a map": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        5,
        {"pool": lambda: AttentionalAggregation(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5))},
    ),
    # The weights of nodes are the readout's; what they weigh is the state.
    "softmax gate by hand": (gate_by_hand, WIDTH, {"gate": lambda: mlp(WIDTH, 4, 1)}),
    "sigmoid gate by hand": (sigmoid_gate, WIDTH, {"gate": lambda: nn.Linear(WIDTH, 1)}),
    # What is pooled is new; whether with its gate or before it is a matter of taste.
    "gated sum of a map": (
        gated_sum,
        WIDTH,
        {"gate": lambda: nn.Linear(2 * WIDTH, WIDTH), "map": lambda: nn.Linear(WIDTH, WIDTH)},
        ("gated", "mapped"),
    ),
    "every layer pooled, then mapped": (
        layers_pooled,
        2,
        {"lins": lambda: nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(4))},
    ),
    "Set2Set": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        2 * WIDTH,
        {"pool": lambda: Set2Set(WIDTH, processing_steps=2)},
    ),
    "several aggregations": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        3 * WIDTH,
        {"pool": lambda: MultiAggregation(["mean", "max", SoftmaxAggregation(learn=True)])},
    ),
    "GraphMultisetTransformer": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        WIDTH,
        {"pool": lambda: GraphMultisetTransformer(WIDTH, k=2, heads=2)},
    ),
    "SortAggregation and a convolution": (
        sorted_nodes,
        3,
        {
            "sort": lambda: SortAggregation(k=3),
            "conv1d": lambda: nn.Conv1d(1, 3, 4 * WIDTH, 4 * WIDTH),
        },
    ),
    "the first node of each graph": (first_nodes, WIDTH),
    "a transformer over the last states": (
        transformer_readout,
        WIDTH,
        {
            "encoder": lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
                1,
                enable_nested_tensor=False,
            )
        },
    ),
}


def make_stack(readout, width, modules=None, readings=None):
    return Stack(readout, width, **{name: make() for name, make in (modules or {}).items()})


for _name, _parts in KINDS.items():
    add(
        f"readout: {_name}",
        READOUTS,
        lambda parts=_parts: make_stack(*parts),
        readings=_parts[3] if len(_parts) > 3 else ("",),
    )


class Normed(nn.Module):
    """Residuals, with a norm after (post) or before (pre) each convolution."""

    def __init__(self, norm, pre=False):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
        self.norms = nn.ModuleList(norm() for _ in range(4))
        self.pre, self.by_graph = pre, "batch" in norm().forward.__code__.co_varnames

    def norm(self, number, x, batch):
        return self.norms[number](x, batch) if self.by_graph else self.norms[number](x)

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        if not self.pre:
            keep(x)
        for number, conv in enumerate(self.convs):
            if self.pre:
                x = x + conv(keep(F.relu(self.norm(number, x, batch))), edge_index)
            else:
                x = keep(F.relu(self.norm(number, x + conv(x, edge_index), batch)))
        if self.pre:
            x = keep(self.norm(3, x, batch))
        return self.head(global_add_pool(x, batch))


for _name, _make in {
    "LayerNorm after": lambda: Normed(lambda: nn.LayerNorm(WIDTH)),
    "LayerNorm before, and once at the end": lambda: Normed(lambda: nn.LayerNorm(WIDTH), pre=True),
    "PairNorm": lambda: Normed(PairNorm),
    "GraphNorm": lambda: Normed(lambda: GraphNorm(WIDTH)),
    "InstanceNorm before": lambda: Normed(lambda: InstanceNorm(WIDTH), pre=True),
}.items():
    add(_name, NORMS, _make)


# A residual stream that is pooled as it is: the norm stands before convolutions alone.
@entry("LayerNorm before, the stream is pooled", NORMS)
class PreNormStream(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(
            DeepGCNLayer(GraphConv(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), dropout=0.1)
            for _ in range(3)
        )

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for layer in self.layers:
            keep(F.relu(layer.norm(x)))
            x = layer(x, edge_index)
        return self.head(global_mean_pool(keep(x), batch))


# The feed-forward block belongs to the layer: there is one after each.
@entry("feed-forward blocks after each layer", NORMS)
class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(mlp(WIDTH, 16, WIDTH) for _ in range(3))

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for conv, block in zip(self.convs, self.blocks, strict=True):
            x = x + F.relu(conv(x, edge_index))
            x = keep(x + block(x))
        return self.head(global_add_pool(x, batch))


@entry("feed-forward blocks after all layers but the first", NORMS)
class FeedForwardAfterStem(FeedForward):
    """A plain stem: the block after the last layer has its like after the one before."""

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        x = keep(F.relu(self.convs[0](x, edge_index)))
        for conv, block in zip(self.convs[1:], self.blocks[1:], strict=True):
            x = x + F.relu(conv(x, edge_index))
            x = keep(x + block(x))
        return self.head(global_add_pool(x, batch))


@entry("one convolution, three times", LOOPS)
class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.conv = GraphConv(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        x = keep(self.embed(x))
        for _ in range(3):
            x = keep(torch.tanh(self.conv(x, edge_index)))
        return self.head(global_mean_pool(x, batch))


# One module, whose steps are inside it; `--layers steps` takes them apart.
@entry("GatedGraphConv", LOOPS)
class GatedGraph(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = GatedGraphConv(WIDTH, num_layers=3), nn.Linear(WIDTH, 2)

    def forward(self, x, edge_index, batch):
        x = keep(F.relu(self.conv(keep(x), edge_index)))
        return self.head(global_mean_pool(x, batch))


@entry("a GRU cell around one convolution", LOOPS)
class GruLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.conv, self.cell = GCNConv(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = keep(torch.tanh(self.embed(x)))
        for _ in range(4):
            h = keep(self.cell(self.conv(h, edge_index), h))
        return self.head(global_add_pool(h, batch))


# A cell of an LSTM is a state beside the hidden one; the readout descends from the hidden one.
@entry("an LSTM cell around one convolution", LOOPS)
class LstmLoop(GruLoop):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        h = keep(torch.tanh(self.embed(x)))
        c = torch.zeros_like(h)
        for _ in range(3):
            h, c = self.cell(self.conv(h, edge_index), (h, c))
            keep(h)
        return self.head(global_add_pool(h, batch))


# The zeros of the start hold nothing of the graphs: no layer.
@entry("a GRU cell around convolutions of a state that starts at zero", LOOPS)
class FromZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 2)
        self.conv, self.cell = GCNConv(WIDTH, WIDTH), nn.GRUCell(2 * WIDTH, WIDTH)

    def forward(self, x, edge_index, batch):
        x, h = self.embed(x), x.new_zeros(len(x), WIDTH)
        for _ in range(3):
            h = keep(self.cell(torch.cat([self.conv(h, edge_index), x], dim=1), h))
        return self.head(global_mean_pool(h, batch))
