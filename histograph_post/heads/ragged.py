"""Graphs of different sizes in one flat table of nodes: who belongs where, sums, size buckets.

The nodes of a batch are rows of flat tensors, sorted by graph. Nothing here pads a batch to its
largest graph; where a dense layout is needed, :func:`bucket_layout` groups graphs of similar size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..errors import DataError
from .ranges import ranges


@dataclass(frozen=True)
class Graphs:
    """Which graph each node belongs to.

    Args:
        index: Graph of each node, sorted, ``[num_nodes]``.
        counts: Nodes of each graph, zero for an empty one, ``[num_graphs]``.
        sizes: The same counts where Python can read them without waiting for a device.
    """

    index: Tensor
    counts: Tensor
    sizes: npt.NDArray[np.int64]

    @property
    def num_graphs(self) -> int:
        """How many graphs there are, empty ones included."""
        return len(self.sizes)

    @cached_property
    def divisor(self) -> Tensor:
        """The counts, with 1 for an empty graph, which then averages to zero: ``[num_graphs]``."""
        return self.counts.clamp(min=1)

    @cached_property
    def ptr(self) -> npt.NDArray[np.int64]:
        """First node of each graph, and the number of nodes: ``[num_graphs + 1]``."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def all_present(self) -> bool:
        """Whether every graph is known to have nodes."""
        return bool(self.sizes.size and self.sizes.all())

    @classmethod
    def from_batch(
        cls, batch: Tensor | None, num_nodes: int, num_graphs: int | None, device: torch.device
    ) -> Graphs:
        """Read a PyG ``batch`` vector; ``None`` means that all nodes are one graph."""
        if torch.compiler.is_exporting() and batch is not None and num_graphs is not None:
            return TracedGraphs.of(batch, num_graphs)
        if batch is None:
            counts = torch.tensor([num_nodes] + [0] * ((num_graphs or 1) - 1), device=device)
            return cls(
                torch.zeros(num_nodes, dtype=torch.long, device=device),
                counts,
                counts.cpu().numpy(),
            )
        if batch.dim() != 1 or len(batch) != num_nodes:
            raise DataError(f"batch: found shape {list(batch.shape)}, expected [{num_nodes}]")
        index = batch.to(device=device, dtype=torch.long)
        if bool((index[1:] < index[:-1]).any()):
            raise DataError(
                "batch: the graph index is not sorted, expected the nodes graph by graph"
            )
        if num_nodes and int(index[0]) < 0:
            raise DataError(f"batch: found graph {int(index[0])}, expected indices from 0 on")
        counts = torch.bincount(index, minlength=num_graphs or 0)  # [num_graphs]
        if num_graphs is not None and len(counts) > num_graphs:
            raise DataError(
                f"batch: found graph {len(counts) - 1}, expected indices below {num_graphs}"
            )
        return cls(index, counts, counts.cpu().numpy())

    def sum(self, rows: Tensor) -> Tensor:
        """Sum node rows ``[num_nodes, ...]`` inside each graph: ``[num_graphs, ...]``."""
        zeros = rows.new_zeros(self.num_graphs, *rows.shape[1:])
        return zeros.index_add(0, self.index, rows)

    def mean(self, rows: Tensor) -> Tensor:
        """Average node rows ``[num_nodes, ...]`` inside each graph; zero for an empty graph."""
        divisor = self.divisor.to(rows.dtype).view(-1, *(1,) * (rows.dim() - 1))
        return self.sum(rows) / divisor

    def spread(self, values: Tensor) -> Tensor:
        """Give every node the row of its graph: ``[num_graphs, ...]`` to ``[num_nodes, ...]``."""
        return values.index_select(0, self.index)

    def nonempty(self, dtype: torch.dtype) -> Tensor:
        """One for a graph that has nodes, zero for an empty one: ``[num_graphs, 1]``."""
        return (self.counts > 0).to(dtype).unsqueeze(-1)


@dataclass(frozen=True)
class TracedGraphs(Graphs):
    """Graphs whose number and sizes are not known yet: a program is being made for any of them."""

    @property
    def num_graphs(self) -> int:
        """How many graphs there are, empty ones included."""
        return self.counts.size(0)

    @classmethod
    def of(cls, index: Tensor, num_graphs: int) -> TracedGraphs:
        """Take a graph index that is known to be sorted and in range."""
        counts = index.new_zeros(num_graphs).index_add(0, index, torch.ones_like(index))
        return cls(index, counts, np.empty(0, np.int64))


@dataclass(frozen=True)
class Bucket:
    """Graphs of similar size, to be laid out densely as ``[num_graphs, width, ...]``.

    Args:
        graphs: Which graphs, ``[num_graphs]``.
        sizes: Their sizes, ``[num_graphs]``.
        width: Slots per graph, at least the largest size.
        slots: Slot of each of the bucket's nodes in the flattened dense layout, ``[num_nodes]``.
    """

    graphs: Tensor
    sizes: Tensor
    width: int
    slots: Tensor

    def occupied(self) -> Tensor:
        """Mark the slots that hold a node: ``[num_graphs, width]``."""
        return torch.arange(self.width, device=self.sizes.device) < self.sizes.unsqueeze(-1)

    @property
    def num_slots(self) -> int:
        """Rows of the flattened dense layout."""
        return len(self.sizes) * self.width

    def pad(self, rows: Tensor) -> Tensor:
        """Lay rows ``[num_nodes, D]`` out as ``[num_graphs, width, D]``, zero elsewhere."""
        padded = move_rows(rows, None, self.slots, self.num_slots)
        return padded.view(len(self.sizes), self.width, -1)


@dataclass(frozen=True)
class Layout:
    """The non-empty graphs of a batch in buckets.

    Args:
        buckets: From the largest graphs down.
        order: The nodes of the batch, bucket by bucket, ``[num_nodes]``.
        slots: Slot of each node of the batch in the dense layouts of all buckets, one after the
            other, ``[num_nodes]``.
        fillers: Node in each of these slots; in one that no node belongs to, the last node of the
            same graph, so that nothing can pass from one graph to another, ``[num_slots]``.
    """

    buckets: tuple[Bucket, ...]
    order: Tensor
    slots: Tensor
    fillers: Tensor

    @property
    def graphs(self) -> Tensor:
        """The graphs, bucket by bucket: ``[num_nonempty]``."""
        return torch.cat([self.order[:0], *(bucket.graphs for bucket in self.buckets)])

    def pad(self, rows: Tensor) -> list[Tensor]:
        """Lay rows ``[num_nodes, D]`` out as one ``[num_graphs, width, D]`` per bucket.

        What is in a slot without a node must not matter: no gradient comes back from it.
        """
        sizes = [bucket.num_slots for bucket in self.buckets]
        padded: Tensor = _PadRows.apply(rows, self.fillers, self.slots)  # [num_slots, D]
        return [
            part.view(len(bucket.sizes), bucket.width, -1)
            for bucket, part in zip(self.buckets, padded.split(sizes), strict=True)
        ]

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`pad`: put the rows of all buckets back into the order of the batch."""
        rows = torch.cat([part.flatten(0, 1) for part in parts])  # [slots of all buckets, D]
        return move_rows(rows, self.slots, None, len(self.slots))


def bucket_layout(
    graphs: Graphs, *, padding_budget: int, largest: int, capacity: int | None = None
) -> Layout:
    """Group the graphs into buckets of similar size.

    Graphs are taken from the largest down; a bucket is closed as soon as padding another graph to
    the bucket's width would waste more than ``padding_budget`` attention scores (width squared)
    in it, or another graph would make them more than ``capacity``. A graph of more than
    ``largest`` nodes always has a bucket of its own.
    """
    sizes = graphs.sizes
    device = graphs.index.device
    descending = np.argsort(-sizes, kind="stable")[: int(np.count_nonzero(sizes))]
    sorted_sizes = sizes[descending]
    squares = np.concatenate([[0], np.cumsum(sorted_sizes**2)])
    starts = np.cumsum(sizes) - sizes

    buckets, order, places, fillers = [], [], [], []
    begin = first_slot = 0
    while begin < len(descending):
        width = int(sorted_sizes[begin])
        lengths = np.arange(1, len(descending) - begin + 1)
        waste = lengths * width**2 - (squares[begin + 1 :] - squares[begin])
        # The waste never shrinks as graphs are added, so the last length within the budget is it.
        taken = 1 if width > largest else int(np.searchsorted(waste, padding_budget, side="right"))
        if capacity is not None:
            taken = min(taken, max(1, capacity // width**2))
        members = descending[begin : begin + taken]
        own = sizes[members]
        within = ranges(np.zeros_like(own), own)  # place of each node inside its graph, [num_nodes]
        order.append(np.repeat(starts[members], own) + within)
        slots = np.repeat(np.arange(taken) * width, sizes[members]) + within
        places.append(first_slot + slots)
        within_width = np.minimum(np.arange(width), sizes[members, None] - 1)  # [taken, width]
        fillers.append((starts[members, None] + within_width).ravel())
        buckets.append(
            Bucket(
                graphs=torch.from_numpy(members.copy()).to(device),
                sizes=torch.from_numpy(sizes[members]).to(device),
                width=width,
                slots=torch.from_numpy(slots).to(device),
            )
        )
        begin += taken
        first_slot += taken * width
    tables = [np.concatenate([np.empty(0, np.int64), *parts]) for parts in (order, places, fillers)]
    nodes, slots, filled = tables
    slots[nodes] = slots.copy()  # from the order of the buckets to that of the batch
    return Layout(
        tuple(buckets),
        torch.from_numpy(nodes).to(device),
        torch.from_numpy(slots).to(device),
        torch.from_numpy(filled).to(device),
    )


class _MoveRows(Function):
    """Copy rows to other places; no place twice, so the gradient is a copy as well, not a sum."""

    @staticmethod
    def forward(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int) -> Tensor:
        return _move(rows, source, target, size)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        rows, ctx.source, ctx.target, _ = inputs
        ctx.num_rows = len(rows)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        rows: Tensor,
        source: Tensor | None,
        target: Tensor | None,
        size: int,
    ) -> tuple[Tensor, int]:
        assert in_dims[0] is not None  # only rows are ever stacked
        return _MoveRows.apply(rows.movedim(in_dims[0], 1), source, target, size), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _move(grad, ctx.target, ctx.source, ctx.num_rows), None, None, None


def _move(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int) -> Tensor:
    taken = rows if source is None else rows.index_select(0, source)
    if target is None:
        return taken
    return taken.new_zeros(size, *taken.shape[1:]).index_copy_(0, target, taken)


class _PadRows(Function):
    """Copy every node to its slot, and some node to all others, from which nothing returns."""

    @staticmethod
    def forward(rows: Tensor, fillers: Tensor, slots: Tensor) -> Tensor:
        return rows.index_select(0, fillers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, ctx.slots = inputs

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rows: Tensor, fillers: Tensor, slots: Tensor
    ) -> tuple[Tensor, int]:
        return _PadRows.apply(rows.movedim(in_dims[0], 1), fillers, slots), 1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad.index_select(0, ctx.slots), None, None


def move_rows(rows: Tensor, source: Tensor | None, target: Tensor | None, size: int) -> Tensor:
    """Return a table of ``size`` rows with ``result[target] = rows[source]`` and zero elsewhere.

    Neither ``source`` nor ``target`` may name a row twice; ``None`` means all rows in order.
    """
    result: Tensor = _MoveRows.apply(rows, source, target, size)
    return result
