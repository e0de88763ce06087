"""Models of torch_geometric.nn.models as they are, with their forward passes replayed."""

from __future__ import annotations

import torch.nn.functional as F
from torch_geometric.nn.models import (
    GAT,
    GCN,
    GIN,
    LINKX,
    PMLP,
    EdgeCNN,
    GraphSAGE,
    SGFormer,
)

from .graphs import FEATURES, WIDTH
from .registry import add

BASIC = "PyG's basic models"


def basic_by_hand(model, data):
    """The last layer ends in the output, unless a norm, an activation or a join follows."""
    history = [data.x]
    for at, (conv, norm) in enumerate(zip(model.convs, model.norms, strict=True)):
        x = conv(history[-1], data.edge_index)
        if at < len(model.convs) - 1 or model.jk_mode is not None:
            x = model.act(norm(x))
        history.append(x)
    if model.jk_mode in ("max", "lstm"):
        history.append(model.jk(history[1:]))
    return history


for _kind in (GCN, GraphSAGE, GIN, GAT, EdgeCNN):
    add(
        f"PyG's {_kind.__name__}",
        BASIC,
        lambda kind=_kind: kind(FEATURES, WIDTH, num_layers=3, out_channels=4, norm="BatchNorm"),
        by_hand=basic_by_hand,
        data="one graph",
    )
for _jk in ("last", "cat", "max", "lstm"):
    add(
        f"PyG's GraphSAGE with jk={_jk}",
        BASIC,
        lambda jk=_jk: GraphSAGE(FEATURES, WIDTH, num_layers=3, out_channels=4, jk=jk),
        by_hand=basic_by_hand,
    )


def pmlp_by_hand(model, data):
    """A linear map without a module, then the one convolution of all layers, which consumes it."""
    history, x = [], data.x
    for at, lin in enumerate(model.lins):
        history.append(x @ lin.weight.t())
        x = model.conv(history[-1], data.edge_index) + lin.bias
        if at < len(model.lins) - 1:
            x = model.norm(x).relu()
    return [*history, x]


add("PyG's PMLP", BASIC, lambda: PMLP(FEATURES, WIDTH, 3, num_layers=3), by_hand=pmlp_by_hand)


def sgformer_by_hand(model, data):
    """Attention over all nodes is no message passing along edges; its result is added."""
    graph = model.graph_conv
    start = F.relu(graph.bns[0](graph.fcs[0](data.x)))
    history = [start]
    for conv, norm in zip(graph.convs, graph.bns[1:], strict=True):
        history.append(F.relu(norm(conv(history[-1], data.edge_index))) + start)
    everyone = model.trans_conv(data.x, data.batch)
    return [*history, model.graph_weight * history[-1] + (1 - model.graph_weight) * everyone]


# What the attention beside the convolutions came to is a state too; the aggregate holds it.
add(
    "PyG's SGFormer",
    BASIC,
    lambda: SGFormer(FEATURES, WIDTH, 3, trans_num_layers=2, gnn_num_layers=2),
    by_hand=sgformer_by_hand,
    either=True,
)

# Its first layer is given edges and a weight per node, no node's features.
add(
    "PyG's LINKX",
    BASIC,
    lambda: LINKX(12, FEATURES, WIDTH, 3, num_layers=2),
    data="one size",
    refused=r"--layers",
)
