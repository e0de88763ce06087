"""Readouts that need padded tensors, run on buckets of graphs of similar size."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .ragged import Bucket, Graphs, bucket_layout

#: Padding a bucket may have, in entries of its adjacency matrices (1 MB in single precision).
PADDING_BUDGET = 2**18
#: Graphs of more nodes than this are never padded to a common size.
LARGEST = 512


def pool_buckets(graphs: Graphs, pool: Callable[[Bucket, Tensor], Tensor]) -> Tensor:
    """Pool bucket by bucket: ``[num_graphs, width]``.

    Args:
        graphs: The graphs of the batch, none of them empty.
        pool: From a bucket and the numbers of its nodes in the batch, ``[num_nodes]``, to a row
            for each of its graphs, ``[size, width]``.
    """
    layout = bucket_layout(graphs, padding_budget=PADDING_BUDGET, largest=LARGEST)
    nodes = layout.order.split([len(bucket.slots) for bucket in layout.buckets])
    rows = [pool(bucket, own) for bucket, own in zip(layout.buckets, nodes, strict=True)]
    order = torch.cat([bucket.graphs for bucket in layout.buckets])  # [num_graphs]
    return torch.cat(rows)[order.argsort()]  # [num_graphs, width]


def dense_adjacency(
    bucket: Bucket, nodes: Tensor, edge_index: Tensor, *, num_nodes: int, dtype: torch.dtype
) -> Tensor:
    """Return the adjacency matrices of a bucket's graphs, ``[size, width, width]``.

    Args:
        bucket: The bucket.
        nodes: The numbers of its nodes in the batch, ``[len(bucket.slots)]``.
        edge_index: The edges of the whole batch, ``[2, num_edges]``; a repeated edge counts twice.
        num_nodes: Number of nodes of the whole batch.
        dtype: Precision of the result.
    """
    size, width = len(bucket.graphs), bucket.width
    slots = nodes.new_full((num_nodes,), -1)  # [num_nodes], -1 outside of the bucket
    slots[nodes] = bucket.slots
    source, target = slots[edge_index]  # [num_edges] each
    inside = source >= 0
    entries = source[inside] * width + target[inside] % width  # [edges of the bucket]
    adjacency = torch.zeros(size * width * width, dtype=dtype, device=nodes.device)
    ones = torch.ones(len(entries), dtype=dtype, device=nodes.device)  # [edges of the bucket]
    return adjacency.index_add_(0, entries, ones).view(size, width, width)
