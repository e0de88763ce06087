"""Run a model on a graph of many edges in little memory: each layer takes some edges at a time.

A layer of PyTorch Geometric makes a message for every edge, then sums up those of each node: ten
million edges of 64 channels are 2.6 GB, several times over. Here the nodes are cut into ranges, and
a layer is given all edges into one range after the other. That is exact, not a sample: a node gets
all of its messages, in their order, and norms, virtual nodes and attention over all nodes see the
whole graph as ever, since every layer is finished before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import MessagePassing

from .checks import TOLERANCE
from .passes import apart, eager_module, frozen
from .points import CapturePlan
from .recorder import Capture

#: Graphs with more edges are run this way: 512 MB of messages with 64 channels.
MOST_EDGES = 1 << 21


@contextmanager
def edges_in_blocks(model: nn.Module, most: int | None) -> Iterator[None]:
    """Let every layer of a model take at most so many edges at a time; None for all of them.

    More than that only where they all lead to one node. Outputs differ by rounding at most, for
    layers that :func:`blocks_are_exact` was asked about.
    """
    if most is None:
        yield
        return
    found = eager_module(model).modules()
    layers = [module for module in found if isinstance(module, MessagePassing)]
    for layer in layers:
        layer.propagate = partial(_propagate, layer, layer.propagate, most)
    try:
        yield
    finally:
        for layer in layers:
            del layer.propagate  # the class has its own


def edges_at_once(
    model: nn.Module, plan: CapturePlan, batch: Batch, *, num_nodes: int, num_edges: int
) -> int | None:
    """Return how many edges the layers are to take at a time; None for all of them.

    ``batch`` has graphs, or parts of them, on which it is tried out whether that is exact;
    ``num_nodes`` and ``num_edges`` are those of the largest graphs.
    """
    if num_edges <= MOST_EDGES or not blocks_are_exact(model, plan, batch):
        return None
    # Every block makes rows for all nodes: with fewer edges than nodes it would be mostly those.
    return max(MOST_EDGES, 2 * num_nodes)


@torch.inference_mode()
def blocks_are_exact(model: nn.Module, plan: CapturePlan, batch: Batch) -> bool:
    """Say whether the history of a batch is the same with a few edges at a time, but for rounding.

    It is not for layers that look at all edges at once, or are not PyTorch Geometric's.
    """
    most = max(1, int(batch.num_edges) // 5)
    histories = []
    for at_once in (None, most):
        try:
            # Models may write into what they are given.
            with (
                edges_in_blocks(model, at_once),
                frozen(eager_module(model)),
                Capture(model, plan) as recorder,
            ):
                histories.append(recorder.run(batch.clone()).history)
        except Exception:  # of whatever kind: then the layers are not run in this way
            if at_once is None:
                raise
            return False
    return all(apart(whole, parts) <= TOLERANCE for whole, parts in zip(*histories, strict=True))


def _propagate(
    layer: MessagePassing,
    whole: Callable[..., Any],
    most: int,
    edge_index: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Do what ``layer.propagate`` does, for the edges into one range of nodes after the other."""
    if not isinstance(edge_index, Tensor) or edge_index.layout != torch.strided:
        return whole(edge_index, *args, **kwargs)  # a sparse matrix makes no messages
    target = edge_index[1 if layer.flow == "source_to_target" else 0]  # [num_edges]
    bounds = _ranges(torch.bincount(target), most)
    of_edges = _of_edges(layer, len(target), kwargs)
    if of_edges is None or len(bounds) < 2:
        return whole(edge_index, *args, **kwargs)
    result: Tensor | None = None
    for first, stop in bounds:
        inside = ((target >= first) & (target < stop)).nonzero().view(-1)  # [edges of the range]
        taken = {name: value.index_select(0, inside) for name, value in of_edges.items()}
        part = whole(edge_index.index_select(1, inside), *args, **kwargs | taken)
        if not isinstance(part, Tensor) or (result is not None and part.shape != result.shape):
            return whole(edge_index, *args, **kwargs)
        result = torch.empty_like(part) if result is None else result
        last = part.size(layer.node_dim) if (first, stop) == bounds[-1] else stop
        rows = (layer.node_dim, first, last - first)
        result.narrow(*rows).copy_(part.narrow(*rows))  # [nodes of the range, ...]
    return result


def _of_edges(
    layer: MessagePassing, num_edges: int, kwargs: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """Return what has a row per edge; None where there are as many nodes, so that nobody knows."""
    found = {}
    for name, value in kwargs.items():
        # PyTorch Geometric takes `x_i` and `x_j` of a message from the rows of nodes in `x`.
        of_nodes = not {f"{name}_i", f"{name}_j"}.isdisjoint(layer._user_args)
        for each in value if isinstance(value, tuple | list) else [value]:
            if isinstance(each, Tensor) and each.dim() and each.size(0) == num_edges:
                if of_nodes or each is not value:
                    return None
                found[name] = each
    return found


def _ranges(degrees: Tensor, most: int) -> list[tuple[int, int]]:
    """Cut nodes into ranges with at most ``most`` edges into each, or a single node."""
    ends = degrees.cumsum(0)  # [num_nodes]
    bounds, first, before = [], 0, 0
    while first < len(ends):
        stop = int(torch.searchsorted(ends, before + most, right=True))
        stop = max(stop, first + 1)
        bounds.append((first, stop))
        first, before = stop, int(ends[stop - 1])
    return bounds
