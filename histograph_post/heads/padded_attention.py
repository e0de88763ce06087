"""Attention inside each graph with plain operations only, for programs that are exported.

Everything is padded to the largest graph of the batch, whose size the program finds when it runs.
That is slower on graphs of mixed sizes than :mod:`.node_attention`, and gives the same result.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from .ragged import Graphs


def padded_attention(projected: Tensor, graphs: Graphs, heads: int, *, zero_token: bool) -> Tensor:
    """Attend from every node to the nodes of its graph, without dropout: ``[num_nodes, dim]``.

    Args:
        projected: Queries, keys and values side by side, ``[num_nodes, 3 * dim]``.
        graphs: Which graph each node belongs to.
        heads: Attention heads.
        zero_token: Add a key and value of zeros to every graph.
    """
    width = cast(int, graphs.counts.max().item())  # not known until the program runs
    torch._check(width >= 1)
    starts = graphs.counts.cumsum(0) - graphs.counts  # [num_graphs]
    within = torch.arange(projected.size(0), device=projected.device) - graphs.spread(starts)
    slots = graphs.index * width + within  # [num_nodes]
    padded = projected.new_zeros(graphs.num_graphs * width, projected.size(1))
    padded = padded.index_copy(0, slots, projected).view(graphs.num_graphs, width, 3, heads, -1)
    query, key, value = padded.permute(2, 0, 3, 1, 4).unbind(0)  # [num_graphs, heads, width, d]
    occupied = torch.arange(width, device=slots.device) < graphs.counts.unsqueeze(-1)
    if zero_token:
        key, value = (functional.pad(rows, (0, 0, 0, 1)) for rows in (key, value))
        occupied = functional.pad(occupied, (0, 1), value=True)  # [num_graphs, width + 1]
    scores = query @ key.transpose(2, 3) / math.sqrt(query.size(-1))
    scores = scores.masked_fill(~occupied[:, None, None], -math.inf)
    context = scores.softmax(-1) @ value  # [num_graphs, heads, width, d]
    context = context.transpose(1, 2).reshape(graphs.num_graphs * width, -1)
    return context.index_select(0, slots)  # [num_nodes, dim]
