"""The parity check finds what it is for; so does the search for the weights that are needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import check_parity, plan_capture
from histograph_post.capture.checks import needed_parameters
from histograph_post.errors import CaptureError

from ..helpers import demo_graphs


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(7, 6), GCNConv(6, 6)
        self.norm = norm
        self.noise = False

    def forward(self, x, edge_index, batch):
        x = self.norm(self.conv1(x, edge_index)).relu()
        x = self.conv2(x, edge_index).tanh()
        noise = torch.rand(1) if self.noise else 0
        return {"logits": global_mean_pool(x, batch) + noise, "nan": x.sum() / 0 * 0}


def test_a_model_that_keeps_graphs_apart(graphs, batch):
    model = Net(nn.BatchNorm1d(6)).train()
    parity = check_parity(model, plan_capture(model, batch), graphs)
    assert parity.ok
    assert parity.same_output
    assert [layer.layer for layer in parity.layers] == ["input", "conv1", "conv2"]
    assert parity.layers[0].max_abs == 0
    assert parity.worst.max_rel < 1e-5
    assert model.training
    assert "same bits" in parity.summary()


def test_a_model_that_mixes_graphs(graphs, batch):
    """Batch norm without running statistics normalises over the batch it is given."""
    model = Net(nn.BatchNorm1d(6, track_running_stats=False))
    many_nodes = [graph for graph in graphs if graph.num_nodes > 1]
    parity = check_parity(model, plan_capture(model, batch), many_nodes)
    assert parity.same_output
    assert not parity.ok
    assert parity.worst.layer in ("conv1", "conv2")
    assert parity.worst.max_abs > 1e-2
    assert parity.layers[0].max_abs == 0


def test_random_output_is_compared_with_the_same_random_numbers(graphs, batch):
    model = Net(nn.Identity())
    model.noise = True
    assert check_parity(model, plan_capture(model, batch), graphs).same_output is True


def test_an_output_that_differs(graphs, batch):
    class SeesCapture(Net):
        def forward(self, x, edge_index, batch):
            output = super().forward(x, edge_index, batch)
            return output["logits"] + ("forward" in vars(self.conv1))

    model = SeesCapture(nn.Identity())
    parity = check_parity(model, plan_capture(model, batch), graphs)
    assert not parity.same_output
    assert not parity.ok
    assert "DIFFERENT" in parity.summary()


def test_not_a_number_is_the_worst(graphs, batch):
    model = Net(nn.Identity())
    plan = plan_capture(model, batch)
    graphs[2].x[0, 0] = float("nan")
    parity = check_parity(model, plan, graphs)
    assert not parity.ok
    assert parity.worst.graph == 2


def test_no_graphs(batch):
    model = Net(nn.Identity())
    with pytest.raises(CaptureError, match="no graphs"):
        check_parity(model, plan_capture(model, batch), [])


class Rounded(nn.Module):
    """What is added and taken off again leaves rounding, which depends on the place."""

    def __init__(self, mixes):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(7, 8), GCNConv(8, 8)
        self.mixes = mixes

    def forward(self, x, edge_index, batch):
        x = self.conv1(x.float(), edge_index)  # which double precision has to get past
        place = 1e4 * torch.arange(len(x), dtype=x.dtype).unsqueeze(1)
        x = (x + place) - place
        if self.mixes:
            x = x + 1e-3 * x.mean(dim=0)
        return global_mean_pool(self.conv2(x, edge_index), batch)


@pytest.mark.parametrize("mixes", [False, True])
def test_double_precision_tells_rounding_from_mixing(mixes, graphs, batch):
    model = Rounded(mixes).eval()
    parity = check_parity(model, plan_capture(model, batch), graphs)
    assert parity.worst.max_rel > parity.tolerance
    assert parity.batch_independent == (not mixes)
    assert parity.summary().endswith("not rounding" if mixes else "precision: rounding")


# --- which weights the history depends on: all before the last captured point, and no other


class WithUnneeded(nn.Module):
    """A norm between layers, whose statistics no gradient shows, and one after the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = GCNConv(4, 6), nn.BatchNorm1d(6), GCNConv(6, 6)
        self.last_norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("order", torch.arange(6).flip(0))
        self.register_buffer("kept", torch.tensor([True, False]))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.norm(self.first(x, edge_index)).relu()[:, self.order]
        x = self.second(x, edge_index).relu()
        return self.head(self.last_norm(global_mean_pool(x, batch)))[:, self.kept]


def test_what_comes_before_the_last_point_is_needed() -> None:
    model = WithUnneeded().eval()
    batch = Batch.from_data_list(demo_graphs(4))
    plan = plan_capture(model, batch)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    needed = needed_parameters(model, batch, plan)
    assert needed == {
        *("first.lin.weight", "first.bias", "second.lin.weight", "second.bias", "order"),
        *("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"),
    }
    after = ["last_norm.running_var", "head.weight", "unused.bias", "kept"]
    assert needed_parameters(model, batch, plan, after) == set()
    assert needed_parameters(model, batch, plan, [*after, "norm.running_var"]) == {
        "norm.running_var"
    }
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
