"""Layers that take some edges at a time give what they give with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import (
    EdgeConv,
    GATv2Conv,
    GCNConv,
    GINConv,
    GraphNorm,
    MessagePassing,
    PNAConv,
    SAGEConv,
    TransformerConv,
)

from histograph_post.capture import plan_capture
from histograph_post.capture.edge_blocks import blocks_are_exact, edges_in_blocks

NODES, EDGES = 60, 400


def _edges() -> Tensor:
    edges = torch.randint(NODES - 3, (2, EDGES), generator=torch.Generator().manual_seed(0))
    edges[1, :90] = 7  # more than a block
    return edges  # the last nodes have none


def _rows(width: int, count: int = NODES) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(width))


class EdgeMean(MessagePassing):
    """Divides by something of all edges: not a sum of what each of them says."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j / x_j.std()


class Network(nn.Module):
    """Two layers, and a norm that sees all nodes."""

    def __init__(self, layer: type[MessagePassing]) -> None:
        super().__init__()
        self.first, self.second = GCNConv(8, 8), EdgeMean() if layer is EdgeMean else layer(8, 8)
        self.norm = GraphNorm(8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x, edge_index)).relu(), edge_index)


@pytest.mark.parametrize(
    "layer",
    [
        GCNConv(8, 4),
        GINConv(nn.Linear(8, 4)),
        GATv2Conv(8, 4, heads=2, edge_dim=3),
        TransformerConv(8, 4, heads=2, edge_dim=3),
        SAGEConv(8, 4, aggr="max"),
        PNAConv(8, 4, ["mean", "std"], ["amplification"], deg=torch.ones(100, dtype=torch.long)),
        EdgeConv(nn.Linear(16, 4)),
        SAGEConv(8, 4, flow="target_to_source"),
    ],
    ids=lambda layer: type(layer).__name__,
)
@torch.inference_mode()
def test_a_layer_gives_the_same_with_some_edges_at_a_time(layer: MessagePassing) -> None:
    x, edges = _rows(8), _edges()
    extra: tuple[Any, ...] = (_rows(3, EDGES),) if getattr(layer, "edge_dim", None) else ()
    whole = layer.eval()(x, edges, *extra)
    sizes: list[int] = []
    layer.register_propagate_forward_pre_hook(lambda _, given: sizes.append(given[0].shape[1]))
    with edges_in_blocks(layer, 50):
        parts = layer(x, edges, *extra)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-6)
    assert len(sizes) > 5
    assert max(sizes) < EDGES / 3
    assert layer(x, edges, *extra).equal(whole)
    assert sizes[-1] >= EDGES


@pytest.mark.parametrize(("layer", "exact"), [(SAGEConv, True), (EdgeMean, False)])
def test_what_sees_all_nodes_is_exact_and_what_sees_all_edges_is_found_out(
    layer: type[MessagePassing], exact: bool
) -> None:
    batch = Batch.from_data_list([Data(x=_rows(8), edge_index=_edges())])
    model = Network(layer).eval()
    assert blocks_are_exact(model, plan_capture(model, batch), batch) is exact


@torch.inference_mode()
def test_as_many_nodes_as_edges_are_not_mixed_up() -> None:
    x, weights = _rows(8, EDGES), _rows(1, EDGES).squeeze(1).abs()
    layer = GCNConv(8, 4, normalize=False).eval()
    whole = layer(x, _edges(), weights)
    with edges_in_blocks(layer, 50):
        assert layer(x, _edges(), weights).equal(whole)
