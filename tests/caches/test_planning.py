"""What is said of a cache before it is written."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from histograph_post.caches import planning
from histograph_post.caches.caching import cache
from histograph_post.caches.planning import estimate_seconds, plan_cache
from histograph_post.capture import edge_blocks
from histograph_post.data import from_graphs, load_data
from histograph_post.data.batching import PROBE_NODES
from histograph_post.splits import resolve_splits

from ..helpers import make_model


def test_the_clock_is_read_when_the_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load_data("demo:", args={"num_graphs": 20})
    model = make_model(num_layers=2)
    plan = plan_cache(model, dataset, resolve_splits(dataset, None), device="cpu")
    # The one device besides the processor that is everywhere.
    elsewhere = replace(plan, model=model.to("meta"), device=torch.device("meta"))
    events: list[str] = []
    clock = iter([10.0, 13.0])

    def read_clock() -> float:
        events.append("clock")
        return next(clock)

    monkeypatch.setattr(time, "perf_counter", read_clock)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: events.append(device.type))
    assert estimate_seconds(elsewhere) == 3.0  # one batch has all graphs
    assert events == ["meta", "clock", "meta", "clock"]


NODES = 8300


class Embedded(nn.Module):
    """Two layers; with weights of its own for every node, or without."""

    def __init__(self, *, per_node: bool = False) -> None:
        super().__init__()
        self.of_node = nn.Parameter(torch.randn(NODES, 3)) if per_node else None
        self.first, self.second = SAGEConv(3, 4), SAGEConv(4, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.of_node is not None:
            x = x + self.of_node
        return self.second(self.first(x, edge_index).relu(), edge_index)


@pytest.fixture(scope="module")
def large() -> Data:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(NODES - 100, (2, 3 * NODES), generator=random)
    x = torch.randn(NODES, 3, generator=random)
    return Data(x=x, edge_index=edges, y=torch.arange(NODES) % 2)


@pytest.mark.parametrize("per_node", [False, True])
def test_a_large_graph_is_tried_out_on_a_part_of_it(large: Data, per_node: bool) -> None:
    dataset = from_graphs([large])
    model = Embedded(per_node=per_node)
    seen: list[int] = []
    model.first.register_forward_hook(lambda _, given, output: seen.append(len(output)))
    plan = plan_cache(model, dataset, resolve_splits(dataset, None), device="cpu")
    assert [len(plan.capture.names), plan.own.width] == [3, 4]
    (note,) = plan.notes
    if per_node:  # such a model does not run on a part
        assert max(seen) == NODES
        assert "the whole of it" in note
        assert "size of tensor a (2048)" in note
    else:
        assert max(seen) == PROBE_NODES
        assert note == "a graph of 8,300 nodes: the model was tried out on 2,048 of its nodes"


def test_a_graph_of_many_edges_is_run_some_at_a_time(
    large: Data, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "MOST_EDGES", 2000)
    monkeypatch.setattr(edge_blocks, "MOST_EDGES", 2000)
    dataset, model, made = from_graphs([large]), Embedded().eval(), []
    model.second.register_propagate_forward_pre_hook(lambda _, given: made.append(given[0].shape))
    plan = plan_cache(model, dataset, resolve_splits(dataset, None), device="cpu")
    assert plan.notes[1] == ("a graph of 24,900 edges: run layer by layer, 16,600 edges at a time")
    made.clear()
    with torch.inference_mode():
        expected = model(large.x, large.edge_index)
    found = cache(model, [large], tmp_path / "cache", device="cpu")
    assert found is not None
    outputs = found.outputs()
    assert outputs is not None
    assert torch.allclose(torch.from_numpy(outputs), expected, atol=1e-6)
    assert max(edges for _, edges in made[1:]) <= 16_600
