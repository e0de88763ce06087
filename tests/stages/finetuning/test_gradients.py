"""Gradients through the captured layers are those of the same network written by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch
from torch_geometric.nn import BatchNorm, GCNConv, global_mean_pool

import histograph_post as hg
from histograph_post.capture import plan_capture
from histograph_post.heads.standardize import Standardizer
from histograph_post.training.networks import GraphInputs, HistoryNetwork, checkpoint_layers


class Own(nn.Module):
    """A user's model: functional activations, one of them in place, a shared layer, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = GCNConv(4, 6), GCNConv(6, 6)
        self.norm = BatchNorm(6)
        self.classifier = nn.Linear(6, 1)

    def layers(self, x: Tensor, edge_index: Tensor) -> list[Tensor]:
        one = torch.relu(self.first(x, edge_index))
        two = torch.relu(self.norm(self.shared(one, edge_index)))
        three = one + torch.tanh(self.shared(two, edge_index))
        return [x, one, two, three]

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = F.relu(self.first(x, edge_index), inplace=True)
        first = x
        x = self.norm(self.shared(x, edge_index)).relu_()
        x = first + torch.tanh(self.shared(x, edge_index))
        return self.classifier(global_mean_pool(x, batch))


@pytest.fixture
def batch() -> Batch:
    return Batch.from_data_list(hg.load_data("demo:", args={"num_graphs": 6}).graphs)


@pytest.fixture
def network(batch: Batch) -> HistoryNetwork:
    torch.manual_seed(0)
    backbone = Own()
    plan = plan_capture(backbone, batch)
    head = hg.HistoGraphHead(plan.widths, 1, dim=8, heads=2)
    standardizer = Standardizer(plan.widths)
    standardizer.mean.uniform_(-1, 1)
    standardizer.scale.uniform_(0.5, 2)
    return HistoryNetwork(backbone, plan, head, standardizer)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }  # fmt: skip


def test_gradients_are_those_of_a_network_written_by_hand(
    network: HistoryNetwork, batch: Batch
) -> None:
    by_hand = copy.deepcopy(network.backbone).train()
    head = copy.deepcopy(network.readout.head).train()
    network.train()
    targets = torch.arange(6.0).unsqueeze(1)
    torch.manual_seed(0)  # of what is dropped
    found = network(GraphInputs(batch))
    F.mse_loss(found, targets).backward()

    names = network.capture.plan.names
    assert names == ("input", "first", "shared", "shared#2")
    layers = by_hand.layers(batch.x, batch.edge_index)
    means = network.standardizer.mean.split([4, 6, 6, 6])
    scales = network.standardizer.scale.split([4, 6, 6, 6])
    scaled = [(x - m) / s for x, m, s in zip(layers, means, scales, strict=True)]
    torch.manual_seed(0)
    expected = head(scaled, batch.batch, num_graphs=6)
    torch.testing.assert_close(found, expected)
    F.mse_loss(expected, targets).backward()
    ours, theirs = gradients(network.backbone), gradients(by_hand)
    assert ours.keys() == theirs.keys()
    assert {"first.lin.weight", "shared.lin.weight", "norm.module.weight"} <= ours.keys()
    assert "classifier.weight" not in ours  # no layer of the history depends on it
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)
        assert float(gradient.abs().max()) > 0
    for name, gradient in gradients(head).items():
        torch.testing.assert_close(gradients(network.readout.head)[name], gradient, msg=name)


class Messy(nn.Module):
    """Layers with dropout and running statistics inside: a second pass could count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(Block(4 if depth == 0 else 8) for depth in range(6))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


class Block(GCNConv):
    def __init__(self, width: int) -> None:
        super().__init__(width, 8)
        self.mlp = nn.Sequential(
            nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 8)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.mlp(super().forward(x, edge_index))


def kept_bytes(network: HistoryNetwork, batch: Batch) -> int:
    """Train one step; return the bytes that were kept for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = network(GraphInputs(batch)).square().sum()
    loss.backward()
    return sum(kept.values())


def test_layers_computed_again_give_the_same_gradients_with_less_memory(batch: Batch) -> None:
    torch.manual_seed(0)
    plain = Messy()
    plan = plan_capture(plain, batch)
    again = copy.deepcopy(plain)
    assert checkpoint_layers(again, plan) == 6
    head = hg.HistoGraphHead(plan.widths, 1, dim=8, heads=2)
    networks = [
        HistoryNetwork(backbone, plan, copy.deepcopy(head)).train() for backbone in (plain, again)
    ]
    memory = [kept_bytes(network, batch) for network in networks]
    assert memory[1] < 0.6 * memory[0]
    ours, theirs = gradients(again), gradients(plain)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, msg=name)
    # Running statistics are counted once, and weights are called what they were.
    for (name, ours_state), (other, state) in zip(
        again.state_dict().items(), plain.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours_state, state), name
