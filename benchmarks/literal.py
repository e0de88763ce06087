"""The paper's algorithm as one would write it down, with the weights of a head of this tool.

Every layer of every node is embedded, encoded and turned into a key; the nodes of a batch are
padded to its largest graph. It gives what
:class:`~histograph_post.heads.histograph.HistoGraphHead` gives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.utils import scatter, to_dense_batch

from histograph_post.heads.histograph import HistoGraphHead


def literal_forward(
    head: HistoGraphHead,
    history: Tensor,
    batch: Tensor,
    num_graphs: int,
    *,
    statistics: Tensor,
    pad_history: bool,
) -> Tensor:
    """Return the outputs of a batch of graphs: ``[num_graphs, out_dim]``.

    Args:
        head: Gives the weights and the options; for graphs, layers of one width, standardised.
        history: ``[num_nodes, L, D]``.
        batch: Graph of each node, sorted: ``[num_nodes]``.
        num_graphs: How many graphs there are.
        statistics: Of the layers, which are taken once for all epochs: ``[num_graphs, 3, L * D]``.
        pad_history: Pad all of the batch to the largest graph, and not for node attention only.
    """
    options, stage = head.options, head.layer_weights
    parts, size = options.layer_heads, options.dim // options.layer_heads
    if pad_history:
        padded, mask = to_dense_batch(history.flatten(1), batch, batch_size=num_graphs)
        history = padded.unflatten(-1, history.shape[1:])  # [num_graphs, largest, L, D]
    embedded = stage.last_embedding(history) + stage.encoding  # [..., L, dim]
    query = (embedded[..., -1, :] @ stage.query).unflatten(-1, (parts, size))
    key = (embedded @ stage.key).unflatten(-1, (parts, size))  # [..., L, parts, size]
    scores = torch.einsum("...pe,...lpe->...pl", query, key) / math.sqrt(size)
    if pad_history:
        sizes = mask.sum(1).view(-1, 1, 1)  # [num_graphs, 1, 1]
        scores = (scores * mask[..., None, None]).sum(1) / sizes  # [num_graphs, parts, L]
    else:
        scores = scatter(scores, batch, dim=0, dim_size=num_graphs, reduce="mean")
    weights = stage.normalize(scores)
    value = embedded.unflatten(-1, (parts, size))  # [..., L, parts, size]
    if pad_history:
        nodes = torch.einsum("gpl,gnlpe->gnpe", weights, value).flatten(2)
    else:
        nodes = torch.einsum("npl,nlpe->npe", weights[batch], value).flatten(1)
        nodes, mask = to_dense_batch(nodes, batch, batch_size=num_graphs)
    attended = _attend(head, nodes, mask)  # [num_graphs, largest, dim]
    if options.residual:
        attended = attended + nodes
    counts = mask.sum(1, keepdim=True)  # [num_graphs, 1]
    readout = (attended * mask.unsqueeze(-1)).sum(1) / counts  # [num_graphs, dim]
    if head.statistics is not None and head.all_layers is not None:
        described = head.statistics(statistics, counts.squeeze(1))  # [num_graphs, described_dim]
        base = head.all_layers(described)  # [num_graphs, dim]
    elif pad_history:
        last = (history[..., -1, :] * mask.unsqueeze(-1)).sum(1) / counts  # [num_graphs, D]
        base = stage.last_embedding(last)  # [num_graphs, dim]
    else:
        last = scatter(history[:, -1], batch, dim=0, dim_size=num_graphs, reduce="mean")
        base = stage.last_embedding(last)  # [num_graphs, dim]
    mixed = head.mixing(readout, base)
    if head.output_norm is not None:
        mixed = head.output_norm(mixed)
    outputs: Tensor = head.output(head.mlp(mixed))
    return outputs


def _attend(head: HistoGraphHead, nodes: Tensor, mask: Tensor) -> Tensor:
    """PyTorch's own multi-head attention, padded: ``[num_graphs, largest, dim]``."""
    attention = head.node_attention
    assert attention is not None  # a head without it has nothing to compare
    rows = nodes.transpose(0, 1)  # [largest, num_graphs, dim]
    attended, _ = functional.multi_head_attention_forward(
        rows,
        rows,
        rows,
        head.options.dim,
        head.options.heads,
        attention.in_projection.weight,
        attention.in_projection.bias,
        None,
        None,
        False,
        0.0,
        attention.out_projection.weight,
        attention.out_projection.bias,
        key_padding_mask=~mask,
        need_weights=False,
    )
    return attended.transpose(0, 1)
