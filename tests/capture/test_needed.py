"""Which weights the history depends on: all before the last captured point, and no other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.capture import plan_capture
from histograph_post.capture.checks import needed_parameters

from ..helpers import demo_graphs


class Net(nn.Module):
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
    model = Net().eval()
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
