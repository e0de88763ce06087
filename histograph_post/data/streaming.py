"""Graphs that stay on disk: rows are read once, block by block, in several processes.

A source of many rows (molecules as text, a PyG ``OnDiskDataset``, a data set of Hugging Face, any
that can be indexed) is cut into blocks. Worker processes make the graphs of a block and write them
to one file (``row_blocks.py``); from then on a graph is a slice of a memory-mapped file. A block
has a key, the hash of its rows: a command that was killed, or is run again, finds its blocks. Jobs
that share a folder (``--shard i/n``) read the rows of their own shards. Iterators are read as a
whole, in this process.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from joblib import cpu_count
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from ..errors import HistographError
from ..utils.files import refuse_url, remove_leftovers
from .row_blocks import FORMAT, StreamedGraphs, key_of, write_block
from .spec import OnProgress, Reading

#: Data of this many rows stay on disk; smaller data are read into memory at once.
STREAM_ROWS = 50_000

#: Rows of a block: enough that opening its file does not count, few enough to share out.
BLOCK_ROWS = 2048

#: The files of rows, finished or not, and of their predictions.
_ROW_FILES = re.compile(r"rows-[0-9a-f]+\.(safetensors|outputs)(\..*\.partial)?")

#: Rows of a long table that are read before all others.
_SAMPLED = 256


def stays_on_disk(num_rows: int, stream: bool | None) -> bool:
    """Whether so many rows stay on disk: as asked for, else by their number."""
    return num_rows >= STREAM_ROWS if stream is None else stream


def rows_beside(out: str | Path) -> Path:
    """Return the folder for the rows of a command: beside its output, links followed."""
    refuse_url(out)
    return Path(os.path.realpath(out) + ".rows")


def remove_rows(folder: Path) -> None:
    """Remove the rows in a folder, and the folder unless it holds anything else."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _ROW_FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def sampled_rows(num_rows: int) -> np.ndarray:
    """Return a few rows of a long table, spread over it, on which a model is tried out."""
    return np.unique(np.linspace(0, num_rows - 1, _SAMPLED).astype(int))


# --- reading rows into blocks


class RowSource(Protocol):
    """Rows that become graphs. A source goes to worker processes, so it can be pickled."""

    def __len__(self) -> int: ...

    def key(self, rows: range) -> str:
        """Return a hash of what determines the graphs of these rows."""

    def graphs(self, rows: range, notes: Counter[str]) -> Iterator[Data | str]:
        """Yield the graph of each of these rows, or why it has none."""

    def release(self) -> None:
        """Close what processes must not share, such as a connection to a database."""


def read_rows(
    source: RowSource,
    reading: Reading,
    *,
    spec: str,
    wanted: Sequence[range] | None = None,
    on_progress: OnProgress = None,
) -> StreamedGraphs:
    """Read those blocks of a source that are not there yet; return the graphs of all blocks.

    Args:
        wanted: Leave out blocks that have none of these rows.
        on_progress: Called instead of that of ``reading``.
    """
    writing = _Writing(source, row_folder(reading), spec)
    every = range(len(source))
    blocks = [every[start : start + BLOCK_ROWS] for start in every[::BLOCK_ROWS]]
    if wanted is not None:
        needed = {row // BLOCK_ROWS for rows in wanted for row in (*rows[::BLOCK_ROWS], *rows[-1:])}
        blocks = [blocks[number] for number in sorted(needed)]
    total = sum(map(len, blocks))
    missing = [block for block in blocks if not writing.is_there(block)]
    # Blocks that are there count as done before the clock starts.
    done = total - sum(map(len, missing))
    on_progress = on_progress or reading.on_progress or (lambda done, total: None)
    on_progress(done, total)
    for num_rows in writing.write_all(missing, reading.workers):
        done += num_rows
        on_progress(done, total)
    return open_blocks([block_path(writing.folder, block.start) for block in blocks], reading, spec)


def block_path(folder: Path, first_row: int) -> Path:
    """Return the file of the block that begins with a row."""
    return folder / f"rows-{first_row:010d}.safetensors"


def row_folder(reading: Reading) -> Path:
    """Return the folder for blocks, without what killed commands left behind."""
    if reading.folder is None:
        return Path(tempfile.mkdtemp(prefix="histograph-rows-"))
    reading.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(reading.folder)
    return reading.folder


def open_blocks(paths: Sequence[Path], reading: Reading, spec: str) -> StreamedGraphs:
    """Open written blocks; a temporary folder is removed with their graphs."""
    graphs = StreamedGraphs(paths, spec)
    if reading.folder is None:
        weakref.finalize(graphs, shutil.rmtree, paths[0].parent, ignore_errors=True)
    return graphs


@dataclass
class _Writing(Dataset[Any]):
    """Writes blocks of rows, as a data set that worker processes index by the block."""

    source: RowSource
    folder: Path
    spec: str

    def key(self, block: range) -> str:
        return hashlib.sha256(f"{FORMAT} {self.source.key(block)}".encode()).hexdigest()

    def is_there(self, block: range) -> bool:
        path = block_path(self.folder, block.start)
        return path.exists() and key_of(path) == self.key(block)

    def __getitem__(self, block: range) -> int | HistographError:
        """Write a block unless another job was sooner; return how many rows it has, or an error.

        An error that is raised in a worker process would lose its type.
        """
        try:
            if not self.is_there(block):
                notes = Counter[str]()
                made = list(self.source.graphs(block, notes))
                path = block_path(self.folder, block.start)
                write_block(path, self.key(block), block.start, made, notes, self.spec)
        except HistographError as error:
            return error
        return len(block)

    def write_all(self, blocks: Sequence[range], workers: int | None) -> Iterator[int]:
        """Write blocks, in this process or in others; yield the number of rows of each."""
        workers = min(len(blocks), cpu_count() if workers is None else workers)
        if workers == 0 or len(blocks) == 1:
            written: Iterable[Any] = map(self.__getitem__, blocks)
        else:
            self.source.release()
            written = DataLoader(self, batch_size=None, sampler=blocks, num_workers=workers)
        with warnings.catch_warnings():
            # More processes than cores are the user's choice.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            for num_rows in written:
                if isinstance(num_rows, HistographError):
                    raise num_rows
                yield num_rows
