from __future__ import annotations

import pytest
import torch
from torch import Tensor

from histograph_post.heads import history as history_module
from histograph_post.heads.history import LayerStack
from histograph_post.heads.layer_kernels import (
    layer_combine,
    layer_means,
    layer_project,
    layer_scores,
)
from histograph_post.heads.ragged import Graphs


def make_case() -> tuple[Tensor, Graphs, Tensor, Tensor]:
    torch.manual_seed(0)
    index = torch.tensor([0, 0, 0, 2, 2, 3])
    graphs = Graphs.from_batch(index, 6, 5, index.device)
    history = torch.randn(6, 3, 4).double()
    return history, graphs, torch.randn(6, 2, 4).double(), torch.randn(5, 2, 3).double()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
def test_products_are_those_of_einsum(
    heads: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "CPU_BLOCK_BYTES", block_bytes)
    history, graphs, filters, weights = make_case()
    filters, weights = filters[:, :heads], weights[:, :heads]
    mean, scale = torch.randn(3, 4).double(), torch.rand(3, 4).double()
    standard = (history - mean) * scale
    stack = LayerStack((history,), mean, scale, torch.float64)
    expected = graphs.sum(torch.einsum("nhd,nld->nhl", filters, standard))
    torch.testing.assert_close(layer_scores(stack, filters, graphs), expected)
    expected = torch.einsum("nhl,nld->nhd", weights[graphs.index], standard)
    torch.testing.assert_close(layer_combine(stack, weights, graphs), expected)
    torch.testing.assert_close(layer_means(stack, graphs), graphs.mean(standard))
    weight = torch.randn(5, 12).double()
    torch.testing.assert_close(layer_project(stack, weight), standard.flatten(1) @ weight.t())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("standardised", [True, False])
def test_gradcheck(stacked: bool, standardised: bool) -> None:
    history, graphs, filters, weights = make_case()
    tensors = [history] if stacked else list(history.unbind(1))
    maps = torch.randn(2, 12).double()
    inputs = [t.detach().clone().requires_grad_() for t in (filters, weights, maps, *tensors)]
    mean = torch.randn(3, 4).double() if standardised else None
    scale = torch.rand(3, 4).double() if standardised else None

    def run(filters: Tensor, weights: Tensor, maps: Tensor, *history: Tensor) -> tuple[Tensor, ...]:
        stack = LayerStack(history, mean, scale, torch.float64)
        return (
            layer_scores(stack, filters, graphs),
            layer_combine(stack, weights, graphs),
            layer_means(stack, graphs),
            layer_project(stack, maps),
        )

    assert torch.autograd.gradcheck(run, inputs)
