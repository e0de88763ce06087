"""Graphs of different sizes in one flat table of nodes: membership, sums, size buckets.

The nodes of a batch are rows of flat tensors, sorted by graph. Nothing here pads a batch to its
largest graph; where a dense layout is needed, :func:`bucket_layout` groups graphs of similar size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.utils import scatter

from ..errors import DataError
from ..utils.machine import send


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

    @property
    def _none_empty(self) -> bool:
        """Whether the host knows that every graph has nodes."""
        return len(self.sizes) > 0 and bool(self.sizes.all())

    @cached_property
    def _converted(self) -> dict[torch.dtype, Tensor]:
        return {}

    @cached_property
    def ptr(self) -> npt.NDArray[np.int64]:
        """First node of each graph, and the number of nodes: ``[num_graphs + 1]``."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @classmethod
    def of_sizes(cls, sizes: npt.NDArray[np.int64], device: torch.device) -> Graphs:
        """Take the nodes of each graph, ``[num_graphs]``, which the host knows."""
        index = np.repeat(np.arange(len(sizes)), sizes)  # [num_nodes]
        index_there, counts = send([index, sizes], device)
        return cls(index_there, counts, sizes)

    @classmethod
    def from_batch(
        cls,
        batch: Tensor | Graphs | None,
        num_nodes: int,
        num_graphs: int | None,
        device: torch.device,
    ) -> Graphs:
        """Read a PyG ``batch`` vector; ``None`` means that all nodes are one graph.

        The host has to read the sizes back from a vector on a device. Where it knows them already,
        it passes graphs instead, and nothing is read.
        """
        if isinstance(batch, Graphs):
            if len(batch.index) != num_nodes:
                raise DataError(
                    f"batch: found {len(batch.index)} nodes, expected {num_nodes}, as many as rows"
                )
            return batch
        if torch.compiler.is_exporting() and batch is not None and num_graphs is not None:
            return TracedGraphs.of(batch, num_graphs)
        if batch is None:
            return cls.of_sizes(np.array([num_nodes] + [0] * ((num_graphs or 1) - 1)), device)
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
        flat = rows.flatten(1) if rows.dim() > 2 else rows  # more dimensions are slow on a CPU
        zeros = flat.new_zeros(self.num_graphs, *flat.shape[1:])
        return zeros.index_add(0, self.index, flat).view(-1, *rows.shape[1:])

    def mean(self, rows: Tensor) -> Tensor:
        """Average node rows ``[num_nodes, ...]`` inside each graph; zero for an empty graph."""
        return self.sum(rows) / self.divisor_as(rows.dtype).view(-1, *(1,) * (rows.dim() - 1))

    def max(self, rows: Tensor) -> Tensor:
        """Take the maximum of each channel inside each graph; zero for an empty graph."""
        return pool_nodes(rows, self.index, self.num_graphs, "max")

    def counts_as(self, dtype: torch.dtype) -> Tensor:
        """Return the counts as numbers to multiply by, converted once: ``[num_graphs]``."""
        if dtype not in self._converted:
            self._converted[dtype] = self.counts.to(dtype)
        return self._converted[dtype]

    def divisor_as(self, dtype: torch.dtype) -> Tensor:
        """Return the counts, with 1 for an empty graph, which then averages to zero."""
        counts = self.counts_as(dtype)  # [num_graphs]
        return counts if self._none_empty else counts.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """Give every node the row of its graph: ``[num_graphs, ...]`` to ``[num_nodes, ...]``."""
        return values.index_select(0, self.index)

    def take(self, graphs: npt.NDArray[np.int64]) -> tuple[Graphs, Tensor]:
        """Return some of the graphs, in this order, and the nodes of them: ``[their nodes]``."""
        sizes, nodes = self.sizes[graphs], ranges(self.ptr[graphs], self.ptr[graphs + 1])
        index = np.repeat(np.arange(len(graphs)), sizes)
        index_there, counts, nodes_there = send([index, sizes, nodes], self.index.device)
        return Graphs(index_there, counts, sizes), nodes_there

    def empty_to_zero(self, rows: Tensor) -> Tensor:
        """Return rows of graphs, ``[num_graphs, D]``, with zeros for those without nodes."""
        if self._none_empty:
            return rows
        return rows * (self.counts > 0).to(rows.dtype).unsqueeze(-1)


@dataclass(frozen=True)
class TracedGraphs(Graphs):
    """Graphs of a program that is being traced, for any number of graphs and any sizes."""

    @property
    def num_graphs(self) -> int:
        """How many graphs there are, empty ones included."""
        return self.counts.size(0)

    @classmethod
    def of(cls, index: Tensor, num_graphs: int) -> TracedGraphs:
        """Take a graph index that is known to be sorted and in range."""
        counts = index.new_zeros(num_graphs).index_add(0, index, torch.ones_like(index))
        return cls(index, counts, np.empty(0, np.int64))

    def padded(self) -> Layout:
        """Lay all graphs out in one bucket, whose width the program finds when it runs.

        The number of buckets, and the graphs in each, would be fixed in the program.
        """
        # At least 2: the tracer cannot tell whether attention is to broadcast a width of 1.
        width = cast(int, self.counts.max().clamp(min=2).item())
        torch._check(width >= 2)
        nodes = torch.arange(self.index.size(0), device=self.index.device)  # [num_nodes]
        starts = self.counts.cumsum(0) - self.counts  # [num_graphs]
        slots = self.index * width + nodes - self.spread(starts)  # [num_nodes]
        graphs = torch.arange(self.num_graphs, device=self.index.device)  # [num_graphs]
        return Layout((Bucket(graphs, self.counts, width, nodes, slots),), slots)


@dataclass(frozen=True)
class Bucket:
    """Graphs of similar size, to be laid out densely as ``[num_graphs, width, ...]``.

    Args:
        graphs: Which graphs, ``[num_graphs]``.
        sizes: Their sizes, ``[num_graphs]``.
        width: Slots per graph: the largest size.
        nodes: Their nodes in the batch, graph by graph, ``[num_nodes]``.
        slots: Slot of each of these nodes in the flattened dense layout, ``[num_nodes]``.
        full: Whether every slot is known to hold a node.
    """

    graphs: Tensor
    sizes: Tensor
    width: int
    nodes: Tensor
    slots: Tensor
    full: bool = False

    def occupied(self) -> Tensor:
        """Mark the slots that hold a node: ``[num_graphs, width]``."""
        return torch.arange(self.width, device=self.sizes.device) < self.sizes.unsqueeze(-1)

    def pad(self, rows: Tensor) -> Tensor:
        """Lay rows of its nodes ``[num_nodes, D]`` out as ``[num_graphs, width, D]``, else zero."""
        padded = rows.new_zeros(self.sizes.size(0) * self.width, *rows.shape[1:])
        padded = padded.index_copy(0, self.slots, rows)  # [slots, D]
        return padded.view(self.sizes.size(0), self.width, *rows.shape[1:])


@dataclass(frozen=True)
class Layout:
    """The non-empty graphs of a batch in buckets.

    Args:
        buckets: From the largest graphs down.
        slots: Slot of each node of the batch in the dense layouts of all buckets, one after the
            other, ``[num_nodes]``.
    """

    buckets: tuple[Bucket, ...]
    slots: Tensor

    def pad(self, rows: Tensor) -> list[Tensor]:
        """Lay rows ``[num_nodes, D]`` out as one ``[num_graphs, width, D]`` per bucket."""
        sizes = [bucket.sizes.size(0) * bucket.width for bucket in self.buckets]
        padded = rows.new_zeros(sum(sizes), rows.size(1)).index_copy(0, self.slots, rows)
        parts = padded.split(sizes) if len(sizes) > 1 else [padded]  # [slots of a bucket, D] each
        return [
            part.view(bucket.sizes.size(0), bucket.width, -1)
            for bucket, part in zip(self.buckets, parts, strict=True)
        ]

    def unpad(self, parts: Sequence[Tensor]) -> Tensor:
        """Undo :meth:`pad`: put the rows of all buckets back into the order of the batch."""
        flat = [part.flatten(0, 1) for part in parts]  # [slots of a bucket, D] each
        rows = flat[0] if len(flat) == 1 else torch.cat(flat)  # [slots of all buckets, D]
        return rows.index_select(0, self.slots)  # [num_nodes, D]


def bucket_layout(
    graphs: Graphs, *, padding_budget: int, largest: int, capacity: int | None = None
) -> Layout:
    """Group the graphs into buckets of similar size.

    Graphs are taken from the largest down; a bucket is closed as soon as padding another graph to
    the bucket's width would waste more than ``padding_budget`` attention scores (width squared)
    in it, or another graph would make them more than ``capacity``. A graph of more than
    ``largest`` nodes always has a bucket of its own.
    """
    if isinstance(graphs, TracedGraphs):
        return graphs.padded()
    sizes = graphs.sizes
    descending = np.argsort(-sizes, kind="stable")[: int(np.count_nonzero(sizes))]
    sorted_sizes = sizes[descending]
    squares = np.concatenate([[0], np.cumsum(sorted_sizes**2)])
    starts = np.cumsum(sizes) - sizes

    widths, parts = [], []  # of each bucket: its graphs, their sizes, nodes and slots
    all_slots = np.empty(len(graphs.index), np.int64)
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
        nodes = ranges(starts[members], starts[members] + own)  # [nodes of the bucket]
        first_slots = np.arange(taken) * width
        slots = ranges(first_slots, first_slots + own)  # [nodes of the bucket]
        all_slots[nodes] = first_slot + slots
        widths.append(width)
        parts += [members.copy(), own, nodes, slots]
        begin += taken
        first_slot += taken * width
    *sent, batch_slots = send([*parts, all_slots], graphs.index.device)
    buckets = [
        Bucket(members, own, width, nodes, slots, full=len(members) == 1)
        for width, members, own, nodes, slots in zip(
            widths, sent[0::4], sent[1::4], sent[2::4], sent[3::4], strict=True
        )
    ]
    return Layout(tuple(buckets), batch_slots)


def pool_nodes(rows: Tensor, batch: Tensor, num_graphs: int, reduce: str) -> Tensor:
    """Reduce the rows of each graph with ``mean``, ``sum`` or ``max``: ``[num_graphs, width]``."""
    if reduce == "max":  # as scatter() does, which on CUDA also asks for another package
        zeros = rows.new_zeros(num_graphs, *rows.shape[1:])
        index = batch.view(-1, *(1,) * (rows.dim() - 1)).expand_as(rows)  # [num_nodes, ...]
        return zeros.scatter_reduce_(0, index, rows, "amax", include_self=False)
    return scatter(rows, batch, dim=0, dim_size=num_graphs, reduce=reduce)


#: Padding a bucket of :func:`pool_buckets` may have, in entries of its adjacency matrices (1 MB).
POOL_PADDING = 1 << 18
#: Graphs of more nodes than this are never padded to a common size there.
POOL_LARGEST = 512


def pool_buckets(graphs: Graphs, pool: Callable[[Bucket], Tensor]) -> Tensor:
    """Pool bucket by bucket, for readouts that need padded tensors: ``[num_graphs, width]``.

    Args:
        graphs: The graphs of the batch, none of them empty.
        pool: From a bucket to a row for each of its graphs, ``[size, width]``.
    """
    layout = bucket_layout(graphs, padding_budget=POOL_PADDING, largest=POOL_LARGEST)
    rows = [pool(bucket) for bucket in layout.buckets]
    order = torch.cat([bucket.graphs for bucket in layout.buckets])  # [num_graphs]
    return torch.cat(rows)[order.argsort()]  # [num_graphs, width]


def dense_adjacency(
    bucket: Bucket, edge_index: Tensor, *, num_nodes: int, dtype: torch.dtype
) -> Tensor:
    """Return the adjacency matrices of a bucket's graphs, ``[size, width, width]``.

    Args:
        bucket: The bucket.
        edge_index: The edges of the whole batch, ``[2, num_edges]``; a repeated edge counts twice.
        num_nodes: Number of nodes of the whole batch.
        dtype: Precision of the result.
    """
    size, width, nodes = bucket.graphs.size(0), bucket.width, bucket.nodes
    slots = nodes.new_full((num_nodes,), -1)  # [num_nodes], -1 outside of the bucket
    slots[nodes] = bucket.slots
    source, target = slots[edge_index]  # [num_edges] each
    inside = source >= 0
    entries = source[inside] * width + target[inside] % width  # [edges of the bucket]
    adjacency = torch.zeros(size * width * width, dtype=dtype, device=nodes.device)
    ones = torch.ones(len(entries), dtype=dtype, device=nodes.device)  # [edges of the bucket]
    return adjacency.index_add_(0, entries, ones).view(size, width, width)


def ranges(starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return all numbers from ``starts[i]`` to ``stops[i] - 1``, for each i in turn."""
    sizes = stops - starts
    ends = np.cumsum(sizes)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + sizes, sizes)
