"""The parity check finds what it is for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import check_parity, plan_capture
from histograph_post.errors import CaptureError


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
        x = self.conv1(x, edge_index)
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
