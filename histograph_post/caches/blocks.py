"""What goes into a shard: its graphs, and blocks of activations on their way into it.

While the model runs, each layer is checked and copied into its place in a :class:`RowBlock`. A
:class:`ShardThread` writes full blocks to the shard, in order, while the model computes the next.
On an accelerator a block is filled in device memory and leaves it in one copy.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheError
from .layout import Counts, Layout, ShardInfo
from .shard import TORCH_TYPES, check_contents

if TYPE_CHECKING:
    from .planning import CachePlan
    from .writer import ShardWriter


@dataclass(frozen=True)
class ShardGraphs:
    """The graphs of one shard, without activations and outputs.

    Args:
        start: Position of the first graph in the data set.
        num_nodes: Nodes per graph, ``[num_graphs]``.
        labels: A row per graph, node or link; NaN is a missing label. ``[rows, num_targets]``.
        edge_index: ``[2, num_edges]`` per graph, nodes numbered from 0 in each; read once.
        edge_label_index: The same for the labelled pairs of a link task.
    """

    start: int
    ids: Sequence[str]
    num_nodes: np.ndarray
    labels: np.ndarray
    edge_index: Iterable[Tensor] = ()
    edge_label_index: Iterable[Tensor] = ()

    def arrays(self, layout: Layout, where: str) -> tuple[dict[str, np.ndarray], Counts]:
        """Return every dataset but outputs and activations, checked, and their sizes."""
        try:
            ids = [graph_id.encode() for graph_id in self.ids]
        except UnicodeEncodeError as error:
            raise CacheError(
                f"{where}: found graph id {error.object!r}, expected text that UTF-8 can hold"
            ) from None
        arrays = {
            "ptr": _offsets(self.num_nodes),
            "id_ptr": _offsets([len(graph_id) for graph_id in ids]),
            "ids": np.frombuffer(b"".join(ids), "|u1"),
            "labels": np.ascontiguousarray(self.labels, "<f8"),
        }
        rows, num_edges = {"graph": len(ids), "node": int(arrays["ptr"][-1])}, 0
        if layout.level == "link":
            arrays["label_ptr"], arrays["edge_label_index"] = _pairs(self.edge_label_index)
            rows["link"] = arrays["edge_label_index"].shape[1]
        if layout.has_edges:
            arrays["edge_ptr"], arrays["edge_index"] = _pairs(self.edge_index)
            num_edges = arrays["edge_index"].shape[1]
        counts = Counts(len(ids), rows["node"], num_edges, num_labels=rows[layout.level])
        for dataset in layout.descriptors(counts, len(arrays["ids"])):
            found = arrays.get(dataset.name)
            if found is not None and found.shape != dataset.shape:
                raise CacheError(
                    f"{where}: found {dataset.name} of shape {found.shape}, "
                    f"expected {dataset.shape} for {len(self.ids)} graphs"
                )
        check_contents(arrays, counts.num_nodes, self.start, where)
        return arrays, counts


def _offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype("<i8")


def _pairs(pairs: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the node pairs of all graphs, side by side: ``[2, num_pairs]``."""
    parts = [pair.numpy().astype("<i4") for pair in pairs]
    sizes = [part.shape[1] for part in parts]
    return _offsets(sizes), np.concatenate([np.empty((2, 0), "<i4"), *parts], axis=1)


# --- blocks

#: What to suggest where a storage type cannot hold the activations.
_WIDER = {"float16": "bfloat16 or float32", "bfloat16": "float32", "float32": "a smaller scale"}


class RowBlock:
    """The activations of some graphs of a shard; every layer is put into its place once.

    Args:
        graphs: Positions of the graphs in their shard.
        graph_of_row: Returns the id of the graph that a row belongs to, for errors.
        where: The file, for errors.
    """

    def __init__(
        self,
        layout: Layout,
        graphs: range,
        num_nodes: int,
        *,
        graph_of_row: Callable[[int], str],
        where: str,
        memory: BlockMemory,
    ) -> None:
        self.graphs = graphs
        self.num_nodes = num_nodes
        self.memory, self.staging = memory.take()
        #: Minimum and maximum of each layer that is still to be checked, ``[2]``, and its type.
        self._extremes: dict[int, tuple[Tensor, torch.dtype]] = {}
        self._layout = layout
        self._graph_of_row = graph_of_row
        self._where = where
        self._stored, _ = self._views(self.memory)
        #: Where each layer goes, ``[num_nodes, width]``.
        _, self.layers = self._views(self.memory if self.staging is None else self.staging)

    def _views(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of memory: one per dataset, and one per layer, ``[num_nodes, width]``."""
        layout, num_nodes = self._layout, self.num_nodes
        values = memory[: num_nodes * sum(layout.widths)]
        if layout.is_uniform:
            rows = values.view(num_nodes, layout.num_layers, layout.widths[0])
            return [rows], list(rows.unbind(1))  # [num_nodes, num_layers, dim]
        parts = values.split([num_nodes * width for width in layout.widths])
        sized = zip(parts, layout.widths, strict=True)
        layers = [part.view(num_nodes, width) for part, width in sized]
        return layers, layers

    @torch.no_grad()
    def put(self, layer: int, values: Tensor) -> Tensor:
        """Check one layer, ``[num_nodes, width]``, and copy it; return it as it is stored.

        The copy converts and interleaves. On a device, :meth:`fetch` checks all layers at once.
        """
        if self.num_nodes:
            # NaN propagates to both.  [2]
            self._extremes[layer] = torch.stack(torch.aminmax(values)), values.dtype
        if self.staging is None:
            self._check(values)
        return self.layers[layer].copy_(values)

    @torch.inference_mode()
    def fetch(self) -> None:
        """Check a block that was filled on a device and copy it to the host; else do nothing."""
        if self.staging is None:
            return
        self._check(None)
        size = self.num_nodes * sum(self._layout.widths)
        self.memory[:size].copy_(self.staging[:size])

    def _check(self, values: Tensor | None) -> None:
        """Check the layers that were put since the last check; None for those on the device."""
        if not self._extremes:
            return
        numbers = torch.stack([found for found, _ in self._extremes.values()]).tolist()  # [L, 2]
        for (layer, (_, dtype)), (low, high) in zip(self._extremes.items(), numbers, strict=True):
            rows = self.layers[layer] if values is None else values  # [num_nodes, width]
            self._check_range(layer, low, high, rows, dtype)
        self._extremes.clear()

    def _check_range(
        self, layer: int, low: float, high: float, values: Tensor, dtype: torch.dtype
    ) -> None:
        """Refuse activations that are not finite, or that overflow or underflow in storage.

        A layer underflows if it is not all zero, yet below the smallest normal number of the type.
        The minimum and maximum decide; only on failure are the values searched for the graph.
        """
        name = self._layout.dtype
        limits = torch.finfo(TORCH_TYPES[name])
        largest = max(-low, high)
        if not (math.isfinite(low) and math.isfinite(high)):
            problem = "a value that is not finite, expected finite activations"
            wrong = ~torch.isfinite(values)
        elif largest > limits.max:
            problem = f"{largest:.6g}, expected at most {limits.max:.6g} in {name}"
            problem += f"; use {_WIDER[name]}"
            wrong = values.cpu().double().abs() > limits.max
        elif 0 < largest < limits.tiny and dtype != TORCH_TYPES[name]:
            problem = (
                f"nothing above {largest:.3g}, expected at least {limits.tiny:.3g} in "
                f"{name}, which would lose it; use {_WIDER[name]}"
            )
            sizes = values.cpu().double().abs()  # [num_nodes, width]
            wrong = sizes == sizes.max()
        else:
            return
        row = int(wrong.any(dim=1).nonzero()[0])
        raise CacheError(
            f"{self._where}: graph {self._graph_of_row(row)!r}, "
            f"layer {self._layout.layer_names[layer]!r}: found {problem}"
        )

    def arrays(self) -> list[np.ndarray]:
        """Return the rows of every dataset of activations: one, or one per layer."""
        # NumPy has no bfloat16: return its bits.
        return [
            (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()
            for rows in self._stored
        ]


class BlockMemory:
    """Memory for blocks of up to ``num_nodes`` nodes, reused once they are written.

    Allocating it for every block would cost more than the copies.
    """

    def __init__(self, layout: Layout, num_nodes: int, device: torch.device | None = None) -> None:
        self._size = num_nodes * sum(layout.widths)
        self._dtype = TORCH_TYPES[layout.dtype]
        self._device = device or torch.device("cpu")
        self._free: list[tuple[Tensor, Tensor | None]] = []

    def take(self) -> tuple[Tensor, Tensor | None]:
        """Return unused memory of the host, pinned for CUDA, and as much of an accelerator."""
        if self._free:
            return self._free.pop()
        size, dtype, device = self._size, self._dtype, self._device
        memory = torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")
        staged = device.type != "cpu"
        return memory, torch.empty(size, dtype=dtype, device=device) if staged else None

    def give_back(self, block: RowBlock) -> None:
        """Take back the memory of a block."""
        self._free.append((block.memory, block.staging))


# --- the thread that writes them

#: Blocks that are being written or wait for it, at most. Two cover the time in which a shard is
#: hashed and synced.
_MOST_BLOCKS = 2


class ShardThread:
    """Writes blocks to one shard after the other, in order; a context manager.

    One shard at a time is unfinished, and none once the context is left. After an error nothing
    more is written; the next call, or the end of the context, raises it.

    On CUDA the thread has a stream of its own, which waits for the event that :meth:`write` records
    after the kernels that fill a block. So the copy to pinned memory, and every other read, waits
    for its own block and overlaps with the next batch. Each of them returns when it is done: no
    memory is used again before, neither by :class:`BlockMemory` nor by the allocator, and no tensor
    needs ``record_stream``. What the overlap gains has not been measured.
    """

    #: The manifest's entry for every complete shard, by index.
    infos: dict[int, ShardInfo]

    def __init__(self, plan: CachePlan) -> None:
        self.infos = {}
        self._device = plan.device
        self._stream = torch.cuda.Stream(plan.device) if plan.device.type == "cuda" else None
        self.memory = BlockMemory(plan.layout, plan.batch_nodes, plan.device)
        # All blocks that wait, which are lost in a kill, make up less than a shard.
        blocks_of_shard = plan.shard_bytes // (plan.batch_nodes * plan.layout.row_bytes)
        self._most_blocks = _MOST_BLOCKS if blocks_of_shard > _MOST_BLOCKS else 1
        self._pool = ThreadPoolExecutor(1)
        self._blocks: deque[Future[None]] = deque()
        self._stopped = False
        self._unfinished: ShardWriter | None = None

    def __enter__(self) -> Self:
        # Start the thread before the first block: one interrupted while starting is never joined.
        self._pool.submit(int).result()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._stopped = True
            self._pool.shutdown()  # after the current block, which must not be left half written
            if self._unfinished is not None:
                self._unfinished.discard()

    def write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        """Queue a block that is filled; its first opens a shard, its last closes it."""
        self._wait(self._most_blocks - 1)
        filled = None
        if self._stream is not None:
            filled = torch.cuda.current_stream(self._device).record_event()
        self._blocks.append(self._pool.submit(self._write, writer, block, outputs, filled))

    def _wait(self, most: int) -> None:
        """Wait until at most ``most`` blocks are left; raise the error of any that failed."""
        while len(self._blocks) > most:
            self._blocks.popleft().result()

    def _own_stream(self, filled: torch.cuda.Event | None) -> AbstractContextManager[object]:
        """Return the context of the thread's own stream, which waits for a block to be filled."""
        if self._stream is None or filled is None:
            return nullcontext()
        self._stream.wait_event(filled)
        return torch.cuda.stream(self._stream)

    def _write(
        self,
        writer: ShardWriter,
        block: RowBlock,
        outputs: Tensor | None,
        filled: torch.cuda.Event | None,
    ) -> None:
        if self._stopped:
            return
        try:
            with self._own_stream(filled):
                block.fetch()
                if block.graphs.start == 0:
                    self._unfinished = writer
                    writer.open()
                writer.write(block, outputs)
            self.memory.give_back(block)
            if block.graphs.stop == writer.num_graphs:
                writer.close()
                self._unfinished = None
                self.infos[writer.index] = writer.info
        except BaseException:
            self._stopped = True
            raise
