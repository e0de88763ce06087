"""What the shards of a cache hold, and where in their files.

A :class:`Layout` has the names, shapes and types of the datasets of every shard; a
:class:`ShardInfo` is the manifest's entry for one shard: its graphs, its hashes, and the bytes of
each dataset. A chunk of compressed activations is shuffled (HDF5's filter: all first bytes of the
values, then all second ones, ...) and then deflated.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

from ..errors import CacheError
from ..utils import LEVELS, Level
from ..utils.decoding import Count, Form, Sha256, is_count

#: How activations are stored. NumPy has no bfloat16, nor has HDF5: its bits are stored as uint16.
STORED_TYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}

#: Bytes of activations in one gzip chunk (at least one row): small, since reading one graph in
#: random order expands the whole chunk around it.
CHUNK_BYTES = 256 * 2**10

#: On activations, level 4 takes 50 % longer and saves 2 %.
GZIP_LEVEL = 1


@dataclass(frozen=True)
class Dataset:
    """One dataset of a shard: where it is in the file's tree, its shape and its NumPy type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of the values, uncompressed."""
        return self.shape[0] * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, uncompressed."""
        return math.prod(self.shape[1:]) * np.dtype(self.dtype).itemsize

    @property
    def chunk_rows(self) -> int:
        """Rows of one gzip chunk."""
        return max(1, min(self.shape[0], CHUNK_BYTES // max(self.row_bytes, 1)))

    @property
    def is_activations(self) -> bool:
        """Whether these are activations, the only values that may be compressed."""
        return self.name.startswith("activations")


@dataclass(frozen=True)
class Counts:
    """How much one shard holds. ``num_labels`` counts rows: graphs, nodes or links."""

    num_graphs: int
    num_nodes: int
    num_edges: int
    num_labels: int


@dataclass(frozen=True)
class Layout:
    """What every shard of a cache holds.

    Args:
        layer_names: Names of the captured layers, the embedded input first.
        widths: Channels of each layer.
        dtype: How activations are stored: ``float32``, ``float16`` or ``bfloat16``.
        level: What a label belongs to.
        target_names: One name per label column; empty for unlabelled data.
        output_width: Columns of the model's own outputs; None where there are none.
        output_level: What a row of the outputs belongs to; None where there are none.
        has_edges: Whether ``edge_index`` is stored.
        compression: ``gzip`` for compressed activations, None for activations that can be mapped.
    """

    layer_names: tuple[str, ...]
    widths: tuple[Count, ...]
    dtype: str
    level: Level
    target_names: tuple[str, ...] = ()
    output_width: Count | None = None
    output_level: Level | None = None
    has_edges: bool = True
    compression: str | None = None

    def __post_init__(self) -> None:
        if not self.layer_names or not all(self.layer_names):
            _refuse("layer_names", self.layer_names, "at least one text, and none empty")
        if not all(self.target_names):
            _refuse("target_names", self.target_names, "texts that are not empty")
        if len(self.widths) != len(self.layer_names) or min(self.widths) < 1:
            _refuse("widths", self.widths, f"{len(self.layer_names)} whole numbers from 1")
        _check_choice("dtype", self.dtype, tuple(STORED_TYPES))
        _check_choice("level", self.level, LEVELS)
        _check_choice("compression", self.compression, (None, "gzip"))
        if self.output_width is None:
            _check_choice("output_level", self.output_level, (None,))
        else:
            levels = LEVELS if self.level == "link" else LEVELS[:2]
            _check_choice("output_level", self.output_level, levels)
            if self.output_width < 1:
                _refuse("output_width", self.output_width, "a whole number from 1, or null")

    @property
    def num_layers(self) -> int:
        """Number of captured layers."""
        return len(self.widths)

    @property
    def num_targets(self) -> int:
        """Number of label columns."""
        return len(self.target_names)

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have one width, so that a history is one ``[N, L, D]`` array."""
        return len(set(self.widths)) == 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one node's activations over all layers, uncompressed."""
        return sum(self.widths) * np.dtype(STORED_TYPES[self.dtype]).itemsize

    def activations(self, num_nodes: int) -> tuple[Dataset, ...]:
        """Return the datasets of the activations: one, or one per layer where widths differ."""
        stored = STORED_TYPES[self.dtype]
        if self.is_uniform:
            shape = (num_nodes, self.num_layers, self.widths[0])
            return (Dataset("activations", shape, stored),)
        return tuple(
            Dataset(f"activations/{layer}", (num_nodes, width), stored)
            for layer, width in enumerate(self.widths)
        )

    def descriptors(self, counts: Counts, id_bytes: int) -> tuple[Dataset, ...]:
        """Return every other dataset of a shard, in file order."""
        graphs = counts.num_graphs
        datasets = [
            Dataset("ptr", (graphs + 1,), "<i8"),
            Dataset("id_ptr", (graphs + 1,), "<i8"),
            Dataset("ids", (id_bytes,), "|u1"),
            Dataset("labels", (counts.num_labels, self.num_targets), "<f8"),
        ]
        if self.level == "link":
            datasets.append(Dataset("label_ptr", (graphs + 1,), "<i8"))
            datasets.append(Dataset("edge_label_index", (2, counts.num_labels), "<i4"))
        if self.has_edges:
            datasets.append(Dataset("edge_ptr", (graphs + 1,), "<i8"))
            datasets.append(Dataset("edge_index", (2, counts.num_edges), "<i4"))
        if self.output_width is not None:
            rows = {"graph": graphs, "node": counts.num_nodes, "link": counts.num_labels}
            shape = (rows[self.output_level or "graph"], self.output_width)
            datasets.append(Dataset("outputs", shape, "<f4"))
        return tuple(datasets)


def _check_choice(field: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        _refuse(field, value, f"one of {', '.join(map(str, choices))}")


def _refuse(field: str, value: Any, expected: str) -> None:
    found = repr(value)
    found = found if len(found) <= 80 else f"{found[:77]}..."
    raise CacheError(f"found {field} = {found}, expected {expected}")


def compress(chunk: np.ndarray) -> bytes:
    """Return the stored bytes of a chunk."""
    itemsize = chunk.dtype.itemsize
    planes = np.ascontiguousarray(chunk).view(np.uint8).reshape(-1, itemsize).T
    return zlib.compress(planes.tobytes(), GZIP_LEVEL)


def expand(stored: memoryview, shape: tuple[int, ...], dtype: str, where: str) -> np.ndarray:
    """Return the chunk that :func:`compress` stored, without allocating more than its size."""
    itemsize = np.dtype(dtype).itemsize
    expected = int(np.prod(shape)) * itemsize
    inflater = zlib.decompressobj()
    try:
        data = inflater.decompress(stored, expected)
        # All values may be there before the end of the stream has been read.
        rest = b"" if inflater.eof else inflater.decompress(inflater.unconsumed_tail, 1)
    except zlib.error as error:
        raise CacheError(f"{where}: found a damaged chunk ({error})") from None
    if len(data) != expected or rest or not inflater.eof:
        raise CacheError(
            f"{where}: found a chunk that does not expand to the expected {expected} bytes"
        )
    planes = np.frombuffer(data, np.uint8).reshape(itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(shape)


# --- one shard as the manifest describes it

#: Every dataset starts at a multiple of this, so that mapped values are aligned for any CPU.
ALIGNMENT = 64

#: The most that deflate can expand a byte into; more is a bomb.
MAX_DEFLATE_RATIO = 1032

#: A piece of a dataset in its file: (offset, bytes).
Extent = tuple[int, int]


def _are_extents(pieces: Any) -> bool:
    return isinstance(pieces, list) and all(
        isinstance(piece, list) and len(piece) == 2 and all(map(is_count, piece))
        for piece in pieces
    )


#: The pieces of a dataset. There may be a million, so they are decoded all at once.
Extents = Annotated[
    tuple[Extent, ...],
    Form("a list of [offset, bytes]", _are_extents, lambda pieces: tuple(map(tuple, pieces))),
]


def shard_name(index: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{index:05d}.h5"


@dataclass(frozen=True)
class ShardInfo:
    """The manifest's entry for one shard: which graphs, how much, and where in the file.

    ``extents`` are the bytes of every dataset: one piece if it is contiguous, none if it is empty,
    one piece per chunk if it is compressed. A reader needs nothing else to map the values, so
    opening a cache never passes a foreign file to the HDF5 library.
    """

    index: Count
    start: Count
    stop: Count
    num_nodes: Count
    num_edges: Count
    num_labels: Count
    num_bytes: Count
    sha256: Sha256
    #: Of everything before the activations; a reader checks it before it uses any of that.
    head_sha256: Sha256
    extents: Mapping[str, Extents]

    @property
    def counts(self) -> Counts:
        """How much the shard holds."""
        return Counts(self.stop - self.start, self.num_nodes, self.num_edges, self.num_labels)

    def datasets(self, layout: Layout) -> tuple[Dataset, ...]:
        """Return every dataset of the shard, the activations last."""
        id_bytes = sum(size for _, size in self.extents.get("ids", ()))
        return layout.descriptors(self.counts, id_bytes) + layout.activations(self.num_nodes)

    def head_bytes(self, layout: Layout) -> int:
        """Return the bytes before the activations: descriptors, graphs, labels and outputs."""
        names = [dataset.name for dataset in layout.activations(self.num_nodes)]
        starts = [offset for name in names for offset, _ in self.extents[name]]
        return min(starts, default=self.num_bytes)

    def validate(self, layout: Layout, where: str) -> None:
        """Refuse counts and extents that contradict the layout or the size of the file."""
        where = f"{where}: shard {self.index}"
        rows = {"graph": self.stop - self.start, "node": self.num_nodes}
        if self.num_labels != rows.get(layout.level, self.num_labels):
            raise CacheError(
                f"{where}: found {self.num_labels} label rows, expected {rows[layout.level]}"
            )
        if self.num_edges and not layout.has_edges:
            raise CacheError(f"{where}: found {self.num_edges} edges, expected none")
        datasets = {dataset.name: dataset for dataset in self.datasets(layout)}
        if set(self.extents) != set(datasets):
            raise CacheError(f"{where}: found {sorted(self.extents)}, expected {sorted(datasets)}")
        for name, dataset in datasets.items():
            self._validate_extents(dataset, layout, f"{where}, dataset {name!r}")
        # With overlapping pieces, a small file could claim any amount of data.
        end = 0
        for offset, size in sorted(piece for pieces in self.extents.values() for piece in pieces):
            if offset < end:
                raise CacheError(
                    f"{where}: found data at {offset}, expected it to start after {end}, "
                    "where the dataset before it ends"
                )
            end = offset + size
        if end > self.num_bytes:
            raise CacheError(
                f"{where}: found data up to byte {end}, expected no more than the "
                f"{self.num_bytes} bytes of the file"
            )

    def _validate_extents(self, dataset: Dataset, layout: Layout, where: str) -> None:
        extents = self.extents[dataset.name]
        if any(offset % ALIGNMENT for offset, _ in extents):
            raise CacheError(
                f"{where}: found data at {extents[0][0]}, expected a multiple of {ALIGNMENT}"
            )
        if not (layout.compression and dataset.is_activations):
            expected = [dataset.num_bytes] if dataset.num_bytes else []
            if [size for _, size in extents] != expected:
                raise CacheError(
                    f"{where}: found pieces of {[size for _, size in extents][:4]} bytes, "
                    f"expected {expected}"
                )
            return
        num_chunks = -(-dataset.shape[0] // dataset.chunk_rows)
        if len(extents) != num_chunks:
            raise CacheError(f"{where}: found {len(extents)} chunks, expected {num_chunks}")
        chunk_bytes = dataset.chunk_rows * dataset.row_bytes
        smallest = min((size for _, size in extents), default=chunk_bytes)
        if chunk_bytes > MAX_DEFLATE_RATIO * smallest:
            raise CacheError(
                f"{where}: found a chunk of {smallest} bytes that would expand to {chunk_bytes}, "
                f"expected no more than {MAX_DEFLATE_RATIO} times its size"
            )
