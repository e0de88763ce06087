"""Graphs, and the one comparison most tests here make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from histograph_post.capture import Capture, CapturePlan, plan_capture

Expect = Callable[..., CapturePlan]


def random_graph(num_nodes: int, num_edges: int, generator: torch.Generator) -> Data:
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    return Data(
        x=torch.randn(num_nodes, 7, generator=generator),
        edge_index=edges,
        edge_attr=torch.randn(num_edges, 3, generator=generator),
        edge_weight=torch.rand(num_edges, generator=generator),
        atom=torch.randint(0, 5, (num_nodes,), generator=generator),
    )


@pytest.fixture(autouse=True)
def _same_weights_every_time() -> None:
    torch.manual_seed(0)


@pytest.fixture
def graphs() -> list[Data]:
    """Five graphs; one of a single node without edges."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(9, 22), (1, 0), (5, 12), (13, 31), (3, 4)]
    return [random_graph(nodes, edges, generator) for nodes, edges in sizes]


@pytest.fixture
def batch(graphs: list[Data]) -> Batch:
    return Batch.from_data_list(graphs)


@pytest.fixture
def expect(batch: Batch) -> Expect:
    """Plan on one batch, capture another, and compare with a forward pass written by hand."""

    def check(
        model: nn.Module,
        by_hand: Callable[[Batch], list[Tensor]],
        *,
        names: list[str] | None = None,
        layers: str = "auto",
        data: Batch | None = None,
    ) -> CapturePlan:
        data = batch if data is None else data
        model.eval()
        plan = plan_capture(model, data, layers=layers)
        later = data.clone()
        generator = torch.Generator().manual_seed(1)
        later.x = torch.randn(data.x.shape, generator=generator)
        with torch.inference_mode(), Capture(model, plan) as capture:
            history = capture.run(later).history
            expected = by_hand(later)
        assert [tuple(layer.shape) for layer in history] == [
            (later.num_nodes, layer[0].numel()) for layer in expected
        ]
        for position, (found, wanted) in enumerate(zip(history, expected, strict=True)):
            assert torch.equal(found, wanted.flatten(1)), f"layer {position}"
        assert list(plan.widths) == [layer.shape[1] for layer in history]
        if names is not None:
            assert list(plan.names) == names
        return plan

    return check
