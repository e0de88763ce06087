"""What a trained head makes of each node, before it is pooled and classified."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Readout
from .histograph import HistoGraphHead
from .history import History


@torch.no_grad()
def node_embeddings(
    head: nn.Module, history: History, batch: Tensor, *, num_graphs: int
) -> dict[str, Tensor]:
    """Return an embedding per node at each stage of a head, ``[num_nodes, width]``.

    HistoGraph has its layers weighed and summed, then its nodes attended. A readout that turns a
    graph into one row at once (SOPool, say) has no such stage.

    Args:
        head: A readout in evaluation mode.
        history: Standardised, if the head was trained that way: ``[num_nodes, L, D]`` or a list.
        batch: Graph of each node, sorted, ``[num_nodes]``.
        num_graphs: Number of graphs.
    """
    if isinstance(head, HistoGraphHead):
        inputs = head._read(history, batch, num_graphs, standardized=True)
        nodes, _ = head.layer_weights(inputs.stacks, inputs.last, inputs.graphs)
        stages = {"layers weighed": nodes}
        if head.node_attention is not None:
            stages["nodes attended"] = head._attend_nodes(nodes, inputs.graphs)
        return stages
    if isinstance(head, Readout) and type(head).node_rows is not Readout.node_rows:
        return {"node embeddings": head.node_rows(head._read(history))}
    return {}
