"""Passes that are not the one that was probed, and models that run in other ways."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import Capture, plan_capture
from histograph_post.errors import CaptureError


def parts(batch: Batch) -> tuple:
    return batch.x, batch.edge_index, batch.batch


class Changing(nn.Module):
    """A model whose forward pass can be changed after the plan was made."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(7, 6), GCNConv(6, 6)
        self.tail = [torch.tanh]
        self.skip = False

    def forward(self, x, edge_index, batch):
        x = self.conv1(x, edge_index).relu()
        x = x if self.skip else self.conv2(x, edge_index)
        for function in self.tail:
            x = function(x)
        return global_mean_pool(x, batch)


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ([torch.sigmoid], r"'conv2'.*step 1 after 'conv2' is sigmoid\(\), expected tanh\(\)"),
        ([lambda x: x + 1, torch.tanh], r"step 1 .* is add\(\), expected tanh\(\)"),
        ([lambda x: torch.tanh(x)[:, :3]], None),
        ([lambda x: torch.tanh(x[:, :3])], r"__getitem__\(\)"),
    ],
)
def test_another_pass_than_the_probe(tail, message, batch):
    model = Changing().eval()
    plan = plan_capture(model, batch)
    model.tail = tail
    capture = Capture(model, plan)
    if message is None:  # what comes after the capture does not matter
        assert capture.run(batch).history[-1].shape == (31, 6)
    else:
        with pytest.raises(CaptureError, match=message):
            capture.run(batch)
    assert _get_current_function_mode() is None


def test_a_layer_that_does_not_run(batch):
    model = Changing().eval()
    plan = plan_capture(model, batch)
    model.skip = True
    with pytest.raises(CaptureError, match="'conv1': input of conv2 did not come up"):
        Capture(model, plan).run(batch)


def test_a_plan_for_another_model(batch):
    plan = plan_capture(Changing(), batch)
    with pytest.raises(CaptureError, match="no module 'conv1'"):
        Capture(nn.Linear(2, 2), plan)
    other = Changing()
    other.conv1, other.conv2 = GCNConv(7, 5), GCNConv(5, 6)
    message = r"'conv1': input of conv2 is \[31, 5\], expected 31 rows of 6"
    with pytest.raises(CaptureError, match=message):
        Capture(other, plan).run(batch)


@pytest.mark.parametrize("late", ["attention", "encoder"])
def test_attention_in_the_readout_keeps_its_fused_kernel(late, batch):
    """A function that is watched makes attention round differently; it must have ended."""

    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(7, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x, edge_index, batch):
            x = torch.tanh(self.conv(x, edge_index))
            tokens = global_mean_pool(x, batch).unsqueeze(0)
            if late == "encoder":
                return self.encoder(tokens)
            return self.attention(tokens, tokens, tokens, need_weights=False)[0]

    model = Attentive().eval()
    plan = plan_capture(model, batch)
    assert plan.points[-1].function == "tanh"
    with torch.inference_mode():
        plain = model(*parts(batch))
        assert torch.equal(Capture(model, plan).run(batch).output, plain)


def test_a_model_that_enters_a_mode_of_its_own(batch):
    class OnDevice(Changing):
        def forward(self, x, edge_index, batch):
            x = self.conv1(x, edge_index).relu()
            with torch.device("cpu"):
                x = torch.tanh(self.conv2(x, edge_index)) + torch.zeros(1)
            return global_mean_pool(x, batch)

    model = OnDevice().eval()
    plan = plan_capture(model, batch)
    assert plan.points[-1].calls == ("tanh", "zeros", "add")
    with torch.inference_mode():
        last = Capture(model, plan).run(batch).history[-1]
        first = model.conv1(batch.x, batch.edge_index).relu()
        assert torch.equal(last, torch.tanh(model.conv2(first, batch.edge_index)))
    assert _get_current_function_mode() is None


def test_compiled_and_scripted_models(batch):
    model = Changing().eval()
    compiled = torch.compile(model, backend="eager")
    plan = plan_capture(compiled, batch)
    assert plan == plan_capture(model, batch)
    assert torch.equal(Capture(compiled, plan).run(batch).output, model(*parts(batch)))
    model.conv1.lin.compile(backend="eager")
    with pytest.raises(
        CaptureError, match=r"module 'conv1\.lin' is compiled.*before torch\.compile"
    ):
        plan_capture(model, batch)
    scripted = Changing()
    scripted.act = torch.jit.script(nn.ReLU())
    with pytest.raises(CaptureError, match="module 'act' is a TorchScript"):
        plan_capture(scripted, batch)


def test_lazy_parameters(batch):
    model = Changing()
    model.conv1 = GCNConv(-1, 6)
    with pytest.raises(CaptureError, match=r"'conv1\.lin\.weight' has no values yet"):
        plan_capture(model, batch)
