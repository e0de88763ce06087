from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from histograph_post.heads.histograph import large_graphs
from histograph_post.heads.histograph.large_graphs import Landmarks
from histograph_post.heads.histograph.node_attention import BLOCK_WEIGHTS, NodeAttention
from histograph_post.heads.ragged import Graphs

from .conftest import graphs_of

SIZES = (3, 1, 12, 0, 7, 7, 30, 2)
DIM = 12


def make_nodes(sizes: Sequence[int] = SIZES) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(sizes), DIM, generator=generator, dtype=torch.float64)


def make_pair(**options: Any) -> tuple[NodeAttention, nn.MultiheadAttention]:
    """Our module and PyTorch's, with the same weights."""
    torch.manual_seed(0)
    ours = NodeAttention(DIM, 3, **options).double()
    theirs = nn.MultiheadAttention(
        DIM, 3, add_zero_attn=options.get("zero_token", False), dtype=torch.float64
    )
    for bias in (ours.in_projection.bias, ours.out_projection.bias):
        nn.init.normal_(bias)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(ours.in_projection.weight)
        theirs.in_proj_bias.copy_(ours.in_projection.bias)
        theirs.out_proj.weight.copy_(ours.out_projection.weight)
        theirs.out_proj.bias.copy_(ours.out_projection.bias)
    return ours, theirs


def one_by_one(theirs: nn.MultiheadAttention, nodes: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [
        theirs(part, part, part, need_weights=False)[0] if len(part) else part
        for part in nodes.split(list(sizes))
    ]


LAYOUTS = [(0, 10**6), (40, 10**6), (10**6, 10**6), (0, 0), (40, 6), (1 << 14, 128)]


@pytest.mark.parametrize("zero_token", [False, True])
@pytest.mark.parametrize(("padding_budget", "large_graph"), LAYOUTS)
class TestAnyBucketLayout:
    def test_nodes(self, padding_budget: int, large_graph: int, zero_token: bool) -> None:
        ours, theirs = make_pair(zero_token=zero_token)
        ours.padding_budget, ours.large_graph = padding_budget, large_graph
        self.compare(ours, theirs, ours.forward, torch.cat)

    def test_pooled(self, padding_budget: int, large_graph: int, zero_token: bool) -> None:
        def means(parts: list[Tensor]) -> Tensor:
            return torch.stack([p.mean(0) if len(p) else torch.zeros(DIM).double() for p in parts])

        ours, theirs = make_pair(zero_token=zero_token)
        ours.padding_budget, ours.large_graph = padding_budget, large_graph
        self.compare(ours, theirs, ours.pool, means)

    def compare(
        self, ours: NodeAttention, theirs: nn.MultiheadAttention, run: Any, gather: Any
    ) -> None:
        nodes = make_nodes().requires_grad_()
        expected = gather(one_by_one(theirs, nodes, SIZES))
        probe = torch.randn(expected.shape, dtype=torch.float64)
        (expected * probe).sum().backward()
        expected_gradient, nodes.grad = nodes.grad, None
        output = run(nodes, graphs_of(SIZES))
        (output * probe).sum().backward()
        torch.testing.assert_close(output, expected)
        torch.testing.assert_close(nodes.grad, expected_gradient)
        for mine, wanted in (
            (ours.in_projection.weight.grad, theirs.in_proj_weight.grad),
            (ours.in_projection.bias.grad, theirs.in_proj_bias.grad),
            (ours.out_projection.weight.grad, theirs.out_proj.weight.grad),
            (ours.out_projection.bias.grad, theirs.out_proj.bias.grad),
        ):
            torch.testing.assert_close(mine, wanted)

    def test_received(self, padding_budget: int, large_graph: int, zero_token: bool) -> None:
        ours, theirs = make_pair(zero_token=zero_token)
        ours.padding_budget, ours.large_graph = padding_budget, large_graph
        nodes = make_nodes()
        expected = [
            theirs(part, part, part)[1].mean(0)[: len(part)] if len(part) else part[:, 0]
            for part in nodes.split(SIZES)
        ]
        received = ours.received(nodes, graphs_of(SIZES))
        torch.testing.assert_close(received, torch.cat(expected))


class TestDropout:
    @pytest.mark.parametrize("large_graph", [0, 128])
    def test_a_dropped_key_is_seen_by_nobody(self, large_graph: int) -> None:
        attention, _ = make_pair(key_dropout=0.5)
        attention.train().large_graph = large_graph
        nodes = make_nodes([20]).requires_grad_()
        torch.manual_seed(3)
        output = attention(nodes, graphs_of([20]))
        seen = torch.stack(
            [
                torch.autograd.grad(row.sum(), nodes, retain_graph=True)[0].abs().sum(1)
                for row in output
            ]
        )  # [queries, nodes]
        seen.fill_diagonal_(0)  # a node always uses its own query
        dropped = (seen == 0).all(0)
        assert 0 < dropped.sum() < 20
        assert (seen[:, ~dropped].fill_diagonal_(1) > 0).float().mean() > 0.9

    @pytest.mark.parametrize("large_graph", [0, 128])
    @pytest.mark.parametrize("method", ["forward", "pool"])
    def test_never_all_keys_of_a_graph(self, large_graph: int, method: str) -> None:
        attention, _ = make_pair(key_dropout=0.99)
        attention.train().large_graph = large_graph
        output = getattr(attention, method)(make_nodes(), graphs_of(SIZES))
        assert output.isfinite().all()

    @pytest.mark.parametrize("large_graph", [0, 128])
    def test_pooled_dropout_is_unbiased(self, large_graph: int) -> None:
        attention, _ = make_pair(dropout=0.3)
        attention.large_graph = large_graph
        nodes, graphs = make_nodes([40]), graphs_of([40])
        expected = attention.eval().pool(nodes, graphs)
        attention.train()
        torch.manual_seed(0)
        samples = torch.stack([attention.pool(nodes, graphs) for _ in range(200)])
        assert samples.std(0).min() > 0
        torch.testing.assert_close(samples.mean(0), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_memory_of_a_large_graph_is_linear(dropout: float) -> None:
    attention = NodeAttention(16, 2, dropout=dropout)
    nodes = torch.randn(6000, 16, requires_grad=True)
    graphs = graphs_of([6000])

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.numel = max([self.numel, *sizes])
            return result

    with Largest() as largest:
        attention.pool(nodes, graphs).sum().backward()
        attention(nodes, graphs).sum().backward()
    assert largest.numel <= max(BLOCK_WEIGHTS, 6000 * 16 * 3)  # not 2 * 6000 * 6000


@pytest.mark.parametrize("zero_token", [False, True])
def test_many_edges_are_handled_some_at_a_time(
    monkeypatch: pytest.MonkeyPatch, zero_token: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    projected = torch.randn(30, 3, 2, 4, generator=random).requires_grad_()
    edges = torch.randint(28, (2, 200), generator=random)
    edges[1, :50] = 3  # more than are handled at a time
    weights = torch.randn(30, 8, generator=random)
    whole = large_graphs.attend_along_edges(projected, edges, zero_token)
    (expected,) = torch.autograd.grad((whole * weights).sum(), projected)
    monkeypatch.setattr(large_graphs, "EDGES_AT_ONCE", 16)
    parts = large_graphs.attend_along_edges(projected, edges, zero_token)
    torch.testing.assert_close(parts, whole)
    (gradient,) = torch.autograd.grad((parts * weights).sum(), projected)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("kind", ["exact", "landmark", "neighbors"])
def test_what_is_dropped_is_dropped_while_training_only(kind: str) -> None:
    torch.manual_seed(0)
    attention = NodeAttention(8, 2, dropout=0.3, key_dropout=0.3)
    nodes, edges = torch.randn(9, 8), torch.randint(9, (2, 40))
    graphs = Graphs.from_batch(None, 9, 1, nodes.device)
    groups = torch.arange(9) % 4
    landmarks = Landmarks.of(nodes, groups, graphs, 4, np.array([True]))
    reach = {"exact": None, "landmark": landmarks, "neighbors": edges}[kind]
    once, again = (attention(nodes, graphs, reach) for _ in range(2))
    assert once.isfinite().all()
    assert not torch.allclose(once, again)
    attention.eval()
    assert torch.equal(attention(nodes, graphs, reach), attention(nodes, graphs, reach))
