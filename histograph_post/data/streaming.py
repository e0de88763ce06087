"""Graphs that stay on disk: rows are read once, block by block, in several processes.

A source of many rows (molecules as text, a PyG ``OnDiskDataset``, a data set of Hugging Face, any
that can be indexed) is cut into blocks. Worker processes make the graphs of a block and write them
to one file (``row_blocks.py``); from then on a graph is a slice of a memory-mapped file. A block
has a key, the hash of its rows: a command that was killed, or is run again, finds its blocks. Jobs
that share a folder (``--shard i/n``) read the rows of their own shards of a table of molecules; of
other sources they share the work, since each begins at its own place and skips blocks that another
has written. Iterators are read in this process.

Of a user's own graphs, only those with node features and graph-level labels stay on disk: features
and splits that depend on all graphs need them in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from joblib import cpu_count
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset

from ..errors import DataError, HistographError
from ..utils import Level
from ..utils.files import refuse_url, remove_leftovers
from ..utils.text import first_line
from .checks import prepare_graph
from .labels import detect_level
from .row_blocks import FORMAT, StreamedGraphs, key_of, write_block
from .spec import Reading

#: Data of this many rows stay on disk; smaller data are read into memory at once.
STREAM_ROWS = 50_000

#: Rows of a block: enough that opening its file does not count, few enough to share out.
BLOCK_ROWS = 2048

#: The files of rows, finished or not, and of their predictions.
_ROW_FILES = re.compile(r"rows-[0-9a-f]+\.(safetensors|outputs)(\..*\.partial)?")

#: Graphs that are checked to decide whether all of them can stay on disk.
_LOOKED_AT = 64

#: What Hugging Face's graph data sets call the features of nodes.
_OTHER_NAMES = {"node_feat": "x"}


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
    reading: Reading | None,
    *,
    spec: str,
    wanted: Sequence[range] | None = None,
) -> StreamedGraphs:
    """Read those blocks of a source that are not there yet; return the graphs of all blocks.

    Args:
        wanted: Leave out blocks that have none of these rows.
    """
    reading = reading or Reading()
    writing = _Writing(source, _folder(reading), spec)
    every = range(len(source))
    blocks = [every[start : start + BLOCK_ROWS] for start in every[::BLOCK_ROWS]]
    if wanted is not None:
        needed = {row // BLOCK_ROWS for rows in wanted for row in (*rows[::BLOCK_ROWS], *rows[-1:])}
        blocks = [blocks[number] for number in sorted(needed)]
    total = sum(map(len, blocks))
    # Each job begins at its own place, and wraps around.
    number, count = reading.part
    first = number * len(blocks) // count
    missing = [block for block in (*blocks[first:], *blocks[:first]) if not writing.is_there(block)]
    # Blocks that are there count as done before the clock starts.
    done = total - sum(map(len, missing))
    on_progress = reading.on_progress or (lambda done, total: None)
    on_progress(done, total)
    for num_rows in writing.write_all(missing, reading.workers):
        done += num_rows
        on_progress(done, total)
    return _opened([_path(writing.folder, block.start) for block in blocks], reading, spec)


def _path(folder: Path, first_row: int) -> Path:
    return folder / f"rows-{first_row:010d}.safetensors"


def _folder(reading: Reading) -> Path:
    if reading.folder is None:
        return Path(tempfile.mkdtemp(prefix="histograph-rows-"))
    reading.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(reading.folder)
    return reading.folder


def _opened(paths: Sequence[Path], reading: Reading, spec: str) -> StreamedGraphs:
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
        path = _path(self.folder, block.start)
        return path.exists() and key_of(path) == self.key(block)

    def __getitem__(self, block: range) -> int | HistographError:
        """Write a block unless another job was sooner; return how many rows it has, or an error.

        An error that is raised in a worker process would lose its type.
        """
        try:
            if not self.is_there(block):
                notes = Counter[str]()
                made = list(self.source.graphs(block, notes))
                path = _path(self.folder, block.start)
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


# --- a user's own graphs


def stream_graphs(
    given: Iterable[Any],
    *,
    spec: str,
    stream: bool | None,
    level: Level | None,
    reading: Reading | None,
) -> StreamedGraphs | list[Any]:
    """Return graphs on disk if there are many of a kind that can stay there, else a list.

    Args:
        stream: Whether they stay on disk; None to decide by their number.
        level: What has labels; None to detect it.
    """
    if isinstance(given, StreamedGraphs):
        return given
    if stream is False or isinstance(given, list | tuple | InMemoryDataset):
        return [as_graph(graph) for graph in given]
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return _from_iterator(map(as_graph, given), spec, stream, level, reading or Reading())
    rows = IndexedRows(given, spec)
    every = range(len(rows))
    if stays_on_disk(len(rows), stream) and _can_stream(
        [rows.given(row) for row in every[:_LOOKED_AT]], level, spec
    ):
        return read_rows(rows, reading, spec=spec)
    return [rows.given(row) for row in every]


def _from_iterator(
    graphs: Iterator[Any], spec: str, stream: bool | None, level: Level | None, reading: Reading
) -> StreamedGraphs | list[Any]:
    most = STREAM_ROWS if stream is None else _LOOKED_AT
    first = list(itertools.islice(graphs, most))
    graphs = itertools.chain(first, graphs)
    if not (stays_on_disk(len(first), stream) and _can_stream(first[:_LOOKED_AT], level, spec)):
        return list(graphs)
    folder, paths, done = _folder(reading), [], 0
    while chunk := list(itertools.islice(graphs, BLOCK_ROWS)):
        notes: Counter[str] = Counter()
        made = [_prepared(row, graph, notes, spec) for row, graph in enumerate(chunk, done)]
        paths.append(_path(folder, done))
        write_block(paths[-1], "", done, made, notes, spec)
        done += len(chunk)
        if reading.on_progress is not None:
            reading.on_progress(done, done)
    return _opened(paths, reading, spec)


def as_graph(row: Any) -> Any:
    """Return a row that is a dictionary as a graph; any other row as it is."""
    if not isinstance(row, Mapping) or "edge_index" not in row:
        return row
    values = {_OTHER_NAMES.get(name, name): value for name, value in row.items()}
    return Data.from_dict(
        {
            name: torch.from_numpy(np.array(value)) if isinstance(value, list) else value
            for name, value in values.items()
            if value is not None
        }
    )


class IndexedRows:
    """A data set that can be indexed, whose rows are read in any process."""

    def __init__(self, dataset: Any, spec: str) -> None:
        self._dataset = dataset
        self._spec = spec
        self._length = len(dataset)
        #: The process with an open connection, if the data set is a database.
        self._process: int | None = os.getpid()

    def __len__(self) -> int:
        return self._length

    def given(self, row: int) -> Any:
        """Return a graph as the data set has it."""
        if self._process != os.getpid() and isinstance(self._dataset, OnDiskDataset):
            self._dataset.db.connect()
        self._process = os.getpid()
        try:
            return as_graph(self._dataset[row])
        except HistographError:
            raise
        except Exception as error:  # the user's code: it may raise anything
            raise DataError(
                f"{self._spec}: row {row}: failed with {type(error).__name__}: {first_line(error)}"
            ) from error

    def key(self, rows: range) -> str:
        """Return a hash of the data set's name and size and of the first and the last graph."""
        which = f"indexed {self._spec} {self._length} {rows.start} {rows.stop}"
        digest = hashlib.sha256(which.encode())
        for row in sorted({rows[0], rows[-1]}):
            graph = prepare_graph(self.given(row), f"{self._spec}: row {row}", Counter())
            for name, value in sorted(graph.to_dict().items()):
                digest.update(f"{name} {value!r}".encode())
                if isinstance(value, torch.Tensor) and value.numel():
                    digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def graphs(self, rows: range, notes: Counter[str]) -> Iterator[Data]:
        """Yield the graph of each row, checked."""
        for row in rows:
            yield _prepared(row, self.given(row), notes, self._spec)

    def release(self) -> None:
        """Close the connection to a database: every process opens its own."""
        if isinstance(self._dataset, OnDiskDataset):
            self._dataset.close()
            self._process = None


def _prepared(row: int, given: Any, notes: Counter[str], spec: str) -> Data:
    """Return a checked graph that has only tensors."""
    graph = prepare_graph(given, f"{spec}: row {row}", notes)
    for name, value in graph.to_dict().items():
        if isinstance(value, str) or name == "num_nodes":
            del graph[name]
            if name != "num_nodes":
                notes[f"attribute {name} (str) left out of graphs that stay on disk: found"] += 1
        elif name == "y":
            graph.y = torch.as_tensor(value)
    return graph


def _can_stream(graphs: Sequence[Any], level: Level | None, spec: str) -> bool:
    """Whether graphs like these can stay on disk."""
    if level not in (None, "graph") or not graphs:
        return False
    seen = [
        prepare_graph(graph, f"{spec}: row {row}", Counter()) for row, graph in enumerate(graphs)
    ]
    if not all("x" in graph for graph in seen):
        return False
    return level == "graph" or detect_level(seen)[0] == "graph"
