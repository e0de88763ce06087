from __future__ import annotations

import pytest
import torch
from torch import Tensor

from histograph_post.heads import history as history_module
from histograph_post.heads import mapped_kernels
from histograph_post.heads.history import LayerStack
from histograph_post.heads.mapped_kernels import mapped_combine, mapped_scores
from histograph_post.heads.ragged import Graphs

NODES, LAYERS, WIDTH, SIZE = 6, 3, 4, 2


def make_case(heads: int) -> tuple[Tensor, Graphs, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    index = torch.tensor([0, 0, 0, 2, 2, 3])
    graphs = Graphs.from_batch(index, NODES, 5, index.device)
    history = torch.randn(NODES, LAYERS, WIDTH).double()
    queries = torch.randn(NODES, heads, SIZE).double()
    return (
        history,
        graphs,
        queries,
        torch.randn(5, heads, LAYERS).double(),
        torch.randn(heads, SIZE, WIDTH).double(),
    )


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("block_bytes", [1, 200, 1 << 20])
@pytest.mark.parametrize("deep", [1, 99], ids=["kept", "made again"])
def test_products_are_those_of_einsum(
    heads: int, block_bytes: int, deep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "CPU_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(mapped_kernels, "DEEP", deep)
    history, graphs, queries, weights, maps = make_case(heads)
    mean, scale = torch.randn(LAYERS, WIDTH).double(), torch.rand(LAYERS, WIDTH).double()
    standard = (history - mean) * scale
    stack = LayerStack((history,), mean, scale, torch.float64)
    expected = graphs.sum(torch.einsum("nhe,hed,nld->nhl", queries, maps, standard))
    torch.testing.assert_close(mapped_scores(stack, queries, maps, graphs), expected)
    back = maps.transpose(1, 2)
    constant = torch.randn(graphs.num_graphs, heads, back.size(2)).double()
    expected = torch.einsum("nhl,nld,hde->nhe", weights[graphs.index], standard, back)
    expected = expected + constant[graphs.index]
    torch.testing.assert_close(mapped_combine(stack, weights, back, constant, graphs), expected)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("standardised", [True, False])
@pytest.mark.parametrize("deep", [1, 99], ids=["kept", "made again"])
def test_gradcheck(
    stacked: bool, standardised: bool, deep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "CPU_BLOCK_BYTES", 200)
    monkeypatch.setattr(mapped_kernels, "DEEP", deep)
    history, graphs, queries, weights, maps = make_case(2)
    tensors = [history] if stacked else list(history.unbind(1))
    constant = torch.randn(graphs.num_graphs, 2, maps.size(1)).double()
    inputs = [
        tensor.detach().clone().requires_grad_()
        for tensor in (queries, weights, maps, constant, *tensors)
    ]
    mean = torch.randn(LAYERS, WIDTH).double() if standardised else None
    scale = torch.rand(LAYERS, WIDTH).double() if standardised else None

    def run(
        queries: Tensor, weights: Tensor, maps: Tensor, constant: Tensor, *history: Tensor
    ) -> tuple[Tensor, ...]:
        stack = LayerStack(history, mean, scale, torch.float64)
        return (
            mapped_scores(stack, queries, maps, graphs),
            mapped_combine(stack, weights, maps.transpose(1, 2), constant, graphs),
        )

    assert torch.autograd.gradcheck(run, inputs)
