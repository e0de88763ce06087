"""Writing a shard as an HDF5 file, whose bytes depend on its contents only.

The HDF5 library does not survive a write that fails, as on a full disk, so it writes through a
:class:`CheckedFile`, which hides errors from it. It is used for writing only, since crafted files
crash it. Readers map the bytes that the manifest names instead (see
:class:`~histograph_post.caches.layout.ShardInfo`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t
from torch import Tensor

from ..errors import CacheError
from ..utils.files import atomic_path, open_regular, sha256_prefixes
from .blocks import BlockMemory, RowBlock, ShardGraphs
from .layout import (
    ALIGNMENT,
    GZIP_LEVEL,
    Dataset,
    Extent,
    Layout,
    ShardInfo,
    compress,
    shard_name,
)
from .manifest import FORMAT_VERSION, ShardRecord, write_record

T = TypeVar("T")


class ShardWriter:
    """One shard being written: in the end there is a complete file, or none.

    One thread fills a :meth:`block` after the other, in the order of the graphs; another calls
    :meth:`open`, :meth:`write` and :meth:`close`, or :meth:`discard`. Then :attr:`info` is the
    shard's entry in the manifest.
    """

    def __init__(
        self, folder: Path, index: int, layout: Layout, plan_hash: str, graphs: ShardGraphs
    ) -> None:
        self._path = folder / shard_name(index)
        self.index = index
        self._layout = layout
        self._plan_hash = plan_hash
        self._ids = graphs.ids
        self._arrays, self._counts = graphs.arrays(layout, str(self._path))
        self._numbers = {
            "index": index,
            "start": graphs.start,
            "stop": graphs.start + len(graphs.ids),
            "num_nodes": self._counts.num_nodes,
            "num_edges": self._counts.num_edges,
            "num_labels": self._counts.num_labels,
        }
        #: By the name of the dataset, in the order of the file.
        self._rows: dict[str, RowWriter] = {}
        self._next_graph = 0
        self._info: ShardInfo | None = None
        self._file: CheckedFile
        self._steps = self._writing()

    @property
    def num_graphs(self) -> int:
        """Graphs of the shard."""
        return len(self._ids)

    def open(self) -> None:
        """Create the file under a temporary name."""
        next(self._steps)

    def close(self) -> None:
        """Check and hash the file, and move it to its final name."""
        next(self._steps, None)

    @property
    def info(self) -> ShardInfo:
        """The manifest's entry for the shard, once it is closed."""
        if self._info is None:
            raise CacheError(f"{self._path}: found an unfinished shard, expected a closed one")
        return self._info

    def discard(self) -> None:
        """Remove what was written, unless the shard is closed."""
        self._steps.close()

    def block(self, graphs: range, memory: BlockMemory) -> RowBlock:
        """Return a block for the layers of these graphs of the shard.

        Unlike the rest, this may be called in another thread, and before the shard is open.
        """
        if not (graphs.start < graphs.stop <= self.num_graphs or not self.num_graphs):
            raise CacheError(
                f"{self._path}: found graphs {graphs.start} to {graphs.stop}, "
                f"expected at most {self.num_graphs}, and at least one at a time"
            )
        ptr = self._arrays["ptr"]
        return RowBlock(
            self._layout,
            graphs,
            int(ptr[graphs.stop] - ptr[graphs.start]),
            graph_of_row=partial(self._graph_of_row, ptr, graphs),
            where=str(self._path),
            memory=memory,
        )

    def _graph_of_row(self, ptr: np.ndarray, graphs: range, row: int) -> str:
        """Return the id of the graph that row ``row`` of a block belongs to."""
        return self._ids[int(np.searchsorted(ptr, ptr[graphs.start] + row, "right")) - 1]

    def write(self, block: RowBlock, outputs: Tensor | None = None) -> None:
        """Write the next block, which is filled, and the model's own outputs for its graphs."""
        self._expect(block.graphs.start, self._next_graph, "a block from graph")
        names = [spec.name for spec in self._layout.activations(self._counts.num_nodes)]
        rows = dict(zip(names, block.arrays(), strict=True))
        if (values := self._checked_outputs(block.graphs, outputs)) is not None:
            rows["outputs"] = values
        for name, array in rows.items():
            self._rows[name].write(array)
        self._file.check()
        self._next_graph = block.graphs.stop

    def _expect(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            raise CacheError(f"{self._path}: found {what} {found}, expected {expected}")

    def _checked_outputs(self, graphs: range, outputs: Tensor | None) -> np.ndarray | None:
        """Return the outputs for some graphs, ``[rows, output_width]``, as they are stored."""
        width, level = self._layout.output_width, self._layout.output_level
        names = {"node": "ptr", "link": "label_ptr"}
        ptr = self._arrays[names[level]] if level in names else np.arange(self.num_graphs + 1)
        expected = None if width is None else (int(ptr[graphs.stop] - ptr[graphs.start]), width)
        found = None if outputs is None else tuple(outputs.shape)
        self._expect(found, expected, "outputs of shape")
        if outputs is None:
            return None
        values = outputs.detach().cpu()  # [rows, output_width]
        finite = torch.isfinite(values).all(dim=1)  # [rows]
        if not finite.all():
            graph = self._graph_of_row(ptr, graphs, int((~finite).nonzero()[0]))
            raise CacheError(
                f"graph {graph!r}: found an output of the model that is not finite, expected "
                "numbers"
            )
        return values.float().numpy()

    def _writing(self) -> Generator[None]:
        with atomic_path(self._path) as unfinished:
            with closing(CheckedFile(unfinished, self._path)) as self._file:
                file = create_file(self._file, self._plan_hash, self._numbers)
                try:
                    self._create_datasets(file)
                    self._file.check()
                    yield
                    if self._next_graph != self.num_graphs:
                        raise CacheError(
                            f"{self._path}: found {self._next_graph} graphs, "
                            f"expected {self.num_graphs} before the shard is closed"
                        )
                    extents = {name: rows.finish() for name, rows in self._rows.items()}
                finally:
                    try:
                        file.close()
                    finally:
                        self._file.check()
            self._info = self._entry(unfinished, extents)
            # Before the shard has its name, so that every shard has a record beside it.
            write_record(self._path, ShardRecord(self._plan_hash, self._info))

    def _create_datasets(self, file: h5f.FileID) -> None:
        layout, counts = self._layout, self._counts
        for dataset in layout.descriptors(counts, len(self._arrays["ids"])):
            self._rows[dataset.name] = RowWriter(file, dataset)
            if dataset.name != "outputs":
                self._rows[dataset.name].write(self._arrays[dataset.name])
        # The activations come last in the file, so that everything before them has one hash.
        if not layout.is_uniform:
            create_group(file, "activations")
        for dataset in layout.activations(counts.num_nodes):
            kind = CompressedWriter if layout.compression and dataset.num_bytes else RowWriter
            self._rows[dataset.name] = kind(file, dataset)

    def _entry(self, path: Path, extents: dict[str, tuple[Extent, ...]]) -> ShardInfo:
        """Return the manifest's entry for a finished file, which is read again for its hashes."""
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            info = ShardInfo(
                **self._numbers, num_bytes=size, sha256="", head_sha256="", extents=extents
            )
            info.validate(self._layout, str(self._path))
            head, whole = sha256_prefixes(file, (info.head_bytes(self._layout), size))
        return replace(info, sha256=whole, head_sha256=head)


# --- the file: its bytes depend on its contents only


class CheckedFile:
    """The file of a shard that is being written, as the HDF5 library sees it: nothing ever fails.

    The first error is kept for :meth:`check`, and nothing is written after it.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self._name = name
        self._file = path.open("wb+", buffering=0)
        self._place, self._size = 0, 0
        self._failed = False
        self._error: BaseException | None = None

    def check(self) -> None:
        """Raise the error that has occurred since the last check."""
        error, self._error = self._error, None
        if isinstance(error, OSError):
            error.filename = str(self._name)
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the file, after the library has closed it."""
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
        """Read back what was written; bytes that are missing are zero."""
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
        """Do nothing: writes are not buffered."""

    def _write_all(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _attempt(self, call: Callable[[], T]) -> T | None:
        """Call a function, unless one has failed before."""
        if not self._failed:
            try:
                self._file.seek(self._place)
                return call()
            except BaseException as error:  # an interrupt must not reach the library either
                self._failed, self._error = True, error
        return None


def create_file(checked: CheckedFile, plan_hash: str, numbers: Mapping[str, int]) -> h5f.FileID:
    """Create the file of a shard, without datasets yet; ``numbers`` become attributes of it."""
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(1, ALIGNMENT)
    access.set_fileobj_driver(h5fd.fileobj_driver, checked)
    file = h5f.create(b"shard", h5f.ACC_TRUNC, creation, access)  # the name is not used
    for name, number in numbers.items():
        _write_attribute(file, name, np.array(number, "<i8"))
    _write_attribute(file, "format_version", np.array(FORMAT_VERSION.encode(), "S8"))
    _write_attribute(file, "plan_hash", np.array(plan_hash.encode(), "S64"))
    return file


def _write_attribute(file: h5f.FileID, name: str, value: np.ndarray) -> None:
    kind = h5t.py_create(value.dtype)
    h5a.create(file, name.encode(), kind, h5s.create(h5s.SCALAR)).write(value)


def create_group(file: h5f.FileID, name: str) -> None:
    """Create a group without a time stamp."""
    creation = h5p.create(h5p.GROUP_CREATE)
    creation.set_obj_track_times(False)
    h5g.create(file, name.encode(), gcpl=creation)


class RowWriter:
    """A dataset that takes its rows in order, created with its place in the file."""

    def __init__(self, file: h5f.FileID, spec: Dataset) -> None:
        self._spec = spec
        self._done = 0
        creation = h5p.create(h5p.DATASET_CREATE)
        creation.set_obj_track_times(False)
        creation.set_fill_time(h5d.FILL_TIME_NEVER)
        self._store(creation)
        kind = h5t.py_create(np.dtype(spec.dtype))
        space = h5s.create_simple(spec.shape)
        self._dataset = h5d.create(file, spec.name.encode(), kind, space, creation)

    def _store(self, creation: h5p.PropDCID) -> None:
        creation.set_layout(h5d.CONTIGUOUS)
        creation.set_alloc_time(h5d.ALLOC_TIME_EARLY)

    def write(self, block: np.ndarray) -> None:
        """Write the next rows, all at once."""
        if not block.size:
            return
        place = self._dataset.get_space()
        place.select_hyperslab((self._done, *(0 for _ in block.shape[1:])), block.shape)
        self._dataset.write(h5s.create_simple(block.shape), place, np.ascontiguousarray(block))
        self._done += len(block)

    def finish(self) -> tuple[Extent, ...]:
        """Write buffered rows, and return where in the file the values are."""
        size = self._spec.num_bytes
        return ((self._dataset.get_offset(), size),) if size else ()


class CompressedWriter(RowWriter):
    """Stores rows in compressed chunks; rows that do not fill a chunk yet are buffered."""

    def __init__(self, file: h5f.FileID, spec: Dataset) -> None:
        super().__init__(file, spec)
        self._chunk = np.zeros((spec.chunk_rows, *spec.shape[1:]), spec.dtype)
        self._filled = 0

    def _store(self, creation: h5p.PropDCID) -> None:
        creation.set_chunk((self._spec.chunk_rows, *self._spec.shape[1:]))
        creation.set_shuffle()
        creation.set_deflate(GZIP_LEVEL)

    def write(self, block: np.ndarray) -> None:
        """Buffer the next rows, and write the chunks that are full."""
        while len(block):
            taken = min(len(block), len(self._chunk) - self._filled)
            self._chunk[self._filled : self._filled + taken] = block[:taken]
            self._filled += taken
            block = block[taken:]
            if self._filled == len(self._chunk):
                self._write_chunk()

    def finish(self) -> tuple[Extent, ...]:
        """Write the last chunk, padded with zeros as HDF5 wants it."""
        if self._filled:
            self._chunk[self._filled :] = 0
            self._write_chunk()
        chunks: list[h5d.StoreInfo] = []
        self._dataset.chunk_iter(chunks.append)
        chunks.sort(key=lambda chunk: chunk.chunk_offset)
        return tuple((chunk.byte_offset, chunk.size) for chunk in chunks)

    def _write_chunk(self) -> None:
        origin = (self._done, *(0 for _ in self._chunk.shape[1:]))
        self._dataset.write_direct_chunk(origin, compress(self._chunk))
        self._done += len(self._chunk)
        self._filled = 0
