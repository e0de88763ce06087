"""Layers that are wired in unusual ways: history against a forward pass by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import (
    DeepGCNLayer,
    GCNConv,
    GraphConv,
    SAGEConv,
    global_add_pool,
    global_mean_pool,
)

from histograph_post.capture import Capture, plan_capture

WIDTH = 8


def test_dense_skip_connections_belong_to_the_layers(expect):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(GCNConv(7 + 4 * i, 4) for i in range(3))

        def forward(self, x, edge_index, batch):
            for conv in self.convs:
                x = torch.cat([x, F.relu(conv(x, edge_index))], dim=-1)
            return global_add_pool(x, batch)

    model = Dense()

    def by_hand(data):
        history = [data.x]
        for conv in model.convs:
            new = F.relu(conv(history[-1], data.edge_index))
            history.append(torch.cat([history[-1], new], dim=-1))
        return history

    plan = expect(model, by_hand)
    assert plan.widths == (7, 11, 15, 19)


def test_parallel_branches_are_one_layer(expect):
    class Inception(nn.Module):
        def __init__(self):
            super().__init__()
            self.a1, self.b1 = GCNConv(7, 4), SAGEConv(7, 5)
            self.a2, self.b2 = GCNConv(9, 4), SAGEConv(9, 5)

        def forward(self, x, edge_index, batch):
            x = torch.cat([self.a1(x, edge_index), self.b1(x, edge_index)], dim=1).relu()
            x = torch.cat([self.a2(x, edge_index), self.b2(x, edge_index)], dim=1).relu()
            return global_mean_pool(x, batch)

    model = Inception()

    def by_hand(data):
        e = data.edge_index
        first = torch.cat([model.a1(data.x, e), model.b1(data.x, e)], dim=1).relu()
        return [data.x, first, torch.cat([model.a2(first, e), model.b2(first, e)], dim=1).relu()]

    plan = expect(model, by_hand, names=["input", "a1+b1", "a2+b2"])
    assert any("side by side" in note for note in plan.notes)


def test_two_streams_keep_their_own_layers(expect):
    class Streams(nn.Module):
        def __init__(self):
            super().__init__()
            self.a1, self.a2 = GCNConv(7, 4), GCNConv(4, 4)
            self.b1, self.b2 = SAGEConv(7, 5), SAGEConv(5, 5)

        def forward(self, x, edge_index, batch):
            a = self.a2(self.a1(x, edge_index).relu(), edge_index)
            b = self.b2(self.b1(x, edge_index).relu(), edge_index)
            return global_mean_pool(torch.cat([a, b], dim=1), batch)

    model = Streams()

    def by_hand(data):
        e = data.edge_index
        a, b = model.a1(data.x, e).relu(), model.b1(data.x, e).relu()
        return [data.x, a, b, torch.cat([model.a2(a, e), model.b2(b, e)], dim=1)]

    expect(model, by_hand, names=["input", "a1", "b1", "a2+b2"])


def test_virtual_nodes_come_back_to_node_rows(expect):
    class Virtual(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(7, WIDTH)
            self.convs = nn.ModuleList(GCNConv(WIDTH, WIDTH) for _ in range(3))
            self.mlp = nn.Linear(WIDTH, WIDTH)

        def activations(self, x, edge_index, batch):
            virtual = torch.zeros(int(batch[-1]) + 1, WIDTH)
            x = self.embed(x) + virtual[batch]
            history = [x]
            for conv in self.convs:
                x = F.relu(conv(x, edge_index))
                virtual = virtual + self.mlp(global_add_pool(x, batch))
                x = x + virtual[batch]
                history.append(x)
            return history

        def forward(self, x, edge_index, batch):
            return global_mean_pool(self.activations(x, edge_index, batch)[-1], batch)

    model = Virtual()
    expect(model, lambda data: model.activations(data.x, data.edge_index, data.batch))


def test_norm_before_the_convolution(expect):
    """The activation is what the convolution is given, not the residual stream."""

    class PreNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                DeepGCNLayer(GraphConv(7, 7), nn.LayerNorm(7), nn.ReLU(inplace=True), dropout=0.2)
                for _ in range(3)
            )
            self.norm = nn.LayerNorm(7)

        def forward(self, x, edge_index, batch):
            for layer in self.layers:
                x = layer(x, edge_index)
            return global_mean_pool(self.norm(x), batch)

    model = PreNorm()

    def by_hand(data):
        x, history = data.x, []
        for layer in model.layers:
            history.append(layer.norm(x).relu())
            x = x + layer.conv(history[-1], data.edge_index)
        return [*history, model.norm(x)]

    expect(model, by_hand)


def test_a_model_that_writes_into_its_batch(batch):
    class Assigns(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(7, 7), GCNConv(7, WIDTH)])

        def forward(self, data):
            data.x *= 2
            for conv in self.convs:
                data.x = conv(data.x, data.edge_index).relu()
            return global_mean_pool(data.x, data.batch)

    model, original = Assigns().eval(), batch.x.clone()
    plan = plan_capture(model, batch)
    assert torch.equal(batch.x, original)
    assert plan.widths == (7, 7, WIDTH)
    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        assert torch.equal(history[0], 2 * original)
    assert batch.x.shape == original.shape
