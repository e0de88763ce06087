"""A head up to what it makes of each graph, in compiled loops that read the history once.

Layer weights, node embeddings and node attention of a graph are made one after the other while its
history is in the processor's cache; the backward pass goes through it once more. What is kept for
it does not grow with the layers. Graphs are shared out among threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import compiled
from .fast_path import LOOP_NORMALIZATIONS
from .folded_maps import Maps, as_maps
from .history import TableRows

if TYPE_CHECKING:
    from .compiled.graph_records import Kept, Results, Table, TurnedMaps

#: Graphs with more nodes than this are left to operations that share the work on one graph.
LARGEST_GRAPH = 1024


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


def read_graphs(rows: TableRows, weights: Maps[Tensor], options: StageOptions) -> ReadGraphs:
    """Weigh and sum the layers of every node, and attend to the nodes of every graph.

    Args:
        rows: A history that :func:`can_read` allows.
        weights: The weights of the head.
        options: How scores become weights.
    """
    heads, width = weights.layers.key.shape[-3:-1]
    stage = GraphStage(rows, options, layer_heads=heads, dim=heads * width)
    found = _ReadGraphs.apply(stage, rows.table, *weights.values)
    return ReadGraphs(*found[:3])


class GraphStage:
    """The graphs of a batch, as copies of a head read them in the loops, forward and back.

    Args:
        rows: A history that :func:`can_read` allows.
        options: How scores become weights.
        layer_heads: Sets of layer weights.
        dim: Width of the head.
    """

    def __init__(
        self, rows: TableRows, options: StageOptions, *, layer_heads: int, dim: int
    ) -> None:
        from .compiled.graph_records import Weighing
        from .compiled.loops import Shares

        self.rows, self.options = rows, options
        self.layer_heads, self.dim = layer_heads, dim
        _, layers, channels = rows.table.shape
        # The multiplications of a forward pass for each graph, about.
        of_node = 2 * layer_heads * layers * channels + (3 * channels + 2 * dim) * dim
        of_pair = 2 * dim  # and as much for its exponential
        self._shares = Shares(rows.sizes * (of_node + of_pair * rows.sizes))
        self._weighing = Weighing(
            LOOP_NORMALIZATIONS.index(options.normalization),
            np.float32(options.bound),
            np.float32(1 / math.sqrt(dim // layer_heads)),
            np.float32(1 / math.sqrt(dim // options.node_heads)),
        )

    def read(self, maps: Maps[np.ndarray], turned: TurnedMaps) -> tuple[Results, np.ndarray, Kept]:
        """Run copies of a head on the graphs.

        Args:
            maps: The weights, ``[copies, ...]`` each.
            turned: The same.

        Returns:
            What they make of the graphs; the mean of the nodes of every layer, ``[num_graphs,
            L * D]``, of no graph if not asked for; and what :meth:`read_back` needs.
        """
        from .compiled.graph_loops import READ_GRAPHS
        from .compiled.graph_records import Kept, Results

        table, (copies, dim, channels) = self._table(), maps.layers.query.shape
        nodes, count = int(table.ptr[-1]), len(table.starts)
        kept = Kept(
            empty(copies, nodes, dim),
            empty(copies, count, self.layer_heads, table.num_layers),
            empty(copies, nodes, dim),
            empty(copies, nodes, 2 * dim),
            empty(copies, count, self.options.node_heads, dim),
        )
        results = Results(empty(copies, count, dim), empty(copies, count, dim))
        asked = count if self.options.with_means else 0
        means = empty(asked, table.num_layers * channels)
        parts = self._shares.parts(copies)
        READ_GRAPHS(parts, table, maps, turned, self._weighing, kept, results, means)
        return results, means, kept

    def read_back(
        self, maps: Maps[np.ndarray], turned_key: np.ndarray, kept: Kept, grad: Results
    ) -> Maps[np.ndarray]:
        """Return the gradients of the weights.

        Args:
            maps: The weights, ``[copies, ...]`` each.
            turned_key: ``maps.layers.key`` with inputs as rows, ``[copies, D, dim]``.
            kept: What :meth:`read` has left.
            grad: Of what it has found.
        """
        from .compiled.graph_gradients import READ_GRAPHS_BACK

        table, parts = self._table(), self._shares.parts(len(maps.nodes))
        # Each part has gradients of its own.
        sizes = [value.size for value in maps.values]
        gradients = torch.empty(len(parts.bounds) - 1, sum(sizes))
        own = gradients.numpy()
        READ_GRAPHS_BACK(parts, table, maps, turned_key, self._weighing, kept, grad, own)
        sums = np.split(gradients.sum(0).numpy(), np.cumsum(sizes[:-1]))
        return as_maps(
            [sum_.reshape(value.shape) for sum_, value in zip(sums, maps.values, strict=True)]
        )

    def _table(self) -> Table:
        """Say where the graphs are in the history ``[rows, L, D]`` and in the batch."""
        from .compiled.graph_records import Table

        history = self.rows.table
        (num_rows, layers, channels), stride = history.shape, history.stride(0)
        values = history.detach().as_strided(((num_rows - 1) * stride + layers * channels,), (1,))
        return Table(values.numpy(), stride, layers, self.rows.starts, self.rows.ptr)


class _ReadGraphs(Function):
    """See :func:`read_graphs`; weights may have a dimension of copies of the head in front."""

    @staticmethod
    def forward(stage: GraphStage, history: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        from .compiled.graph_records import TurnedMaps

        maps = as_maps(weights)
        turned = [value.mT for value in (maps.layers.query, maps.layers.embedding, maps.nodes)]
        alone = weights[-1].dim() == 1
        results, layer_means, kept = stage.read(
            as_maps(_arrays(weights, alone)), TurnedMaps(*_arrays(turned, alone))
        )
        contexts, means, *others = _tensors([*results, *kept], alone)
        return contexts, means, torch.from_numpy(layer_means), *others

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.stage, history, *weights = inputs
        _, _, *others = output
        ctx.mark_non_differentiable(*others)
        ctx.set_materialize_grads(False)
        ctx.num_weights = len(weights)
        ctx.save_for_backward(history, *weights, *others[1:])

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], stage: GraphStage, history: Tensor, *weights: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        stacked = [
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(weights, in_dims[2:], strict=True)
        ]
        copies = as_maps(stacked).layers.query.shape[:-2]  # of this and of other levels of vmap
        flat = [value.flatten(0, len(copies) - 1) for value in stacked]
        contexts, means, layer_means, *kept = _ReadGraphs.apply(stage, history, *flat)
        unfolded = [value.unflatten(0, copies) for value in (contexts, means, *kept)]
        found = (*unfolded[:2], layer_means, *unfolded[2:])
        return found, (0, 0, None, *(0,) * len(kept))

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_contexts: Tensor | None, grad_means: Tensor | None, *none: None
    ) -> tuple[Tensor | None, ...]:
        from .compiled.graph_records import Kept, Results

        _, *saved = ctx.saved_tensors  # the history, which must be what it was
        weights, kept = saved[: ctx.num_weights], saved[ctx.num_weights :]
        alone = weights[-1].dim() == 1
        shape = (*weights[-1].shape[:-1], len(ctx.stage.rows.sizes), ctx.stage.dim)
        grads = (
            weights[0].new_zeros(shape) if grad is None else grad
            for grad in (grad_contexts, grad_means)
        )
        (turned_key,) = _arrays([as_maps(weights).layers.key.flatten(-3, -2).mT], alone)
        found = ctx.stage.read_back(
            as_maps(_arrays(weights, alone)),
            turned_key,
            Kept(*_arrays(kept, alone)),
            Results(*_arrays(grads, alone)),
        )
        # A parameter keeps its gradient, and must not keep those of the others with it.
        return None, None, *(value.clone() for value in _tensors(found.values, alone))


def empty(*shape: int) -> np.ndarray:
    """Return an array of any values, of PyTorch's memory: it starts where a line of the cache does.

    A profile of PyTorch's memory shows it, too.
    """
    return torch.empty(shape).numpy()


def _arrays(values: Iterable[Tensor], alone: bool) -> list[np.ndarray]:
    """View values with a dimension of copies in front, also where there is one without it."""
    arrays = [value.detach().contiguous().numpy() for value in values]
    return [array[None] for array in arrays] if alone else arrays


def _tensors(arrays: Iterable[np.ndarray], alone: bool) -> list[Tensor]:
    """Do the opposite of :func:`_arrays`."""
    return [torch.from_numpy(array[0] if alone else array) for array in arrays]
