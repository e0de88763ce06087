"""One shard opened for reading: its bytes mapped, its values checked, nothing copied."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol, Self

import numpy as np

from ..errors import CacheError
from .compression import expand
from .contents import check_contents
from .layout import Dataset, Layout
from .regular_file import open_regular, sha256_prefix
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
