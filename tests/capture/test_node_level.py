"""Models with a prediction per node or per link."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import GATConv, GCNConv, LayerNorm, SAGEConv
from torch_geometric.nn import Sequential as GraphSequential
from torch_geometric.nn.models import GCN, GIN, GraphSAGE

from histograph_post.capture import Capture, plan_capture

WIDTH = 8


class TwoLayers(nn.Module):
    """Two layers, and a head that the test gives."""

    def __init__(self, head, out=3, **modules):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(7, WIDTH), GCNConv(WIDTH, out)
        self.head = [head]  # not a module of its own
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index):
        x = F.dropout(F.relu(self.conv1(x, edge_index)), training=self.training)
        return self.head[0](self, self.conv2(x, edge_index))


HEADS = {
    "nothing": (lambda self, x: x, lambda x: x),
    "log_softmax": (lambda self, x: F.log_softmax(x, dim=-1), lambda x: x),
    "sigmoid of a column": (lambda self, x: torch.sigmoid(x).squeeze(-1), lambda x: x),
    "linear": (lambda self, x: self.lin(x.relu()), lambda x: x.relu()),
    "linear and softmax": (lambda self, x: self.lin(x.relu()).softmax(-1), lambda x: x.relu()),
    "weight by hand": (lambda self, x: x.tanh() @ self.lin.weight.t(), lambda x: x.tanh()),
    "mlp": (lambda self, x: self.lin2(self.lin(F.elu(x)).relu()), lambda x: F.elu(x)),
    "column": (lambda self, x: self.lin2(self.lin(x)).squeeze(-1), lambda x: x),
    "in place, then linear": (
        lambda self, x: self.lin(F.dropout(x.relu_(), training=self.training)),
        lambda x: x.relu(),
    ),
    "normalised": (lambda self, x: F.normalize(x, dim=-1), lambda x: F.normalize(x, dim=-1)),
    "tuple": (lambda self, x: (F.log_softmax(x, dim=1), x.pow(2).mean()), lambda x: x),
    "links": (
        lambda self, x: (x.relu()[[0, 1, 2]] * x.relu()[[3, 4, 5]]).sum(-1),
        lambda x: x.relu(),
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_activation_ends_where_the_head_begins(name, expect):
    head, ended = HEADS[name]
    out = 1 if name == "sigmoid of a column" else 4
    model = TwoLayers(head, out, lin=nn.Linear(4, 5), lin2=nn.Linear(5, 1))
    if name == "weight by hand":
        model.lin2 = None

    def by_hand(data):
        first = F.relu(model.conv1(data.x, data.edge_index))
        return [data.x, first, ended(model.conv2(first, data.edge_index))]

    expect(model, by_hand, names=["input", "conv1", "conv2"])


def test_one_graph(expect, graphs):
    """Such as Cora: a single graph is the whole data set."""
    model = TwoLayers(lambda self, x: self.lin(x.relu()), lin=nn.Linear(3, 2))

    def by_hand(data):
        first = F.relu(model.conv1(data.x, data.edge_index))
        return [data.x, first, model.conv2(first, data.edge_index).relu()]

    expect(model, by_hand, data=Batch.from_data_list(graphs[:1]))


def test_cached_edges_of_one_graph_are_not_those_of_the_probe(graphs):
    model = TwoLayers(lambda self, x: x)
    model.conv1.cached = True
    first, second = (Batch.from_data_list([graph]) for graph in (graphs[0], graphs[3]))
    plan = plan_capture(model, first)
    with torch.inference_mode():
        alone = TwoLayers(lambda self, x: x)
        alone.load_state_dict(model.state_dict())
        expected = alone.eval()(second.x, second.edge_index)
        assert torch.equal(Capture(model.eval(), plan).run(second).output, expected)


class Block(nn.Module):
    """A convolution and a feed-forward block, each with a residual and a norm."""

    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(WIDTH, WIDTH)
        self.norm1, self.norm2 = LayerNorm(WIDTH, mode="node"), nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))

    def forward(self, x, edge_index):
        x = self.norm1(x + self.conv(x, edge_index))
        return self.norm2(x + self.ffn(x))


@pytest.mark.parametrize("num_blocks", [2, 3])
def test_feed_forward_blocks_belong_to_the_layer(num_blocks, expect):
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
            self.classify = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))

        def forward(self, x, edge_index):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x, edge_index)
            return self.classify(x)

    model = Transformer()

    def by_hand(data):
        history = [model.embed(data.x)]
        for block in model.blocks:
            history.append(block(history[-1], data.edge_index))
        return history

    expect(model, by_hand)


@pytest.mark.parametrize("linear_first", [True, False])
def test_linear_skip_connections_are_no_feed_forward_blocks(linear_first, expect):
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GATConv(7, 4, heads=2), GATConv(8, 4, heads=2)])
            self.lins = nn.ModuleList([nn.Linear(7, 8), nn.Linear(8, 8)])
            self.out = nn.Linear(8, 3)

        def layer(self, conv, lin, x, edge_index):
            if linear_first:
                return F.elu(lin(x) + conv(x, edge_index))
            return F.elu(conv(x, edge_index) + lin(x))

        def forward(self, x, edge_index):
            for conv, lin in zip(self.convs, self.lins, strict=True):
                x = self.layer(conv, lin, x, edge_index)
            return self.out(x)

    model = Skip()

    def by_hand(data):
        history = [data.x]
        for conv, lin in zip(model.convs, model.lins, strict=True):
            history.append(model.layer(conv, lin, history[-1], data.edge_index))
        return history

    expect(model, by_hand)


@pytest.mark.parametrize("jk", [None, "last", "cat", "max", "lstm"])
@pytest.mark.parametrize("kind", [GCN, GraphSAGE, GIN])
@pytest.mark.parametrize("norm", [None, "BatchNorm", "GraphNorm"])
def test_models_of_pyg(kind, jk, norm, expect):
    model = kind(7, WIDTH, num_layers=3, out_channels=4, jk=jk, norm=norm, dropout=0.3)

    def by_hand(data):
        history = [data.x]
        for at, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
            weight = [data.edge_weight] if kind is GCN else []
            x = conv(history[-1], data.edge_index, *weight)
            if at < 2 or jk is not None:
                x = model.act(norm(x, data.batch) if model.supports_norm_batch else norm(x))
            history.append(x)
        aggregate = [model.jk(history[1:])] if jk in ("max", "lstm") else []
        return [*history[:-1], *aggregate, history[-1]]

    aggregate = ["pooled"] if jk in ("max", "lstm") else []
    expect(model, by_hand, names=["input", "convs.0", "convs.1", *aggregate, "convs.2"])


def test_sequential_of_pyg(expect):
    model = GraphSequential(
        "x, edge_index",
        [
            (GCNConv(7, WIDTH), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            (GCNConv(WIDTH, WIDTH), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            nn.Linear(WIDTH, 2),
        ],
    )

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = model

        def forward(self, x, edge_index):
            return self.net(x, edge_index)

    def by_hand(data):
        first = F.relu(model[0](data.x, data.edge_index))
        return [data.x, first, F.relu(model[2](first, data.edge_index))]

    expect(Net(), by_hand)
