"""One shard opened for reading: its bytes are mapped into memory and checked, not copied.

A :class:`Shard` is the file; a :class:`CachedGraph` is one graph of it, as a cache returns it.
:func:`verify_cache` checks every byte of a cache, and lists problems instead of stopping at one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheError
from ..utils.files import open_regular, sha256_prefix
from ..utils.text import plural
from .layout import Dataset, Extent, Layout, ShardInfo, expand, shard_name
from .manifest import CANARY_NAME, MANIFEST_NAME, SPLITS_NAME, read_manifest, read_splits

#: Shards that are open at most; each holds a file descriptor.
MAX_OPEN_SHARDS = 512

#: Values are scanned in blocks of about this many bytes.
_BLOCK_BYTES = 16 * 2**20


class CompressedRows:
    """Rows in compressed chunks, of which ``rows[start:stop]`` returns a copy.

    The last chunk stays expanded: graphs are often read in order.
    """

    def __init__(self, buffer: mmap.mmap, extents: tuple[Extent, ...], spec: Dataset, where: str):
        self._buffer = memoryview(buffer)
        self._extents = extents
        self._spec = spec
        self._where = where
        self._last: tuple[int, np.ndarray] | None = None

    def __getitem__(self, wanted: slice) -> np.ndarray:
        start, stop = wanted.start, wanted.stop
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

    The map is copy-on-write: writing into a view changes the memory of this process, never the
    file.
    """

    info: ShardInfo
    ids: list[str]
    arrays: dict[str, np.ndarray]
    #: One per dataset of activations; slices are views of the file, or copies if compressed.
    activations: tuple[np.ndarray | CompressedRows, ...]
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
        activations: list[np.ndarray | CompressedRows] = []
        for dataset in info.datasets(layout):
            extents = info.extents[dataset.name]
            if layout.compression and dataset.is_activations:
                activations.append(CompressedRows(buffer, extents, dataset, str(path)))
                continue
            count = int(np.prod(dataset.shape))
            offset = extents[0][0] if extents else 0
            values = np.frombuffer(buffer, dataset.dtype, count, offset).reshape(dataset.shape)
            if dataset.is_activations:
                activations.append(values)
            else:
                arrays[dataset.name] = values
        check_contents(arrays, info.num_nodes, info.start, str(path))
        return cls(info, _read_ids(arrays, str(path)), arrays, tuple(activations), buffer)

    def release(self) -> None:
        """Return the mapped pages to the system; they are read from the file again when needed.

        Anything written into a view is lost.
        """
        if hasattr(self._map, "madvise"):  # not on every system
            self._map.madvise(mmap.MADV_DONTNEED)


def most_open_shards() -> int:
    """Return how many shards may be open: at most half of the file descriptors are used."""
    try:
        import resource
    except ImportError:  # Windows
        return MAX_OPEN_SHARDS
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MAX_OPEN_SHARDS
    return max(1, min(MAX_OPEN_SHARDS, limit // 2))


def _read_ids(arrays: dict[str, np.ndarray], where: str) -> list[str]:
    text, bounds = arrays["ids"].tobytes(), arrays["id_ptr"].tolist()
    try:
        return [text[start:stop].decode() for start, stop in pairwise(bounds)]
    except UnicodeDecodeError as error:
        raise CacheError(f"{where}: found ids that are not UTF-8 ({error.reason})") from None


def check_contents(
    arrays: Mapping[str, np.ndarray], num_nodes: int, start: int, where: str
) -> None:
    """Refuse offsets and node numbers that point outside of a graph.

    ``start`` is the position of the shard's first graph in the data set.
    """
    _check_offsets(arrays["ptr"], num_nodes, f"{where}: found ptr")
    _check_offsets(arrays["id_ptr"], len(arrays["ids"]), f"{where}: found id_ptr")
    sizes = np.diff(arrays["ptr"])  # [num_graphs]
    for name, offsets in (("edge_index", "edge_ptr"), ("edge_label_index", "label_ptr")):
        if name in arrays:
            pairs, ptr = arrays[name], arrays[offsets]  # [2, num_pairs], [num_graphs + 1]
            _check_offsets(ptr, pairs.shape[1], f"{where}: found {offsets}")
            _check_pairs(pairs, np.diff(ptr), sizes, start, f"{where}: found {name}")


def _check_offsets(offsets: np.ndarray, total: int, found: str) -> None:
    """Refuse offsets that do not rise from 0 to the total."""
    if offsets[0] != 0 or offsets[-1] != total or (offsets[1:] < offsets[:-1]).any():
        raise CacheError(
            f"{found} from {offsets[0]} to {offsets[-1]}, expected it to rise from 0 to {total}"
        )


def _check_pairs(
    pairs: np.ndarray, pairs_per_graph: np.ndarray, num_nodes: np.ndarray, start: int, found: str
) -> None:
    """Refuse node numbers, ``[2, num_pairs]``, outside of their graph."""
    limit = np.repeat(num_nodes, pairs_per_graph)  # [num_pairs]
    wrong = ((pairs < 0) | (pairs >= limit)).any(axis=0)
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        graph = int(np.searchsorted(np.cumsum(pairs_per_graph), first, side="right"))
        raise CacheError(
            f"{found} {pairs[:, first].tolist()} in graph {start + graph}, "
            f"expected nodes 0 to {num_nodes[graph] - 1}"
        )


#: The torch type of activations, by the name in the layout.
TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

#: A history: ``[num_nodes, num_layers, dim]``, or ``[num_nodes, D_l]`` each where widths differ.
History = Tensor | list[Tensor]


@dataclass(frozen=True)
class CachedGraph:
    """One graph of a cache; ``history``, ``labels`` and ``outputs`` are views of the file.

    The history of a compressed cache is a copy.
    """

    id: str
    history: History
    edge_index: Tensor | None
    labels: Tensor
    outputs: Tensor | None
    edge_label_index: Tensor | None

    def __repr__(self) -> str:
        return f"CachedGraph({self.id!r}, {_sizes(self.history)})"


@dataclass(frozen=True)
class CachedBatch:
    """Several graphs, their rows one after the other; ``ptr`` holds where each begins."""

    history: History
    ptr: Tensor
    edge_index: Tensor | None

    def __repr__(self) -> str:
        return f"CachedBatch({plural(len(self.ptr) - 1, 'graph')}, {_sizes(self.history)})"


def _sizes(history: History) -> str:
    # [num_nodes, L, D], or a list of [num_nodes, D_l]
    layers = history.unbind(1) if isinstance(history, Tensor) else history
    return f"{plural(len(layers[0]), 'node')}, {plural(len(layers), 'layer')}"


def read_graph(shard: Shard, graph: int, layout: Layout) -> CachedGraph:
    """Return graph number ``graph`` of a shard."""
    arrays = shard.arrays
    nodes = slice(*arrays["ptr"][graph : graph + 2].tolist())
    places = {"graph": slice(graph, graph + 1), "node": nodes}
    if "label_ptr" in arrays:
        places["link"] = slice(*arrays["label_ptr"][graph : graph + 2].tolist())
    layers = [as_tensor(rows[nodes], layout) for rows in shard.activations]
    edge_index = edge_label_index = outputs = None
    if layout.has_edges:
        edges = slice(*arrays["edge_ptr"][graph : graph + 2].tolist())
        edge_index = torch.from_numpy(arrays["edge_index"][:, edges].astype(np.int64))
    if layout.level == "link":
        pairs = arrays["edge_label_index"][:, places["link"]]
        edge_label_index = torch.from_numpy(pairs.astype(np.int64))
    if layout.output_level is not None:
        outputs = torch.from_numpy(arrays["outputs"][places[layout.output_level]])
    return CachedGraph(
        id=shard.ids[graph],
        history=layers[0] if layout.is_uniform else layers,
        edge_index=edge_index,
        labels=torch.from_numpy(arrays["labels"][places[layout.level]]),
        outputs=outputs,
        edge_label_index=edge_label_index,
    )


def as_tensor(values: np.ndarray, layout: Layout) -> Tensor:
    """Return the same memory as a tensor."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if layout.dtype == "bfloat16" else tensor


# --- checking every byte, and listing problems instead of stopping at one


@dataclass(frozen=True)
class VerifyRow:
    """The outcome of checking one file; ``problem`` is None where nothing is wrong."""

    file: str
    checked: str
    problem: str | None


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of checking every file of a cache."""

    path: Path
    rows: tuple[VerifyRow, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, a line each."""
        return tuple(row.problem for row in self.rows if row.problem is not None)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_cache(
    path: str | Path, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Check every byte of a cache: checksums, offsets, node numbers, finite values, splits.

    Damage is listed, not raised. ``progress`` is called with the bytes done and their total.
    """
    from .provenance import read_canary

    folder = Path(path)
    try:
        _, manifest = read_manifest(folder)
    except CacheError as error:
        return VerifyReport(folder, (VerifyRow(MANIFEST_NAME, "contents", str(error)),))
    rows = [
        VerifyRow(MANIFEST_NAME, "checksum, contents", None),
        VerifyRow(SPLITS_NAME, "checksum, contents", _problem(read_splits, folder, manifest)),
    ]
    recorded = manifest.provenance
    if recorded is not None and recorded.canary_sha256 is not None:
        problem = _problem(read_canary, folder, recorded.canary_sha256)
        rows.append(VerifyRow(CANARY_NAME, "checksum, contents", problem))
    total = sum(shard.num_bytes for shard in manifest.shards)
    done = 0
    for info in manifest.shards:
        name = shard_name(info.index)
        problem = _problem(_verify_shard, folder / name, info, manifest.layout)
        rows.append(VerifyRow(name, "checksum, offsets, node numbers, finite values", problem))
        done += info.num_bytes
        if progress is not None:
            progress(done, total)
    return VerifyReport(folder, tuple(rows))


def _problem(check: Callable[..., object], *arguments: object) -> str | None:
    try:
        check(*arguments)
    except CacheError as error:
        return str(error)
    return None


def _verify_shard(path: Path, info: ShardInfo, layout: Layout) -> None:
    """Check every byte of a shard, and that all activations are finite."""
    with open_regular(path) as file:
        # One byte more than expected, so that a file that has grown does not pass.
        found = sha256_prefix(file, info.num_bytes + 1)
    if found != info.sha256:
        raise CacheError(f"{path}: found checksum {found}, expected {info.sha256}")
    shard = Shard.open(path, info, layout)
    step = max(1, _BLOCK_BYTES // layout.row_bytes)
    for number, values in enumerate(shard.activations):
        for start in range(0, info.num_nodes, step):
            block = as_tensor(values[start : min(start + step, info.num_nodes)], layout)
            finite = torch.isfinite(block)  # [rows, num_layers, dim] or [rows, dim]
            if finite.all():
                continue
            row, layer = (~finite).nonzero()[0, :2].tolist()
            graph = int(np.searchsorted(shard.arrays["ptr"], start + row, side="right")) - 1
            name = layout.layer_names[layer if layout.is_uniform else number]
            raise CacheError(
                f"{path}: graph {shard.ids[graph]!r}, layer {name!r}: "
                "found a value that is not finite, expected finite activations"
            )
