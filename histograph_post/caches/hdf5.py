"""A shard as an HDF5 file, created so that its bytes depend on its contents only.

The HDF5 library does not survive a write that fails, as on a full disk, so it writes through a
:class:`CheckedFile`, which hides errors from it. It is used for writing only, since crafted files
crash it. Readers map the bytes that the manifest names instead (see
:class:`~histograph_post.caches.layout.ShardInfo`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from h5py import h5a, h5d, h5f, h5fd, h5g, h5p, h5s, h5t

from .layout import ALIGNMENT, GZIP_LEVEL, Dataset, Extent, compress
from .manifest import FORMAT_VERSION

T = TypeVar("T")


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
