"""What the readouts of graph-level models consume."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    JumpingKnowledge,
    SAGEConv,
    Set2Set,
    TopKPooling,
    global_add_pool,
    global_max_pool,
    global_mean_pool,
)
from torch_geometric.nn.aggr import AttentionalAggregation, MeanAggregation
from torch_geometric.utils import softmax, to_dense_batch

from histograph_post.capture import plan_capture

WIDTH = 8


class Stack(nn.Module):
    """Three layers, and a readout that the test gives."""

    def __init__(self, readout, **modules):
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.convs = nn.ModuleList(SAGEConv(WIDTH, WIDTH) for _ in range(3))
        self.readout = [readout]  # not a module of its own
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x, edge_index, batch):
        return self.readout[0](self, self.layers(x, edge_index), batch)

    def layers(self, x, edge_index):
        xs = [self.embed(x)]
        for conv in self.convs:
            xs.append(F.elu(conv(xs[-1], edge_index)))
        return xs

    def by_hand(self, data):
        return self.layers(data.x, data.edge_index)


def attention_pool(self, xs, batch):
    gate = softmax(self.gate(xs[-1]), batch)
    return global_add_pool(gate * xs[-1], batch)


def flat_attention_pool(self, xs, batch):
    gate = softmax(self.gate(xs[-1]).squeeze(-1), batch)
    return global_add_pool(xs[-1] * gate.unsqueeze(-1), batch)


def single_graph_attention(self, xs, batch):
    return torch.softmax(self.gate(xs[-1]), dim=0).T @ xs[-1]


def set2set_by_hand(self, xs, batch):
    x = xs[-1]
    query = x.new_zeros(int(batch.max()) + 1, WIDTH)
    for _ in range(3):
        score = (x * query[batch]).sum(-1, keepdim=True)
        query = torch.tanh(query + global_add_pool(softmax(score, batch) * x, batch))
    return query


def dense_transformer(self, xs, batch):
    dense, mask = to_dense_batch(xs[-1], batch)
    dense, _ = self.attention(dense, dense, dense, key_padding_mask=~mask)
    return dense.mean(dim=1)


READOUTS = {
    "mean": (lambda self, xs, batch: global_mean_pool(xs[-1], batch), {}),
    "mean and max": (
        lambda self, xs, batch: torch.cat(
            [global_mean_pool(xs[-1], batch), global_max_pool(xs[-1], batch)], dim=-1
        ),
        {},
    ),
    "every layer pooled": (
        lambda self, xs, batch: sum(self.lin(global_add_pool(x, batch)) for x in xs),
        {"lin": nn.Linear(WIDTH, 2)},
    ),
    "every layer pooled, last first": (
        lambda self, xs, batch: torch.cat([global_add_pool(x, batch) for x in xs[::-1]], dim=1),
        {},
    ),
    "dictionary": (
        lambda self, xs, batch: {
            "nodes": xs[-1],
            "logits": global_mean_pool(xs[-1], batch),
            "penalty": xs[-1].pow(2).mean(),
        },
        {},
    ),
    "tuple, nodes first": (
        lambda self, xs, batch: (xs[-1], global_mean_pool(xs[-1], batch), xs[1]),
        {},
    ),
    "attention": (attention_pool, {"gate": nn.Linear(WIDTH, 1)}),
    "attention with a hidden layer": (
        attention_pool,
        {"gate": nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1))},
    ),
    "flat attention": (flat_attention_pool, {"gate": nn.Linear(WIDTH, 1)}),
    "attention over the batch": (single_graph_attention, {"gate": nn.Linear(WIDTH, 1)}),
    "set2set by hand": (set2set_by_hand, {}),
    "dense transformer": (
        dense_transformer,
        {"attention": nn.MultiheadAttention(WIDTH, 2, batch_first=True)},
    ),
    "aggregation module": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        {"pool": MeanAggregation()},
    ),
    "attention module": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        {"pool": AttentionalAggregation(nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 5))},
    ),
    "Set2Set": (
        lambda self, xs, batch: self.pool(xs[-1], batch),
        {"pool": Set2Set(WIDTH, processing_steps=2)},
    ),
    "JK cat": (
        lambda self, xs, batch: global_add_pool(self.jk(xs[1:]), batch),
        {"jk": JumpingKnowledge("cat")},
    ),
    "JK max": (
        lambda self, xs, batch: global_add_pool(self.jk(xs), batch),
        {"jk": JumpingKnowledge("max")},
    ),
    "JK lstm": (
        lambda self, xs, batch: global_add_pool(F.relu(self.jk(xs)), batch),
        {"jk": JumpingKnowledge("lstm", WIDTH, 4)},
    ),
    "cat by hand": (
        lambda self, xs, batch: global_add_pool(torch.cat(xs[1:], dim=-1), batch),
        {},
    ),
    "cat by hand, with a linear map": (
        lambda self, xs, batch: global_add_pool(F.relu(self.lin(torch.cat(xs, dim=1))), batch),
        {"lin": nn.Linear(4 * WIDTH, WIDTH)},
    ),
    "max by hand": (
        lambda self, xs, batch: global_add_pool(torch.stack(xs).max(dim=0).values, batch),
        {},
    ),
    "scripted sum": (
        lambda self, xs, batch: self.lin(scripted_add_pool(xs[-1], batch)),
        {"lin": nn.Linear(WIDTH, 2)},
    ),
    "topk": (
        lambda self, xs, batch: global_mean_pool(
            *(
                self.pool(xs[-1], torch.zeros(2, 0, dtype=torch.long), batch=batch)[i]
                for i in (0, 3)
            )
        ),
        {"pool": TopKPooling(WIDTH)},
    ),
}


@torch.jit.script
def scripted_add_pool(x, batch):
    pooled = torch.zeros([int(batch.max()) + 1, x.size(1)])
    return pooled.scatter_add_(0, batch.unsqueeze(1).expand_as(x), x)


#: What is pooled, where it is another tensor than the last layer's state.
POOLED = {
    "JK max": lambda self, xs: self.jk(xs),
    "JK lstm": lambda self, xs: F.relu(self.jk(xs)),
    "cat by hand, with a linear map": lambda self, xs: F.relu(self.lin(torch.cat(xs, dim=1))),
    "max by hand": lambda self, xs: torch.stack(xs).max(dim=0).values,
}


@pytest.mark.parametrize("name", READOUTS)
def test_the_last_activation_is_what_the_readout_consumes(name, expect):
    readout, modules = READOUTS[name]
    model = Stack(readout, **modules)
    names = ["input", "convs.0", "convs.1", "convs.2"]
    if name not in POOLED:
        expect(model, model.by_hand, names=names)
        return

    def by_hand(data):
        xs = model.by_hand(data)
        return [*xs[:-1], POOLED[name](model, xs), xs[-1]]

    # The last state stands last, where readouts look for it.
    expect(model, by_hand, names=[*names[:-1], "pooled", "convs.2"])


def test_gates_between_the_layers_belong_to_the_layers(expect):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(GCNConv(7, 7) for _ in range(2))
            self.gate = nn.Linear(7, 1)

        def layer(self, conv, x, edge_index):
            x = conv(x, edge_index)
            return torch.sigmoid(self.gate(x)) * x

        def forward(self, x, edge_index, batch):
            for conv in self.convs:
                x = self.layer(conv, x, edge_index)
            return global_add_pool(x, batch)

    model = Gated()

    def by_hand(data):
        history = [data.x]
        for conv in model.convs:
            history.append(model.layer(conv, history[-1], data.edge_index))
        return history

    expect(model, by_hand)


def test_a_norm_by_hand_is_no_gate(expect):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(7, WIDTH)

        def forward(self, x, edge_index, batch):
            x = self.conv(x, edge_index)
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            return global_add_pool(x, batch)

    model = Normed()

    def by_hand(data):
        x = model.conv(data.x, data.edge_index)
        return [data.x, x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)]

    expect(model, by_hand)


def test_message_passing_into_graphs_is_a_readout(expect):
    class FromNodesToGraphs(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)])
            self.readout = GATConv((WIDTH, WIDTH), WIDTH, add_self_loops=False)

        def forward(self, x, edge_index, batch):
            for conv in self.convs:
                x = F.elu(conv(x, edge_index))
            graphs = global_add_pool(x, batch)
            members = torch.stack([torch.arange(len(x)), batch])
            for _ in range(2):
                graphs = self.readout((x, graphs), members).relu()
            return graphs

    model = FromNodesToGraphs()

    def by_hand(data):
        first = F.elu(model.convs[0](data.x, data.edge_index))
        return [data.x, first, F.elu(model.convs[1](first, data.edge_index))]

    expect(model, by_hand, names=["input", "convs.0", "convs.1"])


@pytest.mark.parametrize("num_nodes", [5, WIDTH])
def test_node_rows_are_not_confused_with_other_sizes(num_nodes, expect, graphs):
    """As many nodes as graphs (some graphs are empty), or as the layers are wide."""
    sizes = {5: [0, 1, 3, 1, 0], WIDTH: [3, 5]}[num_nodes]
    data = Batch.from_data_list([graphs[0].subgraph(torch.arange(size)) for size in sizes])
    assert data.num_nodes == num_nodes
    model = Stack(READOUTS["attention over the batch"][0], gate=nn.Linear(WIDTH, 1))
    expect(model, model.by_hand, data=data)
    model = Stack(lambda self, xs, batch: self.lin(global_add_pool(xs[-1], batch)))
    model.lin = nn.Linear(WIDTH, 3)
    expect(model, model.by_hand, data=data)


@pytest.mark.parametrize("squash", [torch.tanh, lambda score: score], ids=["tanh", "as it is"])
def test_a_convolution_that_only_scores_the_nodes_is_the_readouts(squash, expect):
    class Scored(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)])
            self.score = GCNConv(WIDTH, 1)

        def layers(self, x, edge_index):
            xs = [x]
            for conv in self.convs:
                xs.append(conv(xs[-1], edge_index).relu())
            return xs

        def forward(self, x, edge_index, batch):
            x = self.layers(x, edge_index)[-1]
            return global_mean_pool(x * squash(self.score(x, edge_index)), batch)

    model = Scored()
    plan = expect(model, lambda data: model.layers(data.x, data.edge_index))
    assert any(note.startswith("'score' leads to the output beside") for note in plan.notes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_pooled(expect):
    def pool(self, xs, batch):
        sizes = torch.bincount(batch).tolist()
        nested = torch.nested.nested_tensor(list(xs[-1].split(sizes)), layout=torch.strided)
        return nested.to_padded_tensor(0.0).sum(dim=1)

    model = Stack(pool)
    expect(model, model.by_hand)


def test_channels_that_are_as_many_as_the_nodes_of_the_only_graph(graphs):
    class ChannelAttention(nn.Module):
        """The rows of the readout's linear map are channels."""

        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(7, 9), GCNConv(9, 9)])
            self.weigh = nn.LazyLinear(1)

        def forward(self, x, edge_index):
            for conv in self.convs:
                x = conv(x, edge_index).relu()
            weights = torch.softmax(self.weigh(torch.corrcoef(x.T)), dim=0)  # [9 channels, 1]
            return (x.mean(dim=0, keepdim=True) @ weights).view(1, 1)

    nine, other = (Batch.from_data_list([graph]) for graph in (graphs[0], graphs[3]))
    model = ChannelAttention()
    model(other.x, other.edge_index)
    assert plan_capture(model, nine).points == plan_capture(model, other).points
