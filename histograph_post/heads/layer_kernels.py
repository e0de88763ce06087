"""The products of the layer stage, reading the history block by block.

With filters ``f [num_nodes, heads, D]`` and weights ``a [num_graphs, heads, L]``::

    layer_scores(x, f)[g, h, l] = sum over nodes n of graph g, channels d of  f[n, h, d] x[n, l, d]
    layer_combine(x, a)[n, h, d] = sum over layers l of  a[graph(n), h, l] x[n, l, d]

Each is the other's gradient, so forward and backward read the history and make nothing of its size.
Only a history that requires a gradient gets one of its size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .history import LayerStack
from .ragged import Graphs

#: PyTorch multiplies batches of matrices with fewer products than this without a BLAS, slowly.
UNBLOCKED_PRODUCT = 400

#: All rows at once: a program that is exported has no blocks, whose number would be fixed in it.
EVERYTHING = slice(None)


def layer_scores(stack: LayerStack, filters: Tensor, graphs: Graphs) -> Tensor:
    """Sum ``filters . history`` over the nodes of each graph.

    Args:
        stack: History of all nodes.
        filters: What each node looks for, ``[num_nodes, heads, D]``.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_graphs, heads, L]``.
    """
    if torch.compiler.is_exporting():
        return graphs.sum(torch.einsum("nhd,nld->nhl", filters, stack.block(EVERYTHING)))
    result: Tensor = _LayerScores.apply(filters, graphs, stack, *stack.tensors)
    return result


def layer_combine(stack: LayerStack, weights: Tensor, graphs: Graphs) -> Tensor:
    """Sum the layers of each node with the weights of its graph.

    Args:
        stack: History of all nodes.
        weights: Layer weights per graph, ``[num_graphs, heads, L]``.
        graphs: Which graph each node belongs to.

    Returns:
        ``[num_nodes, heads, D]``.
    """
    if torch.compiler.is_exporting():
        return torch.einsum("nhl,nld->nhd", graphs.spread(weights), stack.block(EVERYTHING))
    result: Tensor = _LayerCombine.apply(weights, graphs, stack, *stack.tensors)
    return result


def layer_means(stack: LayerStack, graphs: Graphs) -> Tensor:
    """Average every layer over the nodes of each graph: ``[num_graphs, L, D]``."""
    if torch.compiler.is_exporting():
        return graphs.mean(stack.block(EVERYTHING))
    sums: Tensor = _LayerSums.apply(graphs, stack, *stack.tensors)
    return sums / graphs.divisor.view(-1, 1, 1)


def layer_project(stack: LayerStack, weight: Tensor) -> Tensor:
    """Map all layers of each node, side by side, with ``weight [dim, L * D]``: ``[nodes, dim]``."""
    if torch.compiler.is_exporting():
        return torch.nn.functional.linear(stack.block(EVERYTHING).flatten(1), weight)
    result: Tensor = _LayerProject.apply(weight, stack, *stack.tensors)
    return result


def _scores(stack: LayerStack, filters: Tensor, graphs: Graphs) -> Tensor:
    # Several filters are twice as fast from the right, a single one three times from the left.
    if filters.size(1) > 1:
        scores = filters.new_empty(stack.num_nodes, stack.num_layers, filters.size(1))
        for rows in stack.slices():
            torch.bmm(stack.block(rows), filters[rows].transpose(1, 2), out=scores[rows])
        return graphs.sum(scores).transpose(1, 2)  # [num_graphs, heads, L]
    scores = filters.new_empty(stack.num_nodes, 1, stack.num_layers)
    for rows in stack.slices():
        torch.bmm(filters[rows], stack.block(rows).transpose(1, 2), out=scores[rows])
    return graphs.sum(scores)  # [num_graphs, 1, L]


def _combine(stack: LayerStack, weights: Tensor, graphs: Graphs) -> Tensor:
    combined = weights.new_empty(stack.num_nodes, weights.size(1), stack.width)
    for rows in stack.slices():
        node_weights = weights.index_select(0, graphs.index[rows])  # [rows, heads, L]
        combine_block(node_weights, stack.block(rows), out=combined[rows])
    return combined  # [num_nodes, heads, D]


def combine_block(weights: Tensor, block: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Sum the layers of a block ``[rows, L, D]`` by ``[rows, heads, L]``: ``[rows, heads, D]``."""
    heads, (rows, num_layers, width) = weights.size(1), block.shape
    if heads * num_layers * width >= UNBLOCKED_PRODUCT:
        return torch.bmm(weights, block, out=out)
    combined = weights.new_empty(rows, heads, width) if out is None else out
    layer_weights = weights.unsqueeze(-1).unbind(2)  # L of [rows, heads, 1]
    layers = block.unsqueeze(1).unbind(2)  # L of [rows, 1, D]
    torch.mul(layer_weights[0], layers[0], out=combined)
    for weight, layer in zip(layer_weights[1:], layers[1:], strict=True):
        combined.addcmul_(weight, layer)
    return combined


def _history_gradient(
    stack: LayerStack, weights: Tensor, filters: Tensor, graphs: Graphs, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Gradient of both products with respect to the history: ``weights`` x ``filters`` per node."""
    blocks = (
        torch.bmm(weights.index_select(0, graphs.index[rows]).transpose(1, 2), filters[rows])
        for rows in stack.slices()
    )
    return scatter_gradient(stack, blocks, needed)


def scatter_gradient(
    stack: LayerStack, blocks: Iterable[Tensor], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """Hand the gradients of standardised blocks ``[rows, L, D]`` back to the tensors."""
    gradients = [
        torch.empty_like(tensor) if wanted else None
        for tensor, wanted in zip(stack.tensors, needed, strict=True)
    ]
    if not any(needed):
        return tuple(gradients)
    for rows, block in zip(stack.slices(), blocks, strict=True):
        if stack.inverse_scale is not None:
            block = block.mul_(stack.inverse_scale)
        parts = (block,) if stack.stacked else block.unbind(1)
        for gradient, part in zip(gradients, parts, strict=True):
            if gradient is not None:
                gradient[rows] = part
    return tuple(gradients)


def fold_heads(values: Tensor, stacked: int | None, axis: int, copies: int) -> Tensor:
    """Make the stacked copies of a head more sets of weights: ``copies * heads`` on ``axis``.

    Args:
        values: One tensor for each copy along ``stacked``, or the same one for all.
        stacked: The axis along which the copies are stacked, if they are.
        axis: The axis of the sets of weights in each of them.
        copies: How many copies there are.
    """
    if stacked is None:
        values = values.unsqueeze(axis).expand(*values.shape[:axis], copies, *values.shape[axis:])
        return values.flatten(axis, axis + 1)
    return values.movedim(stacked, axis).flatten(axis, axis + 1)


class _LayerScores(Function):
    """See :func:`layer_scores`; the history is passed apart so that autograd sees it."""

    @staticmethod
    def forward(filters: Tensor, graphs: Graphs, stack: LayerStack, *history: Tensor) -> Tensor:
        return _scores(stack, filters, graphs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        filters, ctx.graphs, ctx.stack, *history = inputs
        ctx.save_for_backward(filters, *history)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], filters: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        folded = fold_heads(filters, in_dims[0], 1, info.batch_size)
        scores = _LayerScores.apply(folded, *others)  # [num_graphs, copies * heads, L]
        return scores.unflatten(1, (info.batch_size, -1)), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        filters, *_ = ctx.saved_tensors
        needs_filters, _, _, *needed = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_filters = _combine(ctx.stack, grad, ctx.graphs) if needs_filters else None
        history = _history_gradient(ctx.stack, grad, filters, ctx.graphs, tuple(needed))
        return grad_filters, None, None, *history


class _LayerCombine(Function):
    """See :func:`layer_combine`; the history is passed apart so that autograd sees it."""

    @staticmethod
    def forward(weights: Tensor, graphs: Graphs, stack: LayerStack, *history: Tensor) -> Tensor:
        return _combine(stack, weights, graphs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weights, ctx.graphs, ctx.stack, *history = inputs
        ctx.save_for_backward(weights, *history)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], weights: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        folded = fold_heads(weights, in_dims[0], 1, info.batch_size)
        combined = _LayerCombine.apply(folded, *others)  # [num_nodes, copies * heads, D]
        return combined.unflatten(1, (info.batch_size, -1)), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *_ = ctx.saved_tensors
        needs_weights, _, _, *needed = ctx.needs_input_grad
        grad = grad.contiguous()
        grad_weights = _scores(ctx.stack, grad, ctx.graphs) if needs_weights else None
        history = _history_gradient(ctx.stack, weights, grad, ctx.graphs, tuple(needed))
        return grad_weights, None, None, *history


class _LayerSums(Function):
    """The sums behind :func:`layer_means`."""

    @staticmethod
    def forward(graphs: Graphs, stack: LayerStack, *history: Tensor) -> Tensor:
        shape = (graphs.num_graphs, stack.num_layers, stack.width)
        sums = history[0].new_zeros(shape, dtype=stack.dtype)
        for rows in stack.slices():
            sums.index_add_(0, graphs.index[rows], stack.block(rows))
        return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.graphs, ctx.stack, *_ = inputs

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Tensor, None]:
        return _LayerSums.apply(*inputs), None  # the same for every copy of a head

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, _, *needed = ctx.needs_input_grad
        blocks = (grad.index_select(0, ctx.graphs.index[rows]) for rows in ctx.stack.slices())
        return None, None, *scatter_gradient(ctx.stack, blocks, tuple(needed))


class _LayerProject(Function):
    """See :func:`layer_project`."""

    @staticmethod
    def forward(weight: Tensor, stack: LayerStack, *history: Tensor) -> Tensor:
        projected = weight.new_empty(stack.num_nodes, weight.size(0))
        for rows in stack.slices():
            torch.mm(stack.block(rows).flatten(1), weight.t(), out=projected[rows])
        return projected

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        weight, ctx.stack, *history = inputs
        ctx.save_for_backward(weight, *history)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], weight: Tensor, *others: Any
    ) -> tuple[Tensor, int]:
        folded = fold_heads(weight, in_dims[0], 0, info.batch_size)
        projected = _LayerProject.apply(folded, *others)  # [num_nodes, copies * dim]
        return projected.unflatten(1, (info.batch_size, -1)), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *_ = ctx.saved_tensors
        _, _, *needed = ctx.needs_input_grad
        stack: LayerStack = ctx.stack
        grad_weight = torch.zeros_like(weight)
        for rows in stack.slices():
            grad_weight.addmm_(grad[rows].t(), stack.block(rows).flatten(1))
        shape = (stack.num_layers, stack.width)
        blocks = ((grad[rows] @ weight).unflatten(1, shape) for rows in stack.slices())
        return grad_weight, None, *scatter_gradient(stack, blocks, tuple(needed))
