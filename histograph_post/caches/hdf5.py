"""A shard as an HDF5 file: created so that its bytes depend on its contents only; inspected.

The library does not survive a write that fails, as on a full disk: it writes through a
:class:`CheckedFile`, which never tells it. Only writing and resuming use it, on files that this
program wrote: crafted files crash it. A reader maps the bytes that the manifest names instead (see
:class:`~histograph_post.caches.layout.ShardInfo`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5l, h5p, h5s, h5t, h5z

from ..errors import CacheError
from ..utils.decoding import is_count
from ..utils.files import open_regular, sha256_prefixes
from .layout import (
    ALIGNMENT,
    GZIP_LEVEL,
    Counts,
    Dataset,
    Extent,
    Layout,
    ShardInfo,
    compress,
)
from .manifest import FORMAT_VERSION

#: The attributes at the root of a shard: numbers, and two texts.
COUNT_ATTRIBUTES = ("index", "start", "stop", "num_nodes", "num_edges", "num_labels")
TEXT_ATTRIBUTES = {"format_version": "S8", "plan_hash": "S64"}

T = TypeVar("T")

_FILTERS = [h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE]


class CheckedFile:
    """The file of a shard that is being written, as the HDF5 library sees it: nothing ever fails.

    What does fail is kept for :meth:`check`, and nothing is written after it.

    Args:
        path: The file, which must not exist.
        name: What it is called in errors.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self._name = name
        self._file = path.open("xb+", buffering=0)
        self._place, self._size = 0, 0
        self._failed = False
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise what went wrong since the last check."""
        error, self._error = self._error, None
        if isinstance(error, OSError):
            error.filename = str(self._name)
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the file; the library must have let go of it."""
        self._file.close()

    # --- what the library calls

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to where the next call reads or writes: a place, or the end of the file."""
        self._place = self._size if whence == os.SEEK_END else offset
        return self._place

    def tell(self) -> int:
        """Return where the next call reads or writes."""
        return self._place

    def write(self, data: memoryview) -> int:
        """Write all of ``data``, however many writes that takes."""
        self._attempt(lambda: self._write_all(data))
        self._place += len(data)
        self._size = max(self._size, self._place)
        return len(data)

    def readinto(self, buffer: memoryview) -> int:
        """Read back what was written; what is not there is zero."""
        count = self._attempt(lambda: self._file.readinto(buffer)) or 0
        buffer[count:] = bytes(len(buffer) - count)
        self._place += len(buffer)
        return len(buffer)

    def truncate(self, size: int) -> int:
        """Set the size of the file."""
        self._attempt(lambda: self._file.truncate(size))
        self._size = size
        return size

    def flush(self) -> None:
        """Do nothing: no write is held back."""

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """Make a call unless one has failed before."""
        if not self._failed:
            try:
                self._file.seek(self._place)
                return call()
            except BaseException as error:  # an interrupt must not reach the library either
                self._failed, self._error = True, error
        return None


def create_file(
    checked: CheckedFile, plan_hash: str, index: int, start: int, counts: Counts
) -> h5f.FileID:
    """Create the file of a shard, without datasets yet."""
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(1, ALIGNMENT)
    access.set_fileobj_driver(h5fd.fileobj_driver, checked)
    file = h5f.create(b"shard", h5f.ACC_TRUNC, creation, access)  # the name is not used
    sizes = (counts.num_nodes, counts.num_edges, counts.num_labels)
    numbers = (index, start, start + counts.num_graphs, *sizes)
    for name, number in zip(COUNT_ATTRIBUTES, numbers, strict=True):
        _write_attribute(file, name, np.array(number, "<i8"))
    for name, text in zip(TEXT_ATTRIBUTES, (FORMAT_VERSION, plan_hash), strict=True):
        _write_attribute(file, name, np.array(text.encode(), TEXT_ATTRIBUTES[name]))
    return file


def _write_attribute(file: h5f.FileID, name: str, value: np.ndarray) -> None:
    kind = h5t.py_create(value.dtype)
    h5a.create(file, name.encode(), kind, h5s.create(h5s.SCALAR)).write(value)


def create_dataset(file: h5f.FileID, dataset: Dataset, *, chunked: bool = False) -> h5d.DatasetID:
    """Create a dataset; an uncompressed one gets its place in the file at once."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    if chunked:
        creation.set_chunk((dataset.chunk_rows, *dataset.shape[1:]))
        creation.set_shuffle()
        creation.set_deflate(GZIP_LEVEL)
    else:
        creation.set_layout(h5d.CONTIGUOUS)
        creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    kind = h5t.py_create(np.dtype(dataset.dtype))
    space = h5s.create_simple(dataset.shape)
    return h5d.create(file, dataset.name.encode(), kind, space, creation)


def create_group(file: h5f.FileID, name: str) -> None:
    """Create a group without a time stamp."""
    creation = h5p.create(h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    h5g.create(file, name.encode(), gcpl=creation)


# --- rows of activations


class RowWriter(Protocol):
    """A dataset that takes its rows in order."""

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""

    def finish(self) -> None:
        """Write what is still held back."""


class PlainWriter:
    """Stores rows as they are: one write per block."""

    def __init__(self, dataset: h5d.DatasetID) -> None:
        self._dataset = dataset
        self._done = 0

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""
        if not block.size:
            return
        place = self._dataset.get_space()
        place.select_hyperslab((self._done, *(0 for _ in block.shape[1:])), block.shape)
        self._dataset.write(h5s.create_simple(block.shape), place, np.ascontiguousarray(block))
        self._done += len(block)

    def finish(self) -> None:
        """Write nothing more: no row is ever held back."""


class CompressedWriter:
    """Stores rows in compressed chunks; what does not fill a chunk yet is held back."""

    def __init__(self, dataset: h5d.DatasetID, spec: Dataset) -> None:
        self._dataset = dataset
        self._chunk = np.zeros((spec.chunk_rows, *spec.shape[1:]), spec.dtype)
        self._start = 0
        self._filled = 0

    def write(self, block: np.ndarray) -> None:
        """Take the next rows, and write the chunks that are full."""
        while len(block):
            taken = min(len(block), len(self._chunk) - self._filled)
            self._chunk[self._filled : self._filled + taken] = block[:taken]
            self._filled += taken
            block = block[taken:]
            if self._filled == len(self._chunk):
                self._write_chunk()

    def finish(self) -> None:
        """Write the last chunk, padded with zeros as HDF5 wants it."""
        if self._filled:
            self._chunk[self._filled :] = 0
            self._write_chunk()

    def _write_chunk(self) -> None:
        origin = (self._start, *(0 for _ in self._chunk.shape[1:]))
        self._dataset.write_direct_chunk(origin, compress(self._chunk))
        self._start += len(self._chunk)
        self._filled = 0


# --- reading it back


def inspect_shard(path: Path, layout: Layout, plan_hash: str) -> ShardInfo:
    """Return the manifest's entry for the shard at ``path``, from the file alone.

    Everything is checked against the layout before any of it is used: links are hard, types,
    shapes and filters are the expected ones, and all values are in this file and within it.
    """
    where = str(path)
    with open_regular(path) as opened:
        try:
            with h5py.File(opened, "r") as file:
                info = _read_root(h5g.open(file.id, b"/"), layout, plan_hash, where)
        except CacheError:
            raise
        except Exception as error:
            # The library reports damage as an exception of almost any type.
            reason = str(error).partition("\n")[0]
            raise CacheError(f"{where}: found a damaged file ({reason}), expected HDF5") from None
        info = replace(info, num_bytes=os.fstat(opened.fileno()).st_size)
        info.validate(layout, where)
        head, file = sha256_prefixes(opened, (info.head_bytes(layout), info.num_bytes))
    return replace(info, sha256=file, head_sha256=head)


def _read_root(root: h5g.GroupID, layout: Layout, plan_hash: str, where: str) -> ShardInfo:
    """Return a shard's entry, its size and hashes still missing."""
    version, plan = (
        _read_attribute(root, name, kind, where).item().decode("ascii")
        for name, kind in TEXT_ATTRIBUTES.items()
    )
    if (version, plan) != (FORMAT_VERSION, plan_hash):
        raise CacheError(
            f"{where}: found format {version} and plan {plan}, "
            f"expected {FORMAT_VERSION} and {plan_hash}"
        )
    numbers = {name: _read_attribute(root, name, "<i8", where).item() for name in COUNT_ATTRIBUTES}
    if not all(map(is_count, numbers.values())) or numbers["stop"] <= numbers["start"]:
        raise CacheError(f"{where}: found counts {numbers}, expected numbers from 0, start < stop")
    info = ShardInfo(**numbers, num_bytes=0, sha256="", head_sha256="", extents={})

    activations = layout.activations(info.num_nodes)
    descriptors = layout.descriptors(info.counts, 0)
    _check_links(root, [*(item.name for item in descriptors), "activations"], where)
    if not layout.is_uniform:
        layers = [str(layer) for layer in range(layout.num_layers)]
        _check_links(h5g.open(root, b"activations"), layers, f"{where}: activations")
    # How long the ids are together is the one thing that the counts do not show.
    id_bytes = int(np.prod(h5d.open(root, b"ids").shape))
    datasets = layout.descriptors(info.counts, id_bytes) + activations
    extents = {dataset.name: _read_extents(root, dataset, layout, where) for dataset in datasets}
    return replace(info, extents=extents)


def _read_attribute(root: h5g.GroupID, name: str, kind: str, where: str) -> np.ndarray:
    """Return a scalar attribute of exactly the expected type, so that its size is known."""
    attribute = h5a.open(root, name.encode()) if h5a.exists(root, name.encode()) else None
    expected = h5t.py_create(np.dtype(kind))
    if (
        attribute is None
        or attribute.get_space().get_simple_extent_type() != h5s.SCALAR
        or not attribute.get_type().equal(expected)
    ):
        raise CacheError(f"{where}: found no attribute {name!r} of the expected type {kind}")
    value = np.empty((), kind)
    attribute.read(value)
    return value


def _check_links(group: h5g.GroupID, names: Collection[str], where: str) -> None:
    """Refuse a group that does not hold exactly ``names``, each in this very file."""
    if group.get_num_objs() != len(names):
        raise CacheError(f"{where}: found {group.get_num_objs()} names, expected {len(names)}")
    for name in names:
        if not group.links.exists(name.encode()):
            raise CacheError(f"{where}: found no {name!r}, expected one")
        if group.links.get_info(name.encode()).type != h5l.TYPE_HARD:
            raise CacheError(f"{where}: found a link at {name!r}, expected a dataset in this file")


def _read_extents(
    root: h5g.GroupID, expected: Dataset, layout: Layout, where: str
) -> tuple[Extent, ...]:
    """Return where a dataset's values lie, refusing any other type, shape or storage."""
    where = f"{where}: dataset {expected.name!r}"
    found = h5d.open(root, expected.name.encode())
    if not found.get_type().equal(h5t.py_create(np.dtype(expected.dtype))):
        kind = found.get_type()
        raise CacheError(
            f"{where}: found a type of class {kind.get_class()} and {kind.get_size()} bytes, "
            f"expected {expected.dtype}"
        )
    if found.shape != expected.shape:
        raise CacheError(f"{where}: found shape {found.shape}, expected {expected.shape}")
    creation = found.get_create_plist()
    compressed = bool(layout.compression and expected.is_activations and expected.num_bytes)
    storage = h5d.CHUNKED if compressed else h5d.CONTIGUOUS
    if creation.get_layout() != storage or creation.get_external_count():
        raise CacheError(
            f"{where}: found values stored in another way or in another file, "
            f"expected {'chunks' if compressed else 'one piece'} in this one"
        )
    filters = [creation.get_filter(index)[0] for index in range(creation.get_nfilters())]
    if filters != (_FILTERS if compressed else []):
        raise CacheError(
            f"{where}: found filters {filters}, expected {_FILTERS if compressed else []}"
        )
    if compressed:
        return _read_chunks(found, creation.get_chunk(), expected, where)
    if not expected.num_bytes:
        return ()
    offset = found.get_offset()
    if offset is None:
        raise CacheError(f"{where}: found no values, expected {expected.num_bytes} bytes")
    return ((offset, expected.num_bytes),)


def _read_chunks(
    found: h5d.DatasetID, shape: tuple[int, ...], expected: Dataset, where: str
) -> tuple[Extent, ...]:
    """Return where the chunks of a compressed dataset lie, in the order of their rows."""
    if shape != (expected.chunk_rows, *expected.shape[1:]):
        raise CacheError(f"{where}: found chunks of {shape}, expected {expected.chunk_rows} rows")
    chunks: list[h5d.StoreInfo] = []
    found.chunk_iter(chunks.append)
    chunks.sort(key=lambda chunk: chunk.chunk_offset)
    starts = [chunk.chunk_offset[0] for chunk in chunks]
    if starts != list(range(0, expected.shape[0], expected.chunk_rows)) or any(
        chunk.filter_mask for chunk in chunks
    ):
        raise CacheError(f"{where}: found missing or unfiltered chunks, expected all, compressed")
    return tuple((chunk.byte_offset, chunk.size) for chunk in chunks)
