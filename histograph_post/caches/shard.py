"""One shard opened for reading: its bytes mapped, its values checked, nothing copied."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheError
from .layout import Counts, Dataset, Layout, check_contents
from .opening import open_regular, sha256_prefix
from .row_writers import expand
from .shard_info import Extent, ShardInfo


class Rows(Protocol):
    """The rows of one activations dataset."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows ``start`` to ``stop``, ``[stop - start, ...]``."""


@dataclass(frozen=True)
class MappedRows:
    """Rows as they lie in the file; reading them is a view."""

    values: np.ndarray

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a view of rows ``start`` to ``stop``."""
        return self.values[start:stop]


class CompressedRows:
    """Rows in compressed chunks. The last chunk stays expanded: graphs are often read in order."""

    def __init__(self, buffer: mmap.mmap, extents: tuple[Extent, ...], spec: Dataset, where: str):
        self._buffer = memoryview(buffer)
        self._extents = extents
        self._spec = spec
        self._where = where
        self._last: tuple[int, np.ndarray] | None = None

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return a copy of rows ``start`` to ``stop``."""
        rows = np.empty((stop - start, *self._spec.shape[1:]), self._spec.dtype)
        size = self._spec.chunk_rows
        for number in range(start // size, -(-stop // size) if stop > start else 0):
            first, last = max(start, number * size), min(stop, (number + 1) * size)
            chunk = self._chunk(number)
            rows[first - start : last - start] = chunk[first - number * size : last - number * size]
        return rows

    def _chunk(self, number: int) -> np.ndarray:
        last = self._last
        if last is None or last[0] != number:
            offset, size = self._extents[number]
            shape = (self._spec.chunk_rows, *self._spec.shape[1:])
            where = f"{self._where}: dataset {self._spec.name!r}, chunk {number}"
            stored = self._buffer[offset : offset + size]
            last = (number, expand(stored, shape, self._spec.dtype, where))
            self._last = last
        return last[1]


@dataclass(frozen=True)
class Shard:
    """The values of one shard. Arrays are views of the mapped file.

    The map is private and copy-on-write: writing into a view changes this process's memory, never
    the file.
    """

    info: ShardInfo
    ids: list[str]
    arrays: dict[str, np.ndarray]
    activations: tuple[Rows, ...]
    _map: mmap.mmap

    @classmethod
    def open(cls, path: Path, info: ShardInfo, layout: Layout) -> Self:
        """Map a shard and check everything but the values of the activations.

        ``info`` must have been validated against ``layout``. The HDF5 library is not involved.
        """
        with open_regular(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != info.num_bytes:
                raise CacheError(f"{path}: found {num_bytes} bytes, expected {info.num_bytes}")
            found = sha256_prefix(file, info.head_bytes(layout))
            if found != info.head_sha256:
                raise CacheError(
                    f"{path}: found checksum {found} before the activations, "
                    f"expected {info.head_sha256}; the file was changed"
                )
            buffer = mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_COPY)
        arrays: dict[str, np.ndarray] = {}
        activations: list[Rows] = []
        for dataset in info.datasets(layout):
            extents = info.extents[dataset.name]
            if layout.compression and dataset.is_activations:
                activations.append(CompressedRows(buffer, extents, dataset, str(path)))
                continue
            count = int(np.prod(dataset.shape))
            offset = extents[0][0] if extents else 0
            values = np.frombuffer(buffer, dataset.dtype, count, offset).reshape(dataset.shape)
            if dataset.is_activations:
                activations.append(MappedRows(values))
            else:
                arrays[dataset.name] = values
        check_contents(arrays, info.counts, info.start, str(path))
        return cls(info, _read_ids(arrays, str(path)), arrays, tuple(activations), buffer)

    def release(self) -> None:
        """Hand the pages of the map back to the system; they are read from the file when needed.

        What a view's owner has written into it is undone.
        """
        if hasattr(self._map, "madvise"):  # not on every system
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_ids(arrays: dict[str, np.ndarray], where: str) -> list[str]:
    text, bounds = arrays["ids"].tobytes(), arrays["id_ptr"].tolist()
    try:
        return [text[start:stop].decode() for start, stop in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise CacheError(f"{where}: found ids that are not UTF-8 ({error.reason})") from None


# --- graphs as a cache hands them out

#: A history: ``[num_nodes, num_layers, dim]``, or ``[num_nodes, D_l]`` each where widths differ.
History = Tensor | list[Tensor]


@dataclass(frozen=True)
class CachedGraph:
    """One graph of a cache; ``history``, ``labels`` and ``outputs`` are views of the file.

    The history of a compressed cache is a copy, which has been expanded.
    """

    id: str
    history: History
    edge_index: Tensor | None
    labels: Tensor
    outputs: Tensor | None
    edge_label_index: Tensor | None


@dataclass(frozen=True)
class CachedBatch:
    """Several graphs, their rows one after the other; ``ptr`` says where each begins."""

    history: History
    ptr: Tensor
    edge_index: Tensor | None


def read_graph(shard: Shard, graph: int, layout: Layout) -> CachedGraph:
    """Return graph number ``graph`` of a shard."""
    arrays = shard.arrays
    nodes = slice(*arrays["ptr"][graph : graph + 2].tolist())
    rows = {"graph": slice(graph, graph + 1), "node": nodes}
    if "label_ptr" in arrays:
        rows["link"] = slice(*arrays["label_ptr"][graph : graph + 2].tolist())
    layers = [
        as_tensor(values.read(nodes.start, nodes.stop), layout) for values in shard.activations
    ]
    edge_index = edge_label_index = outputs = None
    if layout.has_edges:
        edges = slice(*arrays["edge_ptr"][graph : graph + 2].tolist())
        edge_index = torch.from_numpy(arrays["edge_index"][:, edges].astype(np.int64))
    if layout.level == "link":
        pairs = arrays["edge_label_index"][:, rows["link"]]
        edge_label_index = torch.from_numpy(pairs.astype(np.int64))
    if layout.output_level is not None:
        outputs = torch.from_numpy(arrays["outputs"][rows[layout.output_level]])
    return CachedGraph(
        id=shard.ids[graph],
        history=layers[0] if layout.is_uniform else layers,
        edge_index=edge_index,
        labels=torch.from_numpy(arrays["labels"][rows[layout.level]]),
        outputs=outputs,
        edge_label_index=edge_label_index,
    )


def as_tensor(values: np.ndarray, layout: Layout) -> Tensor:
    """Return the same memory as a tensor."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if layout.dtype == "bfloat16" else tensor


# --- what a shard stores of its graphs that does not come from the model


@dataclass(frozen=True)
class ShardGraphs:
    """The graphs of one shard, without what the model made of them.

    Args:
        start: Position of the first graph in the data set.
        ids: A name per graph.
        num_nodes: Nodes per graph, ``[num_graphs]``.
        labels: A row per graph, node or link; NaN is a missing label. ``[rows, num_targets]``.
        edge_index: ``[2, num_edges]`` per graph, nodes numbered from 0 in each; None to store none.
        edge_label_index: The same for the labelled pairs of a link task.
    """

    start: int
    ids: Sequence[str]
    num_nodes: np.ndarray
    labels: np.ndarray
    edge_index: Sequence[Tensor] | None = None
    edge_label_index: Sequence[Tensor] | None = None

    def counts(self, layout: Layout) -> Counts:
        """Return how much a shard of these graphs holds."""
        num_nodes = int(self.num_nodes.sum())
        num_edges = _num_pairs(self.edge_index) if layout.has_edges else 0
        rows = {"graph": len(self.ids), "node": num_nodes}
        num_labels = rows.get(layout.level, _num_pairs(self.edge_label_index))
        return Counts(len(self.ids), num_nodes, num_edges, num_labels)

    def arrays(self, layout: Layout, where: str) -> dict[str, np.ndarray]:
        """Return the values of every dataset but the outputs and the activations, checked."""
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
        if layout.level == "link":
            arrays["label_ptr"], arrays["edge_label_index"] = _pairs(self.edge_label_index or ())
        if layout.has_edges:
            arrays["edge_ptr"], arrays["edge_index"] = _pairs(self.edge_index or ())
        counts = self.counts(layout)
        for dataset in layout.descriptors(counts, len(arrays["ids"])):
            found = arrays.get(dataset.name)
            if found is not None and found.shape != dataset.shape:
                raise CacheError(
                    f"{where}: found {dataset.name} of shape {found.shape}, "
                    f"expected {dataset.shape} for {len(self.ids)} graphs"
                )
        check_contents(arrays, counts, self.start, where)
        return arrays


def _num_pairs(pairs: Sequence[Tensor] | None) -> int:
    return sum(pair.shape[1] for pair in pairs or ())


def _offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype("<i8")


def _pairs(pairs: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the node pairs of all graphs, side by side."""
    together = torch.cat([torch.empty(2, 0, dtype=torch.long), *pairs], dim=1)  # [2, num_pairs]
    return _offsets([pair.shape[1] for pair in pairs]), together.numpy().astype("<i4")
