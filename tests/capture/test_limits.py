"""What cannot be captured is explained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.data import Batch
from torch_geometric.nn import (
    DenseGCNConv,
    GCNConv,
    RGCNConv,
    TopKPooling,
    global_mean_pool,
)
from torch_geometric.nn.models import GCN
from torch_geometric.utils import to_dense_adj, to_dense_batch

from histograph_post.capture import Capture, plan_capture
from histograph_post.errors import CaptureError, ModelError

WIDTH = 8


def test_integer_input_is_left_out(batch):
    class EmbeddingConv(GCNConv):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.embed = nn.Embedding(5, WIDTH)

        def forward(self, atom, edge_index):
            return super().forward(self.embed(atom), edge_index)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = EmbeddingConv(), GCNConv(WIDTH, 4)

        def forward(self, atom, edge_index, batch):
            x = self.first(atom, edge_index).relu()
            return global_mean_pool(self.second(x, edge_index), batch)

    model = Net().eval()
    plan = plan_capture(model, batch)
    assert plan.names == ("first", "second")
    assert any("the input of 'first' is left out" in note for note in plan.notes)
    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        assert torch.equal(history[0], model.first(batch.atom, batch.edge_index).relu())


def test_a_first_layer_without_features(graphs):
    class Entities(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = RGCNConv(9, WIDTH, 2), RGCNConv(WIDTH, 4, 2)

        def forward(self, edge_index, edge_type):
            x = self.first(None, edge_index, edge_type).relu()
            return self.second(x, edge_index, edge_type)

    graph = graphs[0]
    graph.edge_type = torch.arange(graph.num_edges) % 2
    data, model = Batch.from_data_list([graph]), Entities().eval()
    plan = plan_capture(model, data)
    assert plan.names == ("first", "second")
    with torch.inference_mode():
        history = Capture(model, plan).run(data).history
        first = model.first(None, data.edge_index, data.edge_type).relu()
        assert torch.equal(history[0], first)


def test_hierarchical_pooling_is_explained(batch):
    class Hierarchical(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.pool = GCNConv(7, WIDTH), TopKPooling(WIDTH)
            self.conv2 = GCNConv(WIDTH, WIDTH)

        def forward(self, x, edge_index, batch):
            x = self.conv1(x, edge_index).relu()
            x, edge_index, _, batch, _, _ = self.pool(x, edge_index, batch=batch)
            return global_mean_pool(self.conv2(x, edge_index).relu(), batch)

    model = Hierarchical().eval()
    with pytest.raises(CaptureError, match=r"'conv2' is given \d+ rows .* 31 nodes.*--layers"):
        plan_capture(model, batch)
    plan = plan_capture(model, batch, layers="0:")
    assert plan.names == ("input", "conv1")
    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        assert torch.equal(history[1], model.conv1(batch.x, batch.edge_index).relu())


def test_a_model_without_layers_lists_its_modules(batch):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(7, 2)

        def forward(self, x, edge_index, batch):
            return global_mean_pool(self.lin(x), batch)

    with pytest.raises(CaptureError, match=r"no message-passing layers.*--layers") as error:
        plan_capture(Mlp(), batch)
    assert "lin" in error.value.details
    assert "[31, 2]" in error.value.details


def test_cached_edges_are_refused_for_several_graphs(batch):
    model = GCN(7, WIDTH, num_layers=2, cached=True)
    with pytest.raises(CaptureError, match=r"'convs\.0' has cached=True"):
        plan_capture(model, batch)


def through_numpy(x):
    return torch.from_numpy(np.tanh(x.numpy()))


def through_a_list(x):
    return torch.tensor(x.tolist())


@pytest.mark.parametrize("step", [through_numpy, through_a_list])
def test_numbers_that_leave_pytorch_between_layers_are_refused(step, batch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList([GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)])

        def forward(self, x, edge_index, batch):
            x = step(self.convs[0](x, edge_index).relu().detach())
            return global_mean_pool(self.convs[1](x, edge_index), batch)

    with pytest.raises(CaptureError, match=r"'convs\.1' was computed from is lost.*--layers"):
        plan_capture(Net().eval(), batch)


def test_a_padded_layer_between_others_is_refused(batch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)
            self.dense = DenseGCNConv(WIDTH, WIDTH)

        def forward(self, x, edge_index, batch):
            padded, mask = to_dense_batch(self.first(x, edge_index).relu(), batch)
            x = self.dense(padded, to_dense_adj(edge_index, batch), mask).relu()[mask]
            return global_mean_pool(self.last(x, edge_index), batch)

    with pytest.raises(CaptureError, match=r"outside of the layers.*--layers"):
        plan_capture(Net().eval(), batch)


def test_a_module_with_edges_that_returns_graphs_is_no_layer(batch):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(7, WIDTH)

        def forward(self, x, edge_index, batch):
            x = self.lin(x)
            return global_mean_pool(x.index_add(0, edge_index[1], x[edge_index[0]]), batch)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x, edge_index, batch):
            return self.encoder(x, edge_index, batch)

    with pytest.raises(CaptureError, match=r"__getitem__\(\) in 'encoder' looks nodes up by edges"):
        plan_capture(Net(), batch)


def test_an_error_of_the_model_is_told_with_its_line(batch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(7, WIDTH)

        def forward(self, x, edge_index, batch):
            return global_meen_pool(self.conv(x, edge_index), batch)  # noqa: F821

    with pytest.raises(ModelError, match=r"Net\.forward failed at test_limits\.py:\d+: NameError"):
        plan_capture(Net(), batch)


@pytest.mark.parametrize("count", [1, 3])
def test_graphs_of_one_node_tell_nothing(count, graphs):
    single = Batch.from_data_list([graphs[1]] * count)
    model = GCN(7, WIDTH, num_layers=2)
    with pytest.raises(CaptureError, match="expected a graph with two or more"):
        plan_capture(model, single)


def test_a_layer_is_the_whole_model(expect):
    model = GCNConv(7, 3)
    expect(
        model,
        lambda data: [data.x, model(data.x, data.edge_index, data.edge_weight)],
        names=["input", "model"],
    )
