"""Filling a dataset of a shard from top to bottom."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from h5py import h5d, h5s

from ..errors import CacheError
from .compression import compress
from .layout import Dataset


class RowWriter(Protocol):
    """A dataset that takes its rows in order."""

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""

    def finish(self) -> None:
        """Write what is still held back."""


class PlainWriter:
    """Stores rows as they are: one write per block."""

    def __init__(self, dataset: h5d.DatasetID, path: Path) -> None:
        self._dataset = dataset
        self._path = path
        self._done = 0

    def write(self, block: np.ndarray) -> None:
        """Write the next rows."""
        if not block.size:
            return
        place = self._dataset.get_space()
        place.select_hyperslab((self._done, *(0 for _ in block.shape[1:])), block.shape)
        try:
            self._dataset.write(h5s.create_simple(block.shape), place, np.ascontiguousarray(block))
        except OSError as error:
            raise cannot_write(self._path, error) from None
        self._done += len(block)

    def finish(self) -> None:
        """Write nothing more: no row is ever held back."""


class CompressedWriter:
    """Stores rows in compressed chunks; what does not fill a chunk yet is held back."""

    def __init__(self, dataset: h5d.DatasetID, spec: Dataset, path: Path) -> None:
        self._dataset = dataset
        self._path = path
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
        try:
            self._dataset.write_direct_chunk(origin, compress(self._chunk))
        except OSError as error:
            raise cannot_write(self._path, error) from None
        self._start += len(self._chunk)
        self._filled = 0


def cannot_write(path: Path, error: Exception) -> CacheError:
    """Return the error for a shard that the file system did not take, as on a full disk."""
    reason = str(error).partition("\n")[0]
    return CacheError(f"{path}: cannot be written ({reason})")
