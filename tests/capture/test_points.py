"""Plans as JSON and as tables, and the forms of --layers."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import Capture, CapturePlan, plan_capture
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


# --- the forms of --layers


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 4)
        self.convs = nn.ModuleList([GCNConv(4, 4), GCNConv(4, 5)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(4), nn.BatchNorm1d(5)])
        self.shared = nn.Identity()
        self.unused = nn.Linear(3, 3)
        self.out = nn.Linear(5, 2)

    def forward(self, x, edge_index, batch):
        x = self.embed(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.shared(F.relu(norm(conv(x, edge_index))))
        return self.out(global_mean_pool(x, batch))


@pytest.fixture
def model() -> Named:
    return Named().eval()


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        ("auto", ["input", "convs.0", "convs.1"]),
        ("0", ["input"]),
        ("-1", ["convs.1"]),
        ("-1, 0", ["input", "convs.1"]),
        ("1:", ["convs.0", "convs.1"]),
        (":-1", ["input", "convs.0"]),
        ("::2", ["input", "convs.1"]),
        ("convs.*", ["convs.0", "convs.1"]),
        ("*", ["input", "convs.0", "convs.1"]),
        (["convs.1", "input", "0"], ["input", "convs.1"]),
        # A name means what the next layer consumes of the module, whatever the module is.
        ("input,norms.*", ["input", "convs.0", "convs.1"]),
        ("norms.*:output", ["norms.0:output", "norms.1:output"]),
        ("embed", ["input"]),
        ("convs.*,norms.*,shared", ["convs.0", "convs.1"]),
        ("*.lin", ["convs.0", "convs.1"]),
        ("convs.0:input:0,0,convs.0", ["convs.0:input:0", "convs.0"]),
        ("convs.0:output,embed:input", ["embed:input", "convs.0:output"]),
        ("convs.?:input", ["convs.0:input", "convs.1:input"]),
        ("shared", ["convs.0", "convs.1"]),
        ("shared#2", ["convs.1"]),
        ("shared#2:output", ["shared#2:output"]),
        ("convs.1,-1,norms.1", ["convs.1"]),
    ],
)
def test_selected(layers, names, model, batch):
    assert list(plan_capture(model, batch, layers=layers).names) == names


def test_selected_tensors(model, batch):
    plan = plan_capture(model, batch, layers="convs.0:output,norms.0:output,1,embed:input,shared#2")
    with torch.inference_mode():
        history = Capture(model, plan).run(batch).history
        raw = model.convs[0](model.embed(batch.x), batch.edge_index)
        normed = model.norms[0](raw)
        last = F.relu(model.norms[1](model.convs[1](normed.relu(), batch.edge_index)))
        expected = [batch.x, raw, normed, normed.relu(), last]
    assert [torch.equal(*pair) for pair in zip(history, expected, strict=True)] == [True] * 5


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("3", r"--layers 3: no such position, there are 3 layers"),
        ("-4", r"--layers -4: no such position"),
        ("3:", r"--layers 3:: selects none of 3 layers"),
        ("::0", r"step of 0"),
        ("conv.0", r"--layers conv\.0: no layer .* did you mean convs\.0"),
        ("unused", r"no module that ran"),
        ("", r"empty"),
        ("convs.0,", r"empty"),
        ("out", r"the output of 'out' is \[5, 2\]; expected floating point with 31 rows"),
        ("ou*:input", r"the input of 'out' is \[5, 5\]"),
    ],
)
def test_refused(layers, message, model, batch):
    with pytest.raises(CaptureError, match=message):
        plan_capture(model, batch, layers=layers)


def test_names_work_without_message_passing(batch):
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(7, 4), nn.Linear(4, 2)

        def forward(self, x, batch):
            return global_mean_pool(self.lin2(self.lin1(x).relu()), batch)

    model = Mlp()
    assert plan_capture(model, batch, layers="lin*").widths == (4, 2)
    with pytest.raises(CaptureError, match="no message-passing layers"):
        plan_capture(model, batch, layers="lin1,-1")
