"""A head up to what it makes of each graph, in compiled loops that read the history once.

Layer weights, node embeddings and node attention of a graph are made one after the other while its
history is in the processor's cache; the backward pass goes through it once more. Nothing of the
history's size is made, and graphs are shared out among threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import compiled
from .history import TableRows

if TYPE_CHECKING:
    from .compiled.graph_loops import Maps, Table, Weighing

#: Graphs with more nodes than this are left to operations that share the work on one graph.
LARGEST_GRAPH = 1024


class StageWeights(NamedTuple):
    """The weights of the stage, folded; see :class:`.compiled.graph_loops.Maps`."""

    query: Tensor
    query_bias: Tensor
    key: Tensor
    fixed_keys: Tensor
    embedding: Tensor
    offset: Tensor
    nodes: Tensor
    nodes_bias: Tensor


class StageOptions(NamedTuple):
    """How scores become weights, see :func:`~.layer_weights.normalize`."""

    normalization: str
    #: The radius of bounded weights, the smallest divisor of signed ones.
    bound: float
    #: Attention heads.
    node_heads: int
    #: Whether the means over the nodes of every layer are asked for.
    with_means: bool


class ReadGraphs(NamedTuple):
    """What the stage makes of graphs; zero for one that is empty."""

    #: What all heads of node attention find, averaged over the nodes, ``[num_graphs, dim]``.
    contexts: Tensor
    #: Mean of the node embeddings, ``[num_graphs, dim]``.
    means: Tensor
    #: Mean of the nodes of every layer, ``[num_graphs, L * D]``; of no graph if not asked for.
    layer_means: Tensor


def can_read(rows: TableRows) -> bool:
    """Say whether :func:`read_graphs` can read this history, and gains by it."""
    table = rows.table
    return (
        compiled.usable(table)
        and not table.requires_grad
        and table.stride()[1:] == (table.size(2), 1)
        and 0 < rows.sizes.max(initial=0) <= LARGEST_GRAPH
    )


def read_graphs(rows: TableRows, weights: StageWeights, options: StageOptions) -> ReadGraphs:
    """Weigh and sum the layers of every node, and attend to the nodes of every graph.

    Args:
        rows: A history that :func:`can_read` allows.
        weights: The weights of the head.
        options: How scores become weights.
    """
    found = _ReadGraphs.apply(rows.table, rows, options, *weights)
    return ReadGraphs(*found[:3])


class _ReadGraphs(Function):
    """See :func:`read_graphs`; everything may have a dimension of copies of the head in front."""

    @staticmethod
    def forward(
        table: Tensor, rows: TableRows, options: StageOptions, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        from .compiled.graph_loops import Kept, Results, read_graphs
        from .compiled.loops import Shares

        stage = StageWeights(*weights)
        copies = stage.query.shape[:-2]  # none, or one number
        (_, layers, channels), dim = table.shape, stage.query.size(-2)
        nodes, count, heads = int(rows.sizes.sum()), len(rows.sizes), stage.key.size(-3)
        empty = stage.query.new_empty
        kept = (
            empty(*copies, nodes, dim),
            empty(*copies, count, heads, layers),
            empty(*copies, nodes, heads * channels),
            empty(*copies, nodes, dim),
            empty(*copies, nodes, 2 * dim),
            empty(*copies, count, options.node_heads, dim),
        )
        contexts, means = empty(*copies, count, dim), empty(*copies, count, dim)
        layer_means = empty(count if options.with_means else 0, layers * channels)
        inputs = _inputs(rows, options, stage)
        outputs = (
            Kept(*(_array(value, copies) for value in kept)),
            Results(_array(contexts, copies), _array(means, copies)),
            layer_means.numpy(),
        )
        shares = Shares(_costs(rows, stage))
        shares.run(lambda _, first, stop: read_graphs(first, stop, *inputs, *outputs))
        return contexts, means, layer_means, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, ctx.rows, ctx.options, *weights = inputs
        _, _, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*weights, *others[1:])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], *inputs: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        table, rows, options, *weights = inputs
        stacked = [
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(weights, in_dims[3:], strict=True)
        ]
        found = _ReadGraphs.apply(table, rows, options, *stacked)
        return found, (0, 0, None, *(0,) * (len(found) - 3))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_contexts: Tensor | None, grad_means: Tensor | None, *_: None
    ) -> tuple[Tensor | None, ...]:
        from .compiled.graph_loops import Kept, Maps, Results, read_graphs_back
        from .compiled.loops import Shares

        stage, kept = StageWeights(*ctx.saved_tensors[:8]), ctx.saved_tensors[8:]
        rows, options = ctx.rows, ctx.options
        copies, dim = stage.query.shape[:-2], stage.query.size(-2)
        shape = (*copies, len(rows.sizes), dim)
        grads = [
            stage.query.new_zeros(shape) if grad is None else grad
            for grad in (grad_contexts, grad_means)
        ]
        inputs = _inputs(rows, options, stage)
        found = (
            Kept(*(_array(value, copies) for value in kept)),
            Results(*(_array(grad, copies) for grad in grads)),
        )
        shares = Shares(_costs(rows, stage))
        # Each part adds to gradients of its own.
        sums = [value.new_zeros(len(shares), *value.shape) for value in stage]
        arrays = Maps(*((grad if copies else grad.unsqueeze(1)).numpy() for grad in sums))
        shares.run(
            lambda part, first, stop: read_graphs_back(part, first, stop, *inputs, *found, arrays)
        )
        return None, None, None, *(grad.sum(0) for grad in sums)


def _inputs(
    rows: TableRows, options: StageOptions, stage: StageWeights
) -> tuple[Table, Maps, Weighing]:
    """Return the table, the maps and the weighing that the loops take."""
    from .compiled.graph_loops import Maps, Table, Weighing
    from .compiled.weight_loops import KINDS

    copies, (heads, width) = stage.query.shape[:-2], stage.key.shape[-3:-1]
    (num_rows, layers, channels), stride = rows.table.shape, rows.table.stride(0)
    values = rows.table.as_strided(((num_rows - 1) * stride + layers * channels,), (1,))
    table = Table(
        values.numpy(), stride, layers, rows.starts, np.concatenate([[0], np.cumsum(rows.sizes)])
    )
    weighing = Weighing(
        KINDS.index(options.normalization),
        np.float32(options.bound),
        np.float32(1 / math.sqrt(width)),
        np.float32(1 / math.sqrt(heads * width // options.node_heads)),
    )
    return table, Maps(*(_array(value, copies) for value in stage)), weighing


def _array(values: Tensor, copies: torch.Size) -> np.ndarray:
    """View values with a dimension of copies in front, also where there is one without it."""
    values = values.detach().contiguous()
    return (values if copies else values.unsqueeze(0)).numpy()


def _costs(rows: TableRows, stage: StageWeights) -> np.ndarray:
    """Return the multiplications of a forward pass for each graph, about: ``[num_graphs]``."""
    (dim, channels), (_, layers, _) = stage.query.shape[-2:], rows.table.shape
    copies, heads = stage.query[..., 0, 0].numel(), stage.key.size(-3)
    of_layers = 2 * heads * layers * channels
    of_maps = (3 * channels + 2 * dim) * dim
    of_pair = 2 * dim  # and twice as much for its exponential
    return copies * rows.sizes * (of_layers + of_maps + of_pair * rows.sizes)
