"""A user's own graphs that stay on disk: of data sets that can be indexed, and of iterators.

Rows of a data set that can be indexed (a PyG ``OnDiskDataset``, one of Hugging Face's) become
graphs when they are needed; an iterator is read as a whole, in this process. Only graphs with node
features and graph-level labels stay on disk: features and splits that depend on all graphs need
them in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset

from ..errors import DataError, HistographError
from ..utils import Level
from ..utils.text import first_line
from . import streaming
from .checks import prepare_graph
from .labels import detect_level
from .row_blocks import StreamedGraphs, write_block
from .spec import OnProgress, Reading
from .streaming import block_path, open_blocks, read_rows, row_folder, sampled_rows, stays_on_disk
from .tables import SelectedRows

if TYPE_CHECKING:
    from .dataset import GraphDataset

#: Graphs that are checked to decide whether all of them can stay on disk.
_LOOKED_AT = 64

#: What Hugging Face's graph data sets call the features of nodes.
_OTHER_NAMES = {"node_feat": "x"}


def stream_graphs(
    given: Iterable[Any],
    *,
    spec: str,
    stream: bool | None,
    level: Level | None,
    reading: Reading,
) -> StreamedGraphs | IndexedRows | list[Any]:
    """Return rows to read, or graphs on disk, if there are many of a kind that can stay there.

    Others are returned as a list.

    Args:
        stream: Whether they stay on disk; None to decide by their number.
        level: What has labels; None to detect it.
    """
    if isinstance(given, StreamedGraphs):
        return given
    if stream is False or isinstance(given, list | tuple | InMemoryDataset):
        return [as_graph(graph) for graph in given]
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return _from_iterator(map(as_graph, given), spec, stream, level, reading)
    rows = IndexedRows(given, spec)
    every = range(len(rows))
    if stays_on_disk(len(rows), stream) and _can_stream(
        [rows.given(row) for row in every[:_LOOKED_AT]], level, spec
    ):
        return rows
    return [rows.given(row) for row in every]


def _from_iterator(
    graphs: Iterator[Any], spec: str, stream: bool | None, level: Level | None, reading: Reading
) -> StreamedGraphs | list[Any]:
    most = streaming.STREAM_ROWS if stream is None else _LOOKED_AT
    first = list(itertools.islice(graphs, most))
    graphs = itertools.chain(first, graphs)
    if not (stays_on_disk(len(first), stream) and _can_stream(first[:_LOOKED_AT], level, spec)):
        return list(graphs)
    folder, paths, done = row_folder(reading), [], 0
    while chunk := list(itertools.islice(graphs, streaming.BLOCK_ROWS)):
        notes: Counter[str] = Counter()
        made = [_prepared(row, graph, notes, spec) for row, graph in enumerate(chunk, done)]
        paths.append(block_path(folder, done))
        write_block(paths[-1], "", done, made, notes, spec)
        done += len(chunk)
        if reading.on_progress is not None:
            reading.on_progress(done, done)
    return open_blocks(paths, reading, spec)


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
        self.spec = spec
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
                f"{self.spec}: row {row}: failed with {type(error).__name__}: {first_line(error)}"
            ) from error

    def key(self, rows: range) -> str:
        """Return a hash of the data set's name and size and of the first and the last graph."""
        which = f"indexed {self.spec} {self._length} {rows.start} {rows.stop}"
        digest = hashlib.sha256(which.encode())
        for row in sorted({rows[0], rows[-1]}):
            graph = prepare_graph(self.given(row), f"{self.spec}: row {row}", Counter())
            for name, value in sorted(graph.to_dict().items()):
                digest.update(f"{name} {value!r}".encode())
                if isinstance(value, torch.Tensor) and value.numel():
                    digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def graphs(self, rows: range, notes: Counter[str]) -> Iterator[Data]:
        """Yield the graph of each row, checked."""
        for row in rows:
            yield _prepared(row, self.given(row), notes, self.spec)

    def release(self) -> None:
        """Close the connection to a database: every process opens its own."""
        if isinstance(self._dataset, OnDiskDataset):
            self._dataset.close()
            self._process = None


class IndexedTable:
    """A long data set that can be indexed: a :class:`.dataset.RowTable`.

    Args:
        collect: Makes a data set of some of its graphs, with their ids.
    """

    def __init__(
        self, rows: IndexedRows, reading: Reading, collect: Callable[..., GraphDataset]
    ) -> None:
        self._rows, self._reading, self._collect = rows, reading, collect

    @property
    def key(self) -> str:
        """A hash of the number of rows and of the graphs of some of them."""
        shown = f"indexed {len(self._rows)} {self.sample.fingerprint()}"
        return hashlib.sha256(shown.encode()).hexdigest()

    def labels(self) -> np.ndarray:
        """Return the labels of the sample: others are not known before all rows are read."""
        return self.sample.labels()

    def num_nodes(self) -> np.ndarray:
        """Return the mean of the sample for each row, int64 ``[num_rows]``."""
        return np.full(len(self._rows), round(self.sample.num_nodes.mean()), dtype=np.int64)

    @cached_property
    def sample(self) -> GraphDataset:
        """The graphs of a few rows, spread over the data set."""
        rows, notes = sampled_rows(len(self._rows)), Counter[str]()
        graphs = [each for row in rows for each in self._rows.graphs(range(row, row + 1), notes)]
        return replace(self._dataset(graphs, rows), notes=[])  # what is changed is said of all

    def read(
        self, rows: Sequence[range] | None = None, on_progress: OnProgress = None
    ) -> GraphDataset:
        """Return the graphs of these rows, some of their neighbours, or all; they stay on disk."""
        graphs = self.graphs(rows, on_progress)
        return self._dataset(graphs, graphs.rows)

    def graphs(
        self, rows: Sequence[range] | None = None, on_progress: OnProgress = None
    ) -> StreamedGraphs:
        """Return what :meth:`read` collects."""
        spec = self._rows.spec
        with self._reading.importable():
            return read_rows(
                self._rows, self._reading, spec=spec, wanted=rows, on_progress=on_progress
            )

    def _dataset(self, graphs: Sequence[Data], rows: np.ndarray) -> GraphDataset:
        found = self._collect(graphs, ids=SelectedRows(rows))
        some = None if len(rows) == len(self._rows) else rows
        return replace(found, source=self, rows=some)


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
