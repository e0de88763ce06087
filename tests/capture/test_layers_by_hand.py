"""Message-passing layers written without PyG."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, MetaLayer, global_mean_pool
from torch_geometric.utils import scatter, to_dense_adj

from histograph_post.capture import Capture, plan_capture
from histograph_post.errors import CaptureError

WIDTH = 8


class GraphConvolution(nn.Module):
    """The layer of the first GCN, with a dense or sparse adjacency matrix."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out))

    def forward(self, x, adjacency):
        return adjacency @ (x @ self.weight)


def dense_adjacency(edge_index, num_nodes):
    return to_dense_adj(edge_index, max_num_nodes=num_nodes)[0]


def filled_adjacency(edge_index, num_nodes):
    adjacency = torch.zeros(num_nodes, num_nodes)
    adjacency[edge_index[0], edge_index[1]] = 1
    return adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)


def sparse_adjacency(edge_index, num_nodes):
    ones = torch.ones(edge_index.shape[1])
    return torch.sparse_coo_tensor(
        edge_index, ones, (num_nodes, num_nodes), check_invariants=True
    ).coalesce()


@pytest.mark.parametrize("adjacency", [dense_adjacency, filled_adjacency, sparse_adjacency])
def test_layers_with_an_adjacency_matrix(adjacency, expect):
    class Kipf(nn.Module):
        def __init__(self):
            super().__init__()
            self.gc1, self.gc2 = GraphConvolution(7, WIDTH), GraphConvolution(WIDTH, 3)

        def forward(self, x, edge_index):
            matrix = adjacency(edge_index, x.shape[0])
            x = F.dropout(F.relu(self.gc1(x, matrix)), 0.5, training=self.training)
            return F.log_softmax(self.gc2(x, matrix), dim=1)

    model = Kipf()

    def by_hand(data):
        matrix = adjacency(data.edge_index, data.num_nodes)
        first = F.relu(model.gc1(data.x, matrix))
        return [data.x, first, model.gc2(first, matrix)]

    expect(model, by_hand, names=["input", "gc1", "gc2"])


class AttentionLayer(nn.Module):
    """A hand-written layer that is given, and returns, features and edges as one tuple."""

    def __init__(self, width_in, width_out, activation=None):
        super().__init__()
        self.project = nn.Linear(width_in, width_out)
        self.score = nn.Linear(2 * width_out, 1)
        self.activation = activation

    def forward(self, data):
        x, edge_index = data
        h = self.project(x)
        source, target = edge_index
        weight = torch.sigmoid(self.score(torch.cat([h[source], h[target]], dim=-1)))
        out = torch.zeros_like(h).index_add_(0, target, weight * h[source])
        return (self.activation(out) if self.activation else out), edge_index


def test_layers_that_pass_on_a_tuple(expect):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                AttentionLayer(7, WIDTH, nn.ELU(inplace=True)), AttentionLayer(WIDTH, 3)
            )

        def forward(self, x, edge_index):
            return self.net((x, edge_index))[0]

    model = Net()

    def by_hand(data):
        first = model.net[0]((data.x, data.edge_index))
        return [data.x, first[0], model.net[1](first)[0]]

    expect(model, by_hand, names=["input", "net.0", "net.1"])


def test_meta_layers(expect):
    class NodeModel(nn.Module):
        def __init__(self, width_in):
            super().__init__()
            self.lin = nn.Linear(width_in + 3, WIDTH)

        def forward(self, x, edge_index, edge_attr, u, batch):
            row, col = edge_index
            return scatter(self.lin(torch.cat([x[row], edge_attr], 1)), col, dim_size=len(x)).relu()

    class EdgeModel(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.lin = nn.Linear(2 * width + 3, 3)

        def forward(self, source, target, edge_attr, u, batch):
            return self.lin(torch.cat([source, target, edge_attr], 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = MetaLayer(EdgeModel(7), NodeModel(7))
            self.second = MetaLayer(EdgeModel(WIDTH), NodeModel(WIDTH))
            self.out = nn.Linear(WIDTH, 2)

        def forward(self, x, edge_index, edge_attr):
            x, edge_attr, _ = self.first(x, edge_index, edge_attr)
            x, _, _ = self.second(x, edge_index, edge_attr)
            return self.out(x)

    model = Net()

    def by_hand(data):
        first = model.first(data.x, data.edge_index, data.edge_attr)
        return [data.x, first[0], model.second(first[0], data.edge_index, first[1])[0]]

    expect(model, by_hand, names=["input", "first.node_model", "second.node_model"])


def test_an_adjacency_matrix_multiplied_outside_of_modules_needs_names(batch):
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(7, WIDTH), nn.Linear(WIDTH, 2)

        def forward(self, x, edge_index):
            matrix = dense_adjacency(edge_index, x.shape[0])
            return matrix @ self.lin2(F.relu(matrix @ self.lin1(x)))

    model = Bare().eval()
    with pytest.raises(CaptureError, match="--layers"):
        plan_capture(model, batch)
    plan = plan_capture(model, batch, layers="lin1:input,lin2:input")
    history = Capture(model, plan).run(batch).history
    matrix = dense_adjacency(batch.edge_index, batch.num_nodes)
    assert torch.equal(history[0], batch.x)
    assert torch.equal(history[1], F.relu(matrix @ model.lin1(batch.x)))


def by_embedding_bag(self, x, edge_index, matrix):
    source, target = edge_index
    order = target.argsort(stable=True)
    starts = target.bincount(minlength=len(x)).cumsum(0).roll(1)
    starts[0] = 0
    return F.embedding_bag(source[order], x, starts, mode="sum")


HAND_WRITTEN = {
    "embedding_bag": by_embedding_bag,
    "solve": lambda self, x, e, matrix: torch.linalg.solve(torch.eye(len(x)) + matrix, x),
    "broadcast": lambda self, x, e, matrix: (matrix[:, :, None] * x[None]).sum(1),
    "masked_fill": lambda self, x, e, matrix: (
        x[None].masked_fill((matrix == 0)[:, :, None], -9.0).amax(1)
    ),
    "attention mask": lambda self, x, e, matrix: F.scaled_dot_product_attention(
        x, x, x, attn_mask=matrix + torch.eye(len(x))
    ),
}


@pytest.mark.parametrize("kind", HAND_WRITTEN)
def test_a_layer_by_hand_between_those_of_pyg(kind, expect):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x, edge_index, matrix):
            return self.lin(x) + HAND_WRITTEN[kind](self, x, edge_index, matrix)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = GCNConv(7, WIDTH), GCNConv(WIDTH, WIDTH)
            self.middle = Layer()

        def layers(self, x, edge_index):
            matrix = filled_adjacency(edge_index, len(x))
            first = self.first(x, edge_index).relu()
            middle = self.middle(first, edge_index, matrix).relu()
            return [x, first, middle, self.last(middle, edge_index).relu()]

        def forward(self, x, edge_index, batch):
            return global_mean_pool(self.layers(x, edge_index)[-1], batch)

    model = Net()
    names = ["input", "first", "middle", "last"]
    expect(model, lambda data: model.layers(data.x, data.edge_index), names=names)
