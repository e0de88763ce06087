"""Graphs of the user's own that stay on disk: data sets that can be indexed, and iterators.

A PyG ``OnDiskDataset``, a data set of Hugging Face (rows that are dictionaries), or anything with a
length and ``[i]``. Only graphs with features of their own and labels of the whole graph stay on
disk: features and splits that are made of all graphs need all of them in memory.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset, OnDiskDataset

from ..errors import DataError, HistographError
from ..utils import Level
from ..utils.text import first_line
from .checks import prepare_graph
from .labels import detect_level
from .spec import STREAM_ROWS, Reading
from .streaming import StreamedGraphs, read_iterator, read_rows

#: Graphs that are looked at before it is decided where all of them stay.
_LOOKED_AT = 64

#: What Hugging Face's graph data sets call the features of nodes.
_OTHER_NAMES = {"node_feat": "x"}


def stream_graphs(
    given: Iterable[Any],
    *,
    spec: str,
    stream: bool | None,
    level: Level | None,
    reading: Reading | None,
) -> StreamedGraphs | list[Any]:
    """Return the graphs on disk where there are many of a kind that can stay there, else a list.

    Args:
        given: A data set, a list or an iterator.
        spec: Its name, for messages.
        stream: Whether they stay on disk; None to decide it by their number.
        level: What carries labels; None if that is to be seen.
        reading: Where they stay and who reads them.
    """
    if isinstance(given, StreamedGraphs):
        return given
    if stream is False or isinstance(given, list | tuple | InMemoryDataset):
        return [as_graph(graph) for graph in given]
    if not hasattr(given, "__len__") or not hasattr(given, "__getitem__"):
        return _from_iterator(iter(given), spec, stream, level, reading)
    rows = IndexedRows(given, spec)
    many = len(rows) >= STREAM_ROWS if stream is None else stream
    if not many or not _can_stream([rows.given(row) for row in range(_few(rows))], level, spec):
        return [rows.given(row) for row in range(len(rows))]
    return read_rows(rows, reading, spec=spec)


def as_graph(row: Any) -> Any:
    """Return a row that is a dictionary as a graph; anything else as it is."""
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
    """A data set that can be indexed, whose rows are read in any process.

    Args:
        dataset: It.
        spec: Its name, for messages and for the keys of blocks.
    """

    def __init__(self, dataset: Any, spec: str) -> None:
        self._dataset = dataset
        self._spec = spec
        self._length = len(dataset)
        #: The process that is connected to the database.
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

    def key(self, start: int, stop: int) -> str:
        """Return a hash of the data set's name and size and of the first and the last graph."""
        digest = hashlib.sha256(f"indexed {self._spec} {self._length} {start} {stop}".encode())
        for row in sorted({start, stop - 1}):
            graph = prepare_graph(self.given(row), f"{self._spec}: row {row}", Counter())
            for name, value in sorted(graph.to_dict().items()):
                digest.update(f"{name} {value!r}".encode())
                if isinstance(value, torch.Tensor) and value.numel():
                    digest.update(value.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def graphs(self, start: int, stop: int, notes: Counter[str]) -> Iterator[Data]:
        """Yield each graph, checked."""
        for row in range(start, stop):
            yield _prepared(row, self.given(row), notes, self._spec)

    def release(self) -> None:
        """Close the connection to a database: every process opens its own."""
        if isinstance(self._dataset, OnDiskDataset):
            self._dataset.close()
            self._process = None


def _from_iterator(
    graphs: Iterator[Any],
    spec: str,
    stream: bool | None,
    level: Level | None,
    reading: Reading | None,
) -> StreamedGraphs | list[Any]:
    most = STREAM_ROWS if stream is None else _LOOKED_AT
    first = [as_graph(graph) for graph in itertools.islice(graphs, most)]
    many = len(first) == most if stream is None else stream
    rest = map(as_graph, graphs)
    if not many or not _can_stream(first[:_LOOKED_AT], level, spec):
        return [*first, *rest]

    def prepare(row: int, graph: Any, notes: Counter[str]) -> Data:
        return _prepared(row, graph, notes, spec)

    return read_iterator(itertools.chain(first, rest), prepare, reading, spec=spec)


def _prepared(row: int, given: Any, notes: Counter[str], spec: str) -> Data:
    """Return a checked graph of tensors alone."""
    graph = prepare_graph(given, f"{spec}: row {row}", notes)
    for name, value in graph.to_dict().items():
        if isinstance(value, str) or name == "num_nodes":
            del graph[name]
            if name != "num_nodes":
                notes[f"attribute {name} (str) left out of graphs that stay on disk: found"] += 1
        elif name == "y":
            graph.y = torch.as_tensor(value)
    return graph


def _few(rows: IndexedRows) -> int:
    return min(len(rows), _LOOKED_AT)


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
