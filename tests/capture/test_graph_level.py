"""Models with a prediction per graph: captured history against a forward pass by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GINConv,
    GINEConv,
    GPSConv,
    GraphConv,
    GraphNorm,
    PairNorm,
    SAGEConv,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.utils import scatter

from histograph_post.capture import Capture, plan_capture

WIDTH = 8


class Modular(nn.Module):
    """Embedding, convolutions with norm and activation modules, pool, classifier."""

    def __init__(self, make_conv, act=None, widths=(WIDTH,) * 3):
        super().__init__()
        self.embed = nn.Linear(7, widths[0])
        pairs = list(zip(widths, [*widths[1:], widths[-1]], strict=True))
        self.convs = nn.ModuleList(make_conv(*pair) for pair in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm1d(after) for _, after in pairs)
        self.act = act or nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(widths[-1], 2)

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.drop(self.act(norm(conv(x, edge_index))))
        return self.out(global_mean_pool(x, batch))

    def by_hand(self, data):
        history = [self.embed(data.x)]
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # A fresh tensor: an in-place activation must not reach the layer before.
            history.append(self.act(norm(conv(history[-1].clone(), data.edge_index))).clone())
        return history


CONVS = {
    "gcn": GCNConv,
    "gin": lambda a, b: GINConv(nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, b))),
    "gat": lambda a, b: GATConv(a, b // 4, heads=4),
    "sage": SAGEConv,
}


@pytest.mark.parametrize("kind", CONVS)
def test_modular(kind, expect):
    model = Modular(CONVS[kind])
    expect(model, model.by_hand, names=["input", "convs.0", "convs.1", "convs.2"])


def test_in_place_activation_module(expect):
    model = Modular(GCNConv, act=nn.ReLU(inplace=True))
    expect(model, model.by_hand)


def test_in_place_activation_right_after_the_convolution(expect):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)
            self.act = nn.ReLU(inplace=True)

        def forward(self, x, edge_index, batch):
            x = self.act(self.conv1(x, edge_index))
            x = self.act(self.conv2(x, edge_index))
            return global_mean_pool(x, batch)

    model = Net()

    def by_hand(data):
        first = F.relu(model.conv1(data.x, data.edge_index))
        return [data.x, first, F.relu(model.conv2(first, data.edge_index))]

    expect(model, by_hand, names=["input", "conv1", "conv2"])


def test_a_width_per_layer(expect):
    model = Modular(GCNConv, widths=(6, 10, 4))
    plan = expect(model, model.by_hand)
    assert plan.widths == (6, 10, 4, 4)


def functional_model(activation):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)
            self.lin = nn.Linear(WIDTH, 2)

        def forward(self, x, edge_index, batch):
            x = activation(self.conv1(x, edge_index))
            x = F.dropout(x, p=0.5, training=self.training)
            x = activation(self.conv2(x, edge_index))
            x = F.dropout(x, p=0.5, training=self.training)
            return self.lin(global_mean_pool(x, batch))

    return Functional()


def zero_negatives(x):
    x[x < 0] = 0
    return x


def add_one_in_place(x):
    x += 1
    return x


def through_a_view(x):
    x.view(-1).relu_()
    return x


@torch.jit.script
def scripted_gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x * x * x)))


ACTIVATIONS = {
    "relu": F.relu,
    "relu_": F.relu_,
    "tanh": torch.tanh,
    "inplace": lambda x: F.relu(x, inplace=True),
    "method": lambda x: x.relu(),
    "setitem": zero_negatives,
    "iadd": add_one_in_place,
    "view": through_a_view,
    "silu": lambda x: x * torch.sigmoid(x),
    "scripted": scripted_gelu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functional(name, expect):
    activation = ACTIVATIONS[name]
    model = functional_model(activation)

    def by_hand(data):
        first = activation(model.conv1(data.x, data.edge_index).clone())
        return [data.x, first, activation(model.conv2(first, data.edge_index).clone())]

    expect(model, by_hand, names=["input", "conv1", "conv2"])


def test_a_shared_convolution_counts_each_time(expect):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, WIDTH)
            self.conv = GraphConv(WIDTH, WIDTH)

        def forward(self, x, edge_index, batch):
            x = self.embed(x)
            for _ in range(3):
                x = torch.tanh(self.conv(x, edge_index))
            return global_add_pool(x, batch)

    model = Shared()

    def by_hand(data):
        history = [model.embed(data.x)]
        for _ in range(3):
            history.append(torch.tanh(model.conv(history[-1], data.edge_index)))
        return history

    expect(model, by_hand, names=["input", "conv", "conv#2", "conv#3"])


@pytest.mark.parametrize("norm", [GraphNorm(WIDTH), PairNorm()], ids=["GraphNorm", "PairNorm"])
@pytest.mark.parametrize("last", ["norm", "relu"])
def test_norms_over_graphs_and_residuals_belong_to_the_layer(norm, last, expect):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, WIDTH)
            self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
            self.norm = norm

        def layer(self, conv, x, edge_index, batch):
            y = x + conv(x, edge_index)
            return F.relu(self.norm(y, batch)) if last == "relu" else self.norm(F.relu(y), batch)

        def forward(self, x, edge_index, batch):
            x = self.embed(x)
            for conv in self.convs:
                x = self.layer(conv, x, edge_index, batch)
            return global_max_pool(x, batch)

    model = Residual()

    def by_hand(data):
        history = [model.embed(data.x)]
        for conv in model.convs:
            history.append(model.layer(conv, history[-1], data.edge_index, data.batch))
        return history

    expect(model, by_hand)


def test_gps_layers(expect):
    class GPS(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, WIDTH)
            self.edges = nn.Linear(3, WIDTH)
            self.layers = nn.ModuleList(
                GPSConv(WIDTH, GINEConv(nn.Linear(WIDTH, WIDTH)), heads=2) for _ in range(3)
            )

        def forward(self, x, edge_index, edge_attr, batch):
            x, edge_attr = self.embed(x), self.edges(edge_attr)
            for layer in self.layers:
                x = layer(x, edge_index, batch, edge_attr=edge_attr)
            return global_mean_pool(x, batch)

    model = GPS()

    def by_hand(data):
        history, edge_attr = [model.embed(data.x)], model.edges(data.edge_attr)
        for layer in model.layers:
            history.append(layer(history[-1], data.edge_index, data.batch, edge_attr=edge_attr))
        return history

    expect(model, by_hand, names=["input", *(f"layers.{i}.conv" for i in range(3))])


def test_edge_features_keywords_and_tuples(expect):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gine = GINEConv(nn.Linear(7, 7), edge_dim=3)
            self.sage = SAGEConv((7, 7), WIDTH)
            self.gat = GATConv(WIDTH, 4, heads=2)

        def forward(self, data):
            x = self.gine(edge_attr=data.edge_attr, edge_index=data.edge_index, x=data.x).relu()
            x = self.sage((x, x), data.edge_index).relu()
            x, (_, attention) = self.gat(x, data.edge_index, return_attention_weights=True)
            return global_mean_pool(x, data.batch), attention

    model = Mixed()

    def by_hand(data):
        first = model.gine(data.x, data.edge_index, data.edge_attr).relu()
        second = model.sage((first, first), data.edge_index).relu()
        return [data.x, first, second, model.gat(second, data.edge_index)]

    expect(model, by_hand, names=["input", "gine", "sage", "gat"])


def test_edges_as_a_tensor_subclass(batch):
    model = Modular(GCNConv).eval()
    batch.edge_index = EdgeIndex(batch.edge_index, sparse_size=(31, 31))
    plan = plan_capture(model, batch)
    with torch.no_grad():  # in inference mode PyG itself cannot use such edges
        history = Capture(model, plan).run(batch).history
        for found, wanted in zip(history, model.by_hand(batch), strict=True):
            assert torch.equal(found, wanted)


def test_activations_with_a_dimension_of_heads_are_flattened(expect):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(7, WIDTH)

        def forward(self, x, edge_index, batch):
            x = self.conv(x, edge_index).view(-1, 2, WIDTH // 2)
            x = x / x.norm(dim=-1, keepdim=True)
            return scatter(x, batch, dim=0, reduce="mean")

    model = Heads()

    def by_hand(data):
        x = model.conv(data.x, data.edge_index).view(-1, 2, WIDTH // 2)
        return [data.x, x / x.norm(dim=-1, keepdim=True)]

    expect(model, by_hand)
