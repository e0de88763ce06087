"""Capture on the built-in models, against a forward pass written by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from histograph_post.capture import Capture, check_parity, plan_capture
from histograph_post.models import BUILT_IN, build_model


def graphs(count: int) -> list[Data]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        size = 3 + index % 9
        edges = torch.randint(0, size, (2, 3 * size), generator=generator)
        made.append(Data(x=torch.randn(size, 6, generator=generator), edge_index=edges))
    return made


def trained(kind: str, **args: object) -> nn.Module:
    """A model whose batch norms have seen data, as after training."""
    torch.manual_seed(0)
    model = build_model(kind, {"hidden": 16, "num_layers": 4, **args}, in_dim=6, out_dim=3)
    batch = Batch.from_data_list(graphs(20))
    for _ in range(3):
        model.train()(batch.x, batch.edge_index, batch=batch.batch)
    return model.eval()


def by_hand(model: nn.Module, batch: Batch, *, residual: bool) -> list[Tensor]:
    layers = [model.embedding(batch.x)]
    scale = model.residual_scale if residual else None
    for conv, norm in zip(model.convs, model.norms, strict=True):
        if type(conv).__name__ == "GPSConv":
            update = conv(layers[-1], batch.edge_index, batch.batch)
        else:
            update = torch.relu(norm(conv(layers[-1], batch.edge_index)))
        layers.append(update if scale is None else layers[-1] + scale * update)
    return layers


@pytest.mark.parametrize("pool", ["mean", "sum", "none"])
@pytest.mark.parametrize("residual", ["none", "scaled"])
@pytest.mark.parametrize("kind", BUILT_IN)
def test_history_equals_the_forward_by_hand(kind: str, residual: str, pool: str) -> None:
    model = trained(kind, residual=residual, pool=pool)
    batch = Batch.from_data_list(graphs(12))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    plan = plan_capture(model, batch)
    with torch.inference_mode():
        found = Capture(model, plan).run(batch).history
        expected = by_hand(model, batch, residual=residual != "none")
    assert len(found) == 5
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("kind", BUILT_IN)
def test_one_graph_alone_and_among_64(kind: str) -> None:
    model = trained(kind)
    many = graphs(64)
    plan = plan_capture(model, Batch.from_data_list(many[:4]))
    parity = check_parity(model, plan, many)
    assert parity.same_output
    assert parity.worst.max_rel < 1e-5
