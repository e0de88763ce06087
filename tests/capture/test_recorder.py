"""Capture at run time: gradients, training mode, other batches, and no traces."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv, GraphNorm, global_mean_pool

from histograph_post.capture import Capture, plan_capture
from histograph_post.errors import ModelError


class Net(nn.Module):
    """A functional tail, dropout, batch norm, and an in-place activation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(7, 6)
        self.conv1, self.conv2 = GCNConv(6, 6), GCNConv(6, 6)
        self.norm1, self.norm2 = nn.BatchNorm1d(6), GraphNorm(6)
        self.out = nn.Linear(6, 2)

    def activations(self, x, edge_index, batch):
        x0 = self.embed(x)
        x1 = self.norm1(self.conv1(x0, edge_index))
        x1 = F.dropout(F.relu(x1), p=0.4, training=self.training)
        x2 = x1 + self.norm2(self.conv2(x1, edge_index), batch)
        x2 = F.relu_(x2)
        return [x0, x1, F.dropout(x2, p=0.4, training=self.training)]

    def forward(self, x, edge_index, batch):
        return self.out(global_mean_pool(self.activations(x, edge_index, batch)[-1], batch))


def parts(batch: Batch) -> tuple:
    return batch.x, batch.edge_index, batch.batch


def state(model: nn.Module) -> dict:
    return copy.deepcopy(model.state_dict())


def is_watched(model: nn.Module) -> bool:
    return any("forward" in vars(module) for module in model.modules())


def assert_same_state(model: nn.Module, before: dict) -> None:
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_nothing_about_the_model_changes(batch):
    model = Net().train()
    model.norm1.eval()  # a mode of its own
    for parameter in model.conv1.parameters():
        parameter.requires_grad_(False)
    before, modes = state(model), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    plan = plan_capture(model, batch)
    assert [module.training for module in model.modules()] == modes
    model.eval()
    with torch.inference_mode(), Capture(model, plan) as capture:
        for _ in range(3):
            capture.run(batch)
    assert_same_state(model, before)
    assert not is_watched(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.conv1.parameters())


def test_a_probe_leaves_no_state_behind(batch):
    class Stateful(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("passes", torch.zeros(1))
            self.last = None

        def forward(self, x, edge_index, batch):
            self.passes += torch.rand(1)
            self.last = super().forward(x, edge_index, batch)
            return self.last

    model = Stateful()
    random = torch.get_rng_state()
    plan_capture(model, batch)
    assert model.passes == 0
    assert model.last is None
    assert torch.equal(torch.get_rng_state(), random)


def test_a_failing_probe_is_watched_no_more(batch):
    model = Net()
    model.out = nn.Linear(5, 2)
    with pytest.raises(ModelError):
        plan_capture(model, batch)
    assert not is_watched(model)
    assert model.training
    assert _get_current_function_mode() is None


def test_a_failing_run_is_watched_no_more(batch):
    model = Net()
    plan = plan_capture(model, batch)
    broken = batch.clone()
    broken.x = broken.x[:, :3]
    with pytest.raises(ModelError), Capture(model, plan) as capture:
        capture.run(broken)
    assert not is_watched(model)
    assert _get_current_function_mode() is None


def test_one_graph_and_sixty_four(graphs):
    model = Net().eval()
    plan = plan_capture(model, Batch.from_data_list(graphs))
    many = (graphs * 13)[:64]
    with torch.inference_mode(), Capture(model, plan) as capture:
        together = capture.run(Batch.from_data_list(many)).history
        alone = [capture.run(Batch.from_data_list([graph])).history for graph in many]
    for layer, rows in enumerate(together):
        torch.testing.assert_close(torch.cat([history[layer] for history in alone]), rows)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_through_the_history(training, batch):
    model = Net().train(training).double()
    batch.x = batch.x.double()
    plan = plan_capture(model, batch)
    twin = copy.deepcopy(model)

    torch.manual_seed(3)
    captured = Capture(model, plan).run(batch)
    sum((layer**2).sum() for layer in captured.history).backward()
    torch.manual_seed(3)
    expected = twin.activations(*parts(batch))
    sum((layer**2).sum() for layer in expected).backward()

    for layer, wanted in zip(captured.history, expected, strict=True):
        assert torch.equal(layer, wanted)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        if name.startswith("out"):
            assert one.grad is None
        else:
            torch.testing.assert_close(one.grad, other.grad)
    assert_same_state(model, state(twin))  # batch norm has seen the same batch, once


def test_gradients_of_a_loss_on_the_output(batch):
    model = Net().eval()
    plan = plan_capture(model, batch)
    Capture(model, plan).run(batch).output.sum().backward()
    captured = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(*parts(batch)).sum().backward()
    for one, parameter in zip(captured, model.parameters(), strict=True):
        assert torch.equal(one, parameter.grad)


def test_a_pass_that_is_repeated_for_its_gradients(batch):
    class Checkpointed(Net):
        def forward(self, x, edge_index, batch):
            call = super().forward
            return checkpoint(call, x, edge_index, batch, use_reentrant=False)

    model = Checkpointed().eval()
    plan = plan_capture(model, batch)
    with Capture(model, plan) as capture:
        captured = capture.run(batch)
        captured.output.sum().backward()
    assert torch.equal(captured.history[-1], model.activations(*parts(batch))[-1])


def test_planning_inside_inference_mode(batch):
    model = Net().eval()
    with torch.inference_mode():
        inside = plan_capture(model, Batch.from_data_list(batch.to_data_list()))
    assert inside == plan_capture(model, batch)


def test_history_is_a_copy(batch):
    model = Net().eval()
    plan = plan_capture(model, batch, layers="embed:input,0,-1")
    with torch.no_grad():
        captured = Capture(model, plan).run(batch)
    captured.history[0].zero_()
    assert batch.x.abs().sum() > 0
    assert all(layer.is_contiguous() for layer in captured.history)
