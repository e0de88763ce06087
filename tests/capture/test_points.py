"""Plans as JSON and as tables."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import CapturePlan, plan_capture
from histograph_post.errors import CaptureError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = GCNConv(7, 7)

    def forward(self, x, edge_index, batch):
        x = self.conv(x, edge_index).relu()
        return global_mean_pool(torch.tanh(2 * self.conv(x, edge_index)), batch)


@pytest.fixture
def plan(batch) -> CapturePlan:
    return plan_capture(Net(), batch)


def test_json_round_trip(plan):
    assert CapturePlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_table(plan):
    assert plan.table() == [
        ("0", "input", "7", "input of conv", "conv"),
        ("1", "conv", "7", "input of conv (call 2)", "conv#2"),
        ("2", "conv#2", "7", "mul > tanh after conv (call 2)", "pooling over the nodes"),
    ]
    assert len(CapturePlan.COLUMNS) == len(plan.table()[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "module"),
        ("call", 0),
        ("call", True),
        ("index", -1),
        ("index", 1.0),
        ("width", "7"),
        ("name", None),
        ("calls", ["relu"]),
        ("calls", "relu"),
    ],
)
def test_a_damaged_point_is_refused(plan, field, value):
    damaged = copy.deepcopy(plan.to_json())
    damaged["points"][0][field] = value
    with pytest.raises(CaptureError, match=rf"points\[0\]: found {field} = "):
        CapturePlan.from_json(damaged)


@pytest.mark.parametrize(
    "value", [None, [], {}, {"points": [], "notes": []}, {"points": [3], "notes": []}]
)
def test_something_else_is_refused(value):
    with pytest.raises(CaptureError, match="capture plan"):
        CapturePlan.from_json(value)


def test_unknown_fields_are_refused(plan):
    damaged = plan.to_json()
    damaged["points"][1]["extra"] = 1
    with pytest.raises(CaptureError, match=r"points\[1\]: found .*extra"):
        CapturePlan.from_json(damaged)
