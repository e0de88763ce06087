"""HistoGraph heads whose graphs are read in compiled loops, from all their weights to the outputs.

Reading a graph takes such a head tens of microseconds. What stands around it, a tree of modules and
a hundred small operations with a gradient each, would take as long again. Here it is written out
for training: some copies of a head at once, one vector of weights for each, and one gradient of it.
:class:`~.histograph.HistoGraphHead` says what is computed, and gives the same up to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from . import compiled
from .fast_path import RUN_IN_LOOPS, in_loops
from .folded_maps import LayerMaps, Maps
from .graph_stage import GraphStage, StageOptions, can_read, empty
from .history import History, TableRows

if TYPE_CHECKING:
    from .compiled.graph_records import TurnedMaps
    from .compiled.head_weights import Form
    from .compiled.loops import Parts
    from .histograph import HistoGraphHead


class WholeHead:
    """How to run copies of a head on graphs; their weights come with every call.

    Args:
        head: One that :meth:`of` allows; of its weights only the shapes count.
    """

    def __init__(self, head: HistoGraphHead) -> None:
        from .compiled.head_weights import Form

        options, layers = head.options, head.layer_weights
        self.form = Form(
            dim=options.dim,
            channels=options.in_dims[-1],
            num_layers=len(options.kept_dims),
            layer_heads=options.layer_heads,
            hidden=options.mlp_layers,
            out_dim=options.out_dim,
            mixes_all=options.mix == "all",
            residual=options.residual,
            normed=options.output_norm,
            share=np.float32(options.mixing_init if options.mixing == "fixed" else -1),
        )
        #: ``[L, dim]``.
        self.encoding = layers.encoding.numpy()
        self.stage_options = StageOptions(
            layers.normalization,
            bound=layers.bound,
            node_heads=options.heads,
            with_means=True,
        )

    @classmethod
    def of(cls, head: HistoGraphHead) -> WholeHead | None:
        """Return how to run copies of a head; None if it is not written out, or not compiled."""
        return cls(head) if in_loops(head, RUN_IN_LOOPS) and compiled.available() else None

    def __call__(
        self, weights: Tensor, history: History | TableRows, batch: Tensor, *, num_graphs: int
    ) -> Tensor | None:
        """Return the outputs of every copy; None if loops are not made for these graphs.

        Args:
            weights: All parameters of each copy, one after the other, ``[copies, numel]``.
            history: As the head takes it, standardised.
            batch: Graph of each node, sorted, ``[num_nodes]``.
            num_graphs: Graphs in the batch.

        Returns:
            ``[copies, num_graphs, out_dim]``.
        """
        if isinstance(history, Tensor):
            sizes = torch.bincount(batch, minlength=num_graphs).cpu().numpy()
            history = TableRows(history, np.cumsum(sizes) - sizes, sizes)
        if not isinstance(history, TableRows) or not history.sizes.all():
            return None
        kept = self.form.num_layers
        if history.table.size(1) != kept:
            history = replace(history, table=history.table[:, -kept:])
        if not can_read(history):
            return None
        outputs: Tensor = _WholeHead.apply(self, history, weights)
        return outputs


class _WholeHead(Function):
    """See :class:`WholeHead`."""

    @staticmethod
    def forward(ctx: Any, whole: WholeHead, rows: TableRows, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights, rows.table)  # which must not change until then
        ctx.step = _Step(whole, rows)
        return torch.from_numpy(ctx.step.run(weights.numpy()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[None, None, Tensor]:
        weights, _ = ctx.saved_tensors
        gradients = ctx.step.run_back(weights.numpy(), grad_outputs.contiguous().numpy())
        return None, None, torch.from_numpy(gradients)


class _Step:
    """One batch of graphs, forward and back.

    Args:
        whole: The head.
        rows: The graphs.
    """

    def __init__(self, whole: WholeHead, rows: TableRows) -> None:
        self._form, self._encoding = whole.form, whole.encoding
        form = self._form
        self._stage = GraphStage(
            rows, whole.stage_options, layer_heads=form.layer_heads, dim=form.dim
        )
        # Multiplications of a pass for each copy, about.
        self._fold_cost = 4 * form.dim * form.dim * form.channels
        self._tail_cost = len(rows.sizes) * form.dim * form.num_layers * form.channels

    def run(self, weights: np.ndarray) -> np.ndarray:
        """Return the outputs, ``[copies, num_graphs, out_dim]``.

        Args:
            weights: ``[copies, numel]``.
        """
        from .compiled.fold_loops import FOLD_ALL
        from .compiled.tail_loops import RUN_TAILS, KeptRows

        form, copies, count = self._form, len(weights), len(self._stage.rows.sizes)
        dim = form.dim
        maps, turned = _empty_maps(form, copies)
        self._maps, self._turned_key = maps, empty(copies, form.channels, dim)
        parts = _parts(2 * copies, copies * self._fold_cost)
        FOLD_ALL(parts, weights, self._encoding, form, maps, turned, self._turned_key)
        self._found, self._layer_means, self._kept = self._stage.read(maps, turned)
        self._kept_rows = KeptRows(
            empty(copies, count, dim),
            empty(copies, count, dim),
            empty(copies, count),
            empty(copies, form.hidden + 1, count, dim),
        )
        outputs = empty(copies, count, form.out_dim)
        parts = _parts(2 * copies, copies * self._tail_cost)
        rows = self._found, self._layer_means, self._kept_rows
        RUN_TAILS(parts, weights, form, *rows, outputs)
        return outputs

    def run_back(self, weights: np.ndarray, grad_outputs: np.ndarray) -> np.ndarray:
        """Return the gradients of the weights, ``[copies, numel]``.

        Args:
            weights: ``[copies, numel]``.
            grad_outputs: ``[copies, num_graphs, out_dim]``.
        """
        from .compiled.fold_loops import FOLD_ALL_BACK
        from .compiled.graph_records import Results
        from .compiled.tail_loops import RUN_BASES_BACK, RUN_TAILS_BACK

        form, copies, maps = self._form, len(weights), self._maps
        gradients = torch.zeros(weights.shape).numpy()
        found, means, kept = self._found, self._layer_means, self._kept_rows
        grad = Results(*(empty(*value.shape) for value in found))
        grad_base = empty(*found.means.shape)
        parts = _parts(copies, copies * self._tail_cost)
        RUN_TAILS_BACK(parts, weights, form, found, kept, grad_outputs, grad, grad_base, gradients)
        parts = _parts(4 * copies, copies * self._tail_cost)
        RUN_BASES_BACK(parts, form, means, grad_base, gradients)
        grad_maps = self._stage.read_back(maps, self._turned_key, self._kept, grad)
        parts = _parts(2 * copies, copies * self._fold_cost)
        FOLD_ALL_BACK(parts, weights, form, maps, grad_maps, gradients)
        return gradients


def _parts(count: int, cost: int) -> Parts:
    """Return parts of a piece of work that threads take one after the other.

    Args:
        count: How many.
        cost: Multiplications of all of them, about: a little is left to one thread.
    """
    from .compiled.loops import Parts
    from .compiled.teams import TEAM_WORK

    bounds = np.arange(count + 1) if cost > TEAM_WORK else np.array([0, count])
    return Parts(bounds, np.zeros(1, np.int64))


def _empty_maps(form: Form, copies: int) -> tuple[Maps[np.ndarray], TurnedMaps]:
    """Return maps of any values."""
    from .compiled.graph_records import TurnedMaps

    dim, channels, layers, heads = form.dim, form.channels, form.num_layers, form.layer_heads
    width = dim // heads
    maps = Maps(
        LayerMaps(
            query=empty(copies, dim, channels),
            query_bias=empty(copies, dim),
            key=empty(copies, heads, width, channels),
            fixed_keys=empty(copies, heads, width, layers),
            embedding=empty(copies, dim, channels),
            offset=empty(copies, layers, dim),
        ),
        nodes=empty(copies, 3 * dim, dim),
        nodes_bias=empty(copies, 3 * dim),
    )
    turned = TurnedMaps(
        query=empty(copies, channels, dim),
        embedding=empty(copies, channels, dim),
        nodes=empty(copies, dim, 3 * dim),
    )
    return maps, turned
