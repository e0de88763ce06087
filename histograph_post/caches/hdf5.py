"""Creating a shard as an HDF5 file whose bytes depend on nothing but its contents."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5p, h5s, h5t

from .format import FORMAT_VERSION
from .layout import Counts, Dataset
from .shard_info import ALIGNMENT

#: What the root of a shard says of itself as numbers; beside them are two texts.
COUNT_ATTRIBUTES = ("index", "start", "stop", "num_nodes", "num_edges", "num_labels")
TEXT_ATTRIBUTES = {"format_version": "S8", "plan_hash": "S64"}


def create_file(path: Path, plan_hash: str, index: int, start: int, counts: Counts) -> h5f.FileID:
    """Create a shard whose bytes depend on nothing but what is written into it."""
    creation = h5p.create(h5p.FILE_CREATE)
    creation.set_obj_track_times(False)
    access = h5p.create(h5p.FILE_ACCESS)
    access.set_fclose_degree(h5f.CLOSE_STRONG)
    access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
    access.set_alignment(1, ALIGNMENT)
    # Room for HDF5's own descriptors at the front, so that values are not torn apart by them.
    access.set_meta_block_size(8 * 2**10)
    file = h5f.create(os.fsencode(path), h5f.ACC_EXCL, creation, access)
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


def create_dataset(
    file: h5f.FileID, dataset: Dataset, *, gzip_level: int | None = None
) -> h5d.DatasetID:
    """Create a dataset; an uncompressed one gets its place in the file at once."""
    creation = h5p.create(h5p.DATASET_CREATE)
    creation.set_obj_track_times(False)
    creation.set_fill_time(h5d.FILL_TIME_NEVER)
    if gzip_level is not None:
        creation.set_chunk((dataset.chunk_rows, *dataset.shape[1:]))
        creation.set_shuffle()
        creation.set_deflate(gzip_level)
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
