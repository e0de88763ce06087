"""Graphs that stay on disk: rows are read once, block by block, in several processes.

A source of many rows (molecules as text, an ``OnDiskDataset``, any data set that can be indexed)
is cut into blocks. Worker processes make the graphs of a block and write them to one file
(``row_blocks.py``); from then on a graph is a slice of a file that is mapped. A block has a key,
the hash of what it is made of: a command that was killed, or is given again, finds its blocks, and
jobs that share a folder (``--shard i/n``) share the work, since each begins at its own place and
passes over what another has written.
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
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import torch
from joblib import cpu_count
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data

from ..errors import DataError, HistographError
from ..utils.files import remove_leftovers
from .row_blocks import (
    UNREADABLE,
    AboutBlock,
    Block,
    Skipped,
    key_of,
    look_at,
    map_block,
    write_block,
)
from .spec import Reading

#: Rows of a block: enough that opening its file does not count, few enough to share out.
BLOCK_ROWS = 2048

#: Part of every key: blocks that another version wrote are read again.
_FORMAT = "histograph rows 1"

#: Blocks that are mapped at a time.
_MAPPED_BLOCKS = 512


#: The files of rows, finished or not, and of what is predicted of them.
_ROW_FILES = re.compile(r"rows-[0-9a-f]+\.(safetensors|outputs)(\..*\.partial)?")


def rows_beside(out: str | Path) -> Path:
    """Return where the rows of a command are kept: beside its output, wherever a link leads."""
    return Path(os.path.realpath(out) + ".rows")


def remove_rows(folder: Path) -> None:
    """Remove the rows in a folder, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _ROW_FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


class RowSource(Protocol):
    """Rows that become graphs. A source goes to worker processes, so it can be pickled."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def key(self, start: int, stop: int) -> str:
        """Return a hash of what decides the graphs of these rows."""
        ...

    def graphs(self, start: int, stop: int, notes: Counter[str]) -> Iterator[Data | Skipped]:
        """Yield the graph of each of these rows, or why it has none."""
        ...

    def release(self) -> None:
        """Let go of what processes must not share, such as a connection to a database."""
        ...


class StreamedGraphs(Sequence[Data]):
    """Graphs in files of blocks; ``graphs[i]`` and ``graphs[a:b]`` make what is asked for.

    Args:
        blocks: What is known of each block, in order.
        y: Labels, ``[graphs, targets]``; None where the blocks have them, or nobody.
    """

    def __init__(self, blocks: Sequence[AboutBlock], y: Tensor | None = None) -> None:
        self._paths = [block.path for block in blocks]
        #: First graph of each block, and the number of graphs: ``[blocks + 1]``.
        self._first = np.cumsum([0, *(len(block.rows) for block in blocks)])
        self.rows = np.concatenate([block.rows for block in blocks])
        self.num_nodes = np.concatenate([block.num_nodes for block in blocks])
        self.num_edges = np.concatenate([block.num_edges for block in blocks])
        self.skipped = [pair for block in blocks for pair in block.skipped]
        self.notes = sum((block.notes for block in blocks), Counter[str]())
        self._digests = [block.digest for block in blocks]
        found = [block.y for block in blocks if block.y is not None]
        self.y = torch.cat(found) if found else y
        self._mapped: OrderedDict[int, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    # Maps belong to a process; the one that unpickles makes its own.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": OrderedDict()}

    @overload
    def __getitem__(self, index: int) -> Data: ...
    @overload
    def __getitem__(self, index: slice) -> list[Data]: ...
    def __getitem__(self, index: int | slice) -> Data | list[Data]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return (
                self._between(start, max(start, stop))[::step]
                if step > 0
                else [self[at] for at in range(start, stop, step)]
            )
        at = range(len(self))[index]
        return self._between(at, at + 1)[0]

    def __iter__(self) -> Iterator[Data]:
        for first, stop in itertools.pairwise(self._first.tolist()):
            yield from self._between(first, stop)

    def labels(self) -> np.ndarray:
        """Return the labels as float64 ``[graphs, targets]``."""
        return np.empty((len(self), 0)) if self.y is None else self.y.double().numpy()

    def update_digest(self, digest: Any) -> None:
        """Hash all that the graphs are made of."""
        digest.update(f"{_FORMAT} {len(self)}".encode())
        for each in self._digests:
            digest.update(bytes.fromhex(each))
        digest.update(self.rows.astype("<i8").tobytes())
        if self.y is not None:
            digest.update(f"{self.y.dtype} {list(self.y.shape)}".encode())
            digest.update(self.y.contiguous().numpy())

    def _between(self, start: int, stop: int) -> list[Data]:
        found: list[Data] = []
        number = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            first, end = int(self._first[number]), min(stop, int(self._first[number + 1]))
            if end > start:
                found += self._block(number).graphs(start - first, end - first)
            start, number = max(start, end), number + 1
        if self.y is not None:
            labels = self.y[stop - len(found) : stop].clone()  # [graphs, targets]
            for graph, row in zip(found, labels, strict=True):
                graph.y = row if len(row) == 1 else row[None]  # [1] or [1, targets]
        return found

    def _block(self, number: int) -> Block:
        block = self._mapped.get(number)
        if block is None:
            block = map_block(self._paths[number])
            while len(self._mapped) >= _MAPPED_BLOCKS:
                self._mapped.popitem(last=False)
            self._mapped[number] = block
        self._mapped.move_to_end(number)
        return block


def read_rows(source: RowSource, reading: Reading | None, *, spec: str) -> StreamedGraphs:
    """Read all rows of a source into blocks, as far as they are not there yet.

    Args:
        source: The rows.
        reading: Where blocks are kept and who reads them.
        spec: The data, for messages.
    """
    reading = reading or Reading()
    folder, temporary = _folder(reading)
    starts = range(0, len(source), BLOCK_ROWS)
    writing = _Writing(source, folder, spec)
    # Each job begins at its own place, and goes round.
    number, count = reading.part
    first = number * len(starts) // count
    order = [(first + at) % len(starts) for at in range(len(starts))]
    missing = [block for block in order if not writing.is_there(block)]
    # What is there counts as done before the clock starts.
    done = len(source) - sum(map(writing.rows, missing))
    on_progress = reading.on_progress or (lambda done, total: None)
    on_progress(done, len(source))
    for block in _in_order(writing, missing, _processes(reading, len(missing))):
        done += writing.rows(block)
        on_progress(done, len(source))
    graphs = _opened([writing.path(block) for block in range(len(starts))], spec)
    if temporary:
        weakref.finalize(graphs, shutil.rmtree, folder, ignore_errors=True)
    return graphs


def read_iterator(
    graphs: Iterator[Data], prepare: Any, reading: Reading | None, *, spec: str
) -> StreamedGraphs:
    """Read all that an iterator yields into blocks, in this process: its rows come one by one.

    Args:
        graphs: Yields graphs; every job runs through all of them.
        prepare: ``prepare(row, graph, notes)`` checks one.
        reading: Where blocks are kept.
        spec: The data, for messages.
    """
    reading = reading or Reading()
    folder, temporary = _folder(reading)
    paths: list[Path] = []
    done = 0
    while chunk := list(itertools.islice(graphs, BLOCK_ROWS)):
        notes: Counter[str] = Counter()
        made = [prepare(done + at, graph, notes) for at, graph in enumerate(chunk)]
        paths.append(folder / f"rows-{done:010d}.safetensors")
        write_block(paths[-1], "", done, made, notes, spec)
        done += len(chunk)
        if reading.on_progress is not None:
            reading.on_progress(done, done)
    streamed = _opened(paths, spec)
    if temporary:
        weakref.finalize(streamed, shutil.rmtree, folder, ignore_errors=True)
    return streamed


def _folder(reading: Reading) -> tuple[Path, bool]:
    """Return where blocks go, and whether that goes with the process."""
    if reading.folder is None:
        return Path(tempfile.mkdtemp(prefix="histograph-rows-")), True
    reading.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(reading.folder)
    return reading.folder, False


@dataclass
class _Writing(Dataset[Any]):
    """Writes the blocks of a source; what worker processes are given."""

    source: RowSource
    folder: Path
    spec: str

    def path(self, block: int) -> Path:
        return self.folder / f"rows-{block * BLOCK_ROWS:010d}.safetensors"

    def rows(self, block: int) -> int:
        return min(BLOCK_ROWS, len(self.source) - block * BLOCK_ROWS)

    def key(self, block: int) -> str:
        start = block * BLOCK_ROWS
        made_of = self.source.key(start, start + self.rows(block))
        return hashlib.sha256(f"{_FORMAT} {made_of}".encode()).hexdigest()

    def is_there(self, block: int) -> bool:
        path = self.path(block)
        return path.exists() and key_of(path) == self.key(block)

    def __getitem__(self, block: int) -> int | HistographError:
        """Write one block unless another job was sooner; an error is handed over, not raised."""
        try:
            if not self.is_there(block):
                start, notes = block * BLOCK_ROWS, Counter[str]()
                made = list(self.source.graphs(start, start + self.rows(block), notes))
                write_block(self.path(block), self.key(block), start, made, notes, self.spec)
        except HistographError as error:
            return error
        return block


def _processes(reading: Reading, blocks: int) -> int:
    """Return how many processes read this many blocks; 0 where this one does."""
    workers = cpu_count() if reading.workers is None else reading.workers
    return min(blocks, workers) if blocks > 1 else 0


def _in_order(writing: _Writing, blocks: Sequence[int], workers: int) -> Iterator[int]:
    """Write these blocks, in this process or in others, and yield each when it is written."""
    if workers == 0:
        written: Iterable[Any] = (writing[block] for block in blocks)
    else:
        writing.source.release()
        written = DataLoader(
            writing, batch_size=None, sampler=blocks, num_workers=workers, collate_fn=_as_it_is
        )
    with warnings.catch_warnings():
        # More processes than cores are the user's choice.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        for block in written:
            if isinstance(block, HistographError):
                raise block
            yield block


def _as_it_is(value: Any) -> Any:
    return value


def _opened(paths: Sequence[Path], spec: str) -> StreamedGraphs:
    """Open blocks that are written, refusing graphs of different forms."""
    try:
        blocks = [look_at(path) for path in paths]
    except UNREADABLE as error:
        raise DataError(
            f"{spec}: found unreadable rows ({error}), expected them as written"
        ) from error
    filled = [block for block in blocks if block.form]
    for block in filled:
        if block.form != filled[0].form:
            raise DataError(
                f"{spec}: rows {block.rows[0]} to {block.rows[-1]}: found {_forms(block)}, "
                f"expected {_forms(filled[0])} as in row {filled[0].rows[0]}"
            )
    return StreamedGraphs(blocks)


def _forms(block: AboutBlock) -> str:
    return ", ".join(f"{name} {kind} {shape}" for name, (kind, shape) in block.form.items())
