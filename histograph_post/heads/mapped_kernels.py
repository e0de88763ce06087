"""The products of the layer stage with several sets of layer weights, and the maps around them.

With maps ``m [heads, d, D]`` and ``w [heads, D, d]``, these are::

    mapped_scores(x, q, m)  = layer_scores(x, q m)      queries q [num_nodes, heads, d]
    mapped_combine(x, a, w, c) = layer_combine(x, a) w + c     c [num_graphs, heads, d]

What is between the two products has ``heads * D`` channels per node, which is as much as the
history of a shallow network. It is made for a block of nodes at a time, used up while it is in the
processor's cache, and made again in the backward pass unless the network is deep.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .history import LayerStack
from .layer_kernels import combine_block, fold_heads, layer_combine, layer_scores, scatter_gradient
from .ragged import Graphs

#: From so many layers on, summing them again costs more than keeping the sums.
DEEP = 16


def map_heads(rows: Tensor, maps: Tensor) -> Tensor:
    """Apply a linear map per head: ``[num_rows, heads, d]``, ``[heads, d, e]`` to ``[..., e]``."""
    if len(maps) == 1:
        # A batch of one matrix is several times slower where the sum runs over many rows.
        return (rows.squeeze(1) @ maps.squeeze(0)).unsqueeze(1)
    return torch.bmm(rows.transpose(0, 1), maps).transpose(0, 1)


def mapped_scores(stack: LayerStack, queries: Tensor, maps: Tensor, graphs: Graphs) -> Tensor:
    """Map the queries and sum their products with the history over the nodes of each graph.

    Args:
        stack: History of all nodes.
        queries: What each node asks, ``[num_nodes, heads, d]``.
        maps: From queries to channels of the history, ``[heads, d, D]``.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_graphs, heads, L]``.
    """
    if len(maps) == 1 or torch.compiler.is_exporting():
        return layer_scores(stack, map_heads(queries, maps), graphs)
    result: Tensor = _MappedScores.apply(queries, maps, graphs, stack, *stack.tensors)
    return result


def mapped_combine(
    stack: LayerStack, weights: Tensor, maps: Tensor, constant: Tensor, graphs: Graphs
) -> Tensor:
    """Sum the layers of each node with the weights of its graph, map the sums, add a constant.

    Args:
        stack: History of all nodes.
        weights: Layer weights per graph, ``[num_graphs, heads, L]``.
        maps: From channels of the history to those of each head, ``[heads, D, d]``.
        constant: Added to all nodes of a graph, ``[num_graphs, heads, d]``.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_nodes, heads, d]``.
    """
    if len(maps) == 1 or torch.compiler.is_exporting():
        return map_heads(layer_combine(stack, weights, graphs), maps) + graphs.spread(constant)
    mapped, _ = _MappedCombine.apply(weights, maps, constant, graphs, stack, *stack.tensors)
    found: Tensor = mapped
    return found


class _MappedScores(Function):
    """See :func:`mapped_scores`; the history is passed apart so that autograd sees it."""

    @staticmethod
    def forward(
        queries: Tensor, maps: Tensor, graphs: Graphs, stack: LayerStack, *history: Tensor
    ) -> Tensor:
        scores = queries.new_empty(stack.num_nodes, stack.num_layers, queries.size(1))
        for rows in stack.slices(2 * len(maps)):
            filters = torch.bmm(queries[rows].transpose(0, 1), maps)  # [heads, rows, D]
            torch.bmm(stack.block(rows), filters.permute(1, 2, 0), out=scores[rows])
        return graphs.sum(scores).transpose(1, 2)  # [num_graphs, heads, L]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        queries, maps, ctx.graphs, ctx.stack, *history = inputs
        ctx.save_for_backward(queries, maps, *history)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], queries: Tensor, maps: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        copies = info.batch_size
        queries = fold_heads(queries, in_dims[0], 1, copies)  # [num_nodes, copies * heads, d]
        maps = fold_heads(maps, in_dims[1], 0, copies)  # [copies * heads, d, D]
        scores = _MappedScores.apply(queries, maps, *others)
        return scores.unflatten(1, (copies, -1)), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, maps, *_ = ctx.saved_tensors
        graphs, stack = ctx.graphs, ctx.stack
        grad = grad.contiguous()  # [num_graphs, heads, L]
        grad_queries, grad_maps = torch.empty_like(queries), maps.new_zeros(maps.shape)
        for rows in stack.slices(2 * len(maps)):
            node_grad = grad.index_select(0, graphs.index[rows])  # [rows, heads, L]
            grad_filters = combine_block(node_grad, stack.block(rows)).transpose(0, 1)
            grad_queries[rows] = torch.bmm(grad_filters, maps.transpose(1, 2)).transpose(0, 1)
            grad_maps.baddbmm_(queries[rows].permute(1, 2, 0), grad_filters)
        filters = (torch.bmm(queries[rows].transpose(0, 1), maps) for rows in stack.slices())
        history = _history_gradient(stack, grad, filters, graphs, ctx.needs_input_grad[4:])
        return grad_queries, grad_maps, None, None, *history


class _MappedCombine(Function):
    """See :func:`mapped_combine`; the history is passed apart so that autograd sees it."""

    @staticmethod
    def forward(
        weights: Tensor,
        maps: Tensor,
        constant: Tensor,
        graphs: Graphs,
        stack: LayerStack,
        *history: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        heads, kept = weights.size(1), None
        if stack.num_layers >= DEEP:
            kept = weights.new_empty(stack.num_nodes, heads, stack.width)
        mapped = weights.new_empty(stack.num_nodes, heads, maps.size(2))
        for rows in stack.slices(2 * len(maps)):
            index = graphs.index[rows]
            node_weights = weights.index_select(0, index)  # [rows, heads, L]
            place = None if kept is None else kept[rows]
            combined = combine_block(node_weights, stack.block(rows), out=place)
            found = torch.bmm(combined.transpose(0, 1), maps).transpose(0, 1)  # [rows, heads, d]
            torch.add(found, constant.index_select(0, index), out=mapped[rows])
        return mapped, kept

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
    ) -> None:
        weights, maps, _, ctx.graphs, ctx.stack, *history = inputs
        _, kept = output
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weights, maps, kept, *history)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        weights: Tensor,
        maps: Tensor,
        constant: Tensor,
        *others: Any,
    ) -> tuple[tuple[Tensor, None], tuple[int, None]]:
        copies = info.batch_size
        weights = fold_heads(weights, in_dims[0], 1, copies)  # [num_graphs, copies * heads, L]
        maps = fold_heads(maps, in_dims[1], 0, copies)  # [copies * heads, D, d]
        constant = fold_heads(constant, in_dims[2], 1, copies)  # [num_graphs, copies * heads, d]
        mapped, _ = _MappedCombine.apply(weights, maps, constant, *others)
        return (mapped.unflatten(1, (copies, -1)), None), (1, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if grad is None:  # nothing depends on what came out
            return (None,) * len(ctx.needs_input_grad)
        weights, maps, kept, *_ = ctx.saved_tensors
        graphs, stack = ctx.graphs, ctx.stack
        back = maps.transpose(1, 2)  # [heads, d, D]
        grad_maps = maps.new_zeros(maps.shape)  # contiguous, or each head is multiplied by itself
        scores = weights.new_empty(stack.num_nodes, stack.num_layers, weights.size(1))
        for rows in stack.slices(2 * len(maps)):
            block, node_grad = stack.block(rows), grad[rows].transpose(0, 1)  # [heads, rows, d]
            if kept is None:
                node_weights = weights.index_select(0, graphs.index[rows])  # [rows, heads, L]
                combined = combine_block(node_weights, block)  # [rows, heads, D]
            else:
                combined = kept[rows]
            grad_maps.baddbmm_(combined.permute(1, 2, 0), node_grad)
            grad_combined = torch.bmm(node_grad, back)  # [heads, rows, D]
            torch.bmm(block, grad_combined.permute(1, 2, 0), out=scores[rows])
        filters = (torch.bmm(grad[rows].transpose(0, 1), back) for rows in stack.slices())
        history = _history_gradient(stack, weights, filters, graphs, ctx.needs_input_grad[5:])
        grad_weights = graphs.sum(scores).transpose(1, 2)  # [num_graphs, heads, L]
        return grad_weights, grad_maps, graphs.sum(grad), None, None, *history


def _history_gradient(
    stack: LayerStack,
    weights: Tensor,
    filters: Iterable[Tensor],
    graphs: Graphs,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradient with respect to the history: ``weights`` x ``filters [heads, rows, D]`` per node."""
    blocks = (
        torch.bmm(
            weights.index_select(0, graphs.index[rows]).transpose(1, 2), block.transpose(0, 1)
        )
        for rows, block in zip(stack.slices(), filters, strict=True)
    )  # [rows, L, D]
    return scatter_gradient(stack, blocks, needed)
