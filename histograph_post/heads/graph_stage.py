"""A head up to what it makes of each graph, in compiled loops that read the history once.

Layer weights, node embeddings and node attention of a graph are made one after the other while its
history is in the processor's cache; the backward pass goes through it once more. What is kept for
it does not grow with the layers. Graphs are shared out among threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import compiled
from .folded_maps import Maps, as_maps
from .history import TableRows

if TYPE_CHECKING:
    from .compiled.graph_records import Table, Weighing
    from .compiled.loops import Shares

#: Graphs with more nodes than this are left to operations that share the work on one graph.
LARGEST_GRAPH = 1024

#: A map with more weights than this is left to a library of matrix products, which is made for it.
LARGEST_MAP = 3 << 16


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


def fits_loops(dim: int, width: int) -> bool:
    """Say whether the maps of a head are small enough for the loops to gain by it.

    Args:
        dim: Width of the head.
        width: Channels of the history.
    """
    return dim * max(dim, width) <= LARGEST_MAP


def can_read(rows: TableRows, dim: int) -> bool:
    """Say whether :func:`read_graphs` can read this history, and gains by it.

    Args:
        rows: The history.
        dim: Width of the head.
    """
    table = rows.table
    return (
        fits_loops(dim, table.size(2))
        and compiled.usable(table)
        and not table.requires_grad
        and table.stride()[1:] == (table.size(2), 1)
        and 0 < rows.sizes.max(initial=0) <= LARGEST_GRAPH
    )


def read_graphs(rows: TableRows, weights: Maps[Tensor], options: StageOptions) -> ReadGraphs:
    """Weigh and sum the layers of every node, and attend to the nodes of every graph.

    Args:
        rows: A history that :func:`can_read` allows.
        weights: The weights of the head.
        options: How scores become weights.
    """
    found = _ReadGraphs.apply(_Call.of(rows, weights, options), rows.table, *weights.values)
    return ReadGraphs(*found[:3])


@dataclass(frozen=True)
class _Call:
    """What forward and backward pass give to the loops alike, besides the history itself."""

    rows: TableRows
    weighing: Weighing
    shares: Shares
    options: StageOptions

    @classmethod
    def of(cls, rows: TableRows, weights: Maps[Tensor], options: StageOptions) -> _Call:
        """Lay out a call of the loops."""
        from .compiled.graph_records import Weighing
        from .compiled.loops import Shares
        from .layer_weights import NORMALIZATIONS

        _, layers, channels = rows.table.shape
        heads, width, _ = weights.layers.key.shape[-3:]
        dim = heads * width
        # The multiplications of a forward pass for each graph, about.
        of_node = 2 * heads * layers * channels + (3 * channels + 2 * dim) * dim
        of_pair = 2 * dim  # and as much for its exponential
        return cls(
            rows,
            Weighing(
                NORMALIZATIONS.index(options.normalization),
                np.float32(options.bound),
                np.float32(1 / math.sqrt(width)),
                np.float32(1 / math.sqrt(dim // options.node_heads)),
            ),
            Shares(rows.sizes * (of_node + of_pair * rows.sizes)),
            options,
        )

    def table(self, history: Tensor) -> Table:
        """Say where the graphs are in a history ``[rows, L, D]`` and in the batch."""
        from .compiled.graph_records import Table

        (num_rows, layers, channels), stride = history.shape, history.stride(0)
        values = history.detach().as_strided(((num_rows - 1) * stride + layers * channels,), (1,))
        return Table(values.numpy(), stride, layers, self.rows.starts, self.rows.ptr)


class _ReadGraphs(Function):
    """See :func:`read_graphs`; everything may have a dimension of copies of the head in front."""

    @staticmethod
    def forward(call: _Call, history: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        from .compiled.graph_loops import read_graphs
        from .compiled.graph_records import Kept, Results, TurnedMaps

        maps, table = as_maps(weights), call.table(history)
        *copies, heads, width, channels = maps.layers.key.shape
        nodes, count, dim = int(table.ptr[-1]), len(table.starts), heads * width
        empty = maps.nodes.new_empty
        kept = (
            empty(*copies, nodes, dim),
            empty(*copies, count, heads, table.num_layers),
            empty(*copies, nodes, dim),
            empty(*copies, nodes, 2 * dim),
            empty(*copies, count, call.options.node_heads, dim),
        )
        results = (empty(*copies, count, dim), empty(*copies, count, dim))
        asked = count if call.options.with_means else 0
        layer_means = empty(asked, table.num_layers * channels)
        turned = [value.mT for value in (maps.layers.query, maps.layers.embedding, maps.nodes)]
        inputs = (
            table,
            as_maps(_arrays(weights, copies)),
            TurnedMaps(*_arrays(turned, copies)),
            call.weighing,
        )
        outputs = (Kept(*_arrays(kept, copies)), Results(*_arrays(results, copies)))
        means = layer_means.numpy()
        parts = call.shares.parts(math.prod(copies))
        call.shares.run(parts, lambda: read_graphs(parts, *inputs, *outputs, means))
        return *results, layer_means, *kept

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, history, *weights = inputs
        _, _, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(history, *weights, *others[1:])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], call: _Call, history: Tensor, *weights: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        stacked = [
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(weights, in_dims[2:], strict=True)
        ]
        copies = as_maps(stacked).layers.query.shape[:-2]  # of this and of other levels of vmap
        flat = [value.flatten(0, len(copies) - 1) for value in stacked]
        contexts, means, layer_means, *kept = _ReadGraphs.apply(call, history, *flat)
        unfolded = [value.unflatten(0, copies) for value in (contexts, means, *kept)]
        found = (*unfolded[:2], layer_means, *unfolded[2:])
        return found, (0, 0, None, *(0,) * len(kept))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_contexts: Tensor | None, grad_means: Tensor | None, *none: None
    ) -> tuple[Tensor | None, ...]:
        from .compiled.graph_gradients import read_graphs_back
        from .compiled.graph_records import Kept, Results

        call, (history, *saved) = ctx.call, ctx.saved_tensors
        weights, kept = saved[: -len(Kept._fields)], saved[-len(Kept._fields) :]
        maps = as_maps(weights)
        *copies, dim, _ = maps.layers.query.shape
        grads = [
            maps.nodes.new_zeros(*copies, len(call.rows.sizes), dim) if grad is None else grad
            for grad in (grad_contexts, grad_means)
        ]
        # Each part has gradients of its own.
        parts = call.shares.parts(math.prod(copies))
        sizes = [value.numel() for value in weights]
        gradients = maps.nodes.new_empty(len(parts.bounds) - 1, sum(sizes))
        (turned_key,) = _arrays([maps.layers.key.flatten(-3, -2).mT], copies)  # [copies, D, dim]
        inputs = (
            call.table(history),
            as_maps(_arrays(weights, copies)),
            turned_key,
            call.weighing,
            Kept(*_arrays(kept, copies)),
            Results(*_arrays(grads, copies)),
            gradients.numpy(),
        )
        call.shares.run(parts, lambda: read_graphs_back(parts, *inputs))
        sums = gradients.sum(0).split(sizes)
        # A parameter keeps its gradient, and must not keep those of the others with it.
        own = (sum_.view(value.shape).clone() for sum_, value in zip(sums, weights, strict=True))
        return None, None, *own


def _arrays(values: Iterable[Tensor], copies: Sequence[int]) -> list[np.ndarray]:
    """View values with a dimension of copies in front, also where there is one without it."""
    arrays = [value.detach().contiguous().numpy() for value in values]
    return arrays if copies else [array[None] for array in arrays]
