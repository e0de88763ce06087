"""A data set as every later stage sees it: graphs, ids, labels, official splits, a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch, Data

from ..errors import DataError
from ..splits import Splits
from ..utils import LEVELS, Level
from ..utils.specifications import IN_MEMORY
from .checks import add_features, check_links, prepare_graphs, refuse_hetero
from .indexed import IndexedRows, IndexedTable, stream_graphs
from .labels import (
    LinkOptions,
    align_labels,
    detect_level,
    label_name,
    label_rows,
    split_links,
    take_masks,
)
from .row_blocks import StreamedGraphs
from .spec import OnProgress, Reading
from .tables import SelectedRows, Table, is_row_numbers

#: The name of the target where links are predicted.
LINK_TARGET = ("link",)


class RowTable(Protocol):
    """A long table of which any rows can become graphs, so that jobs need not read all of it."""

    @property
    def key(self) -> str:
        """A hash of what determines the graphs, their labels and their ids."""

    def labels(self) -> np.ndarray:
        """Return the labels that are known before rows are read, ``[rows, num_targets]``."""

    def num_nodes(self) -> np.ndarray:
        """Estimate the nodes of each row, int64 ``[num_rows]``."""

    @property
    def sample(self) -> GraphDataset:
        """The graphs of a few rows, spread over the table."""

    def read(
        self, rows: Sequence[range] | None = None, on_progress: OnProgress = None
    ) -> GraphDataset:
        """Return the graphs of these rows, some of their neighbours, or all; they stay on disk."""


@dataclass(eq=False, repr=False)
class GraphDataset:
    """Graphs that share one set of attributes, with their labels and where they came from.

    Every graph has ``x`` and ``edge_index``. Use :func:`from_graphs` to build one: it checks the
    graphs first. The graphs must not change after the fingerprint has been computed.
    """

    #: The specification it was loaded from, such as ``tu:PROTEINS``.
    spec: str
    #: A list, or graphs that stay on disk and are read when they are indexed.
    graphs: Sequence[Data]
    #: One unique name per graph, in the order of ``graphs``.
    ids: Sequence[str]
    #: What has labels: ``graph``, ``node`` or ``link``.
    level: Level
    #: One name per column of :meth:`labels`.
    target_names: list[str] = field(default_factory=list)
    #: The splits that come with the data, over graphs, nodes or links, depending on ``level``.
    official: Splits | None = None
    #: Source row of each graph (a line of a csv file); ``None`` stands for 0, 1, 2, ...
    rows: np.ndarray | None = None
    smiles: Sequence[str] | None = None
    #: The names of the graphs in their source, which need not be unique.
    names: Sequence[str] | None = None
    #: The csv file the graphs are from, with why some rows gave none; predictions go beside it.
    table: Table | None = None
    #: What was skipped, added or converted, one line each, for the user.
    notes: list[str] = field(default_factory=list)
    #: The long table that the graphs are from.
    source: RowTable | None = None
    _fingerprint: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise DataError(
                f"{self.spec}: level is {self.level!r}, expected one of {', '.join(LEVELS)}"
            )
        for name in ("ids", "rows", "smiles", "names"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.graphs):
                raise DataError(
                    f"{self.spec}: {len(values)} {name} for {len(self.graphs)} graphs, "
                    "expected one per graph"
                )
        seen: set[str] = set()
        for name in self.ids if not is_row_numbers(self.ids) else ():
            if name in seen:
                raise DataError(f"{self.spec}: id {name!r} belongs to more than one graph")
            seen.add(name)

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, which: int | slice | Sequence[int] | np.ndarray) -> Any:
        """Return a graph by its position, or a subset as a data set.

        A subset has no official split, which is over all graphs.
        """
        if isinstance(which, (int, np.integer)):
            return self.graphs[int(which)]
        chosen = np.arange(len(self))[which if isinstance(which, slice) else np.asarray(which)]

        def subset(values: Sequence[Any] | None) -> Any:
            return None if values is None else [values[int(position)] for position in chosen]

        return replace(
            self,
            graphs=subset(self.graphs),
            ids=subset(self.ids),
            official=None,
            rows=chosen if self.rows is None else self.rows[chosen],
            smiles=subset(self.smiles),
            names=subset(self.names),
            source=None,
        )

    def __iter__(self) -> Iterator[Data]:
        return iter(self.graphs)

    def __repr__(self) -> str:
        return f"GraphDataset({self.spec!r}, {len(self)} graphs, level={self.level!r})"

    @property
    def is_sample(self) -> bool:
        """Whether these are a few of the graphs of :attr:`source`."""
        return self.source is not None and not isinstance(self.graphs, StreamedGraphs)

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """Nodes of each graph, int64 ``[num_graphs]``."""
        if isinstance(self.graphs, StreamedGraphs):
            return self.graphs.num_nodes
        return np.array([len(graph.x) for graph in self.graphs], dtype=np.int64)

    @cached_property
    def num_edges(self) -> np.ndarray:
        """Edges of each graph, int64 ``[num_graphs]``."""
        if isinstance(self.graphs, StreamedGraphs):
            return self.graphs.num_edges
        return np.array([int(graph.num_edges) for graph in self.graphs], dtype=np.int64)

    @cached_property
    def label_ptr(self) -> np.ndarray:
        """First label row of each graph, and the number of rows: int64 ``[num_graphs + 1]``."""
        if self.level == "graph":
            return np.arange(len(self) + 1)
        rows = [label_rows(graph, self.level) for graph in self.graphs]
        return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])

    def labels(self) -> np.ndarray:
        """Return the labels as float64 ``[rows, num_targets]``, NaN where a label is missing.

        A row is a graph, a node (graphs concatenated) or a labelled pair, depending on
        ``level``. Unlabelled data has ``[rows, 0]``.
        """
        if isinstance(self.graphs, StreamedGraphs):
            return self.graphs.labels()
        name = label_name(self.level)
        if name not in self.graphs[0]:
            return np.empty((int(self.label_ptr[-1]), 0))
        labels = torch.cat([graph[name].double() for graph in self.graphs])
        return (labels if labels.dim() == 2 else labels[:, None]).numpy()  # [rows, num_targets]

    def known_labels(self) -> np.ndarray:
        """Return :meth:`labels`; of a sample, what is known of those of the whole table."""
        return self.source.labels() if self.is_sample and self.source else self.labels()

    def fingerprint(self) -> str:
        """Return the SHA-256 over the ids and every attribute of every graph.

        Equal fingerprints mean that a model sees the same tensors, wherever they came from. Graphs
        that stay on disk are hashed by blocks, so they differ from the same graphs in memory.
        """
        if self._fingerprint is None:
            digest = hashlib.sha256()
            if isinstance(self.graphs, StreamedGraphs):
                self.graphs.update_digest(digest)
                for name in self.ids:
                    digest.update(_text(name))
            else:
                self._hash_graphs(digest)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _hash_graphs(self, digest: Any) -> None:
        for graph, name in zip(self.graphs, self.ids, strict=True):
            attributes = sorted(graph.to_dict().items())
            digest.update(_text(f"graph {len(attributes)} {name}"))
            for key, value in attributes:
                _hash_value(digest, key, value)


def from_graphs(
    graphs: Iterable[Data],
    *,
    spec: str = IN_MEMORY,
    ids: Sequence[str] | None = None,
    level: Level | None = None,
    target_names: Sequence[str] | None = None,
    official: Splits | None = None,
    rows: np.ndarray | None = None,
    smiles: Sequence[str] | None = None,
    features: str = "auto",
    max_degree: int | None = None,
    links: LinkOptions | None = None,
    notes: Sequence[str] = (),
    stream: bool | None = None,
    reading: Reading | None = None,
) -> GraphDataset:
    """Check graphs from anywhere (a list, a PyG data set, one ``Data``) and collect them.

    The given graphs are not changed. Without ``level`` it is inferred from the attributes: an
    ``edge_label_index`` makes links, a ``y`` with one row per node makes nodes, else graphs.
    ``train_mask``, ``val_mask`` and ``test_mask`` of node-level data become ``official``.
    Graphs with a ``smiles`` are molecules; a unique ``name`` is their id. ``features`` (see
    :func:`.checks.add_features`) sets ``x`` of graphs that have none. A graph without nodes is
    refused. ``level="link"`` on graphs without pairs holds out some of their edges, as ``links``
    says (see :mod:`.labels`). Large data sets and iterators stay on disk, as ``reading`` says (see
    :mod:`.streaming`), unless ``stream`` decides.
    """
    reading = reading or Reading()
    collected = _collect(graphs, spec, stream, level, reading)
    if not isinstance(collected, list) and (features, max_degree, links) != ("auto", None, None):
        raise DataError(
            f"{spec}: the graphs have features of their own and stay on disk; expected no "
            "features=, max_degree= or link_...="
        )
    if isinstance(collected, IndexedRows):
        collect = partial(from_graphs, spec=spec, level="graph", target_names=target_names)
        table = IndexedTable(collected, reading, collect)
        if reading.sampled and all(given is None for given in (ids, official, rows, smiles)):
            return replace(table.sample, notes=list(notes))
        collected = table.graphs()
    if isinstance(collected, StreamedGraphs):
        # They were checked while they were read.
        found = [f"{note} in {count} graphs" for note, count in collected.notes.items()]
        return GraphDataset(
            spec=spec,
            graphs=collected,
            ids=SelectedRows(collected.rows) if ids is None else ids,
            level="graph",
            target_names=_target_names(target_names, collected.labels().shape[1], spec),
            official=official,
            rows=rows,
            smiles=smiles,
            notes=[*notes, *found],
        )
    smiles = _texts(collected, "smiles") if smiles is None else smiles
    called = _texts(collected, "name")
    if ids is None and called is not None and len(set(called)) == len(called):
        ids = called
    names = [str(name) for name in (ids if ids is not None else range(len(collected)))]
    if len(names) != len(collected):
        raise DataError(
            f"{spec}: {len(names)} ids for {len(collected)} graphs, expected one per graph"
        )
    prepared, found = prepare_graphs(collected, names, spec=spec)
    if level == "link" and "edge_label_index" not in prepared[0]:
        # Before degrees become features: they would count links that are held out.
        prepared, official, link_notes = split_links(prepared, links, spec=spec)
        target_names = LINK_TARGET if target_names is None else target_names
        found += link_notes
    elif links is not None:
        raise DataError(
            f"{spec}: found options of a split of links, expected graphs without edge_label_index "
            "and level=link"
        )
    found += add_features(prepared, features, max_degree=max_degree, spec=spec)
    for graph in prepared:
        if "num_nodes" in graph:
            del graph["num_nodes"]  # x has as many rows; batches fail if only some graphs have it
    if level is None:
        level, reason = detect_level(prepared)
        found += reason
    if level == "link":
        check_links(prepared, names, spec=spec)
    if level == "node":
        masks = take_masks(prepared, names, spec=spec)
        official = masks if official is None else official
    num_targets = align_labels(prepared, names, level, spec=spec)
    return GraphDataset(
        spec=spec,
        graphs=prepared,
        ids=names,
        level=level,
        target_names=_target_names(target_names, num_targets, spec),
        official=official,
        rows=rows,
        smiles=None if smiles is None else list(smiles),
        names=called,
        notes=[*notes, *found],
    )


def as_links(dataset: GraphDataset, links: LinkOptions | None = None) -> GraphDataset:
    """Return the data set as a link prediction task, without its labels."""
    graphs, official, notes = split_links(dataset.graphs, links, spec=dataset.spec)
    return replace(
        dataset,
        graphs=graphs,
        level="link",
        target_names=list(LINK_TARGET),
        official=official,
        table=None,
        notes=[*dataset.notes, *notes],
    )


def _collect(
    graphs: Iterable[Data],
    spec: str,
    stream: bool | None,
    level: Level | None,
    reading: Reading,
) -> StreamedGraphs | IndexedRows | list[Data]:
    refuse_hetero(graphs, spec)
    if isinstance(graphs, Batch):
        collected: StreamedGraphs | IndexedRows | list[Data] = graphs.to_data_list()
    elif isinstance(graphs, Data):
        collected = [graphs]
    else:
        collected = stream_graphs(graphs, spec=spec, stream=stream, level=level, reading=reading)
    if not collected:
        raise DataError(f"{spec}: no graphs, expected at least one")
    return collected


def _texts(graphs: Sequence[Data], name: str) -> list[str] | None:
    """Return a text attribute, such as PyG's molecules have; None unless every graph has it."""
    values = [graph.get(name) if isinstance(graph, Data) else None for graph in graphs]
    texts = [value.strip() for value in values if isinstance(value, str) and value.strip()]
    return texts if len(texts) == len(graphs) else None


def _target_names(given: Sequence[str] | None, width: int, spec: str) -> list[str]:
    if given is None:
        return ["y"] if width == 1 else [f"y{column}" for column in range(width)]
    if len(given) != width:
        raise DataError(f"{spec}: {len(given)} target names for {width} targets")
    return [str(name) for name in given]


def _text(text: str) -> bytes:
    encoded = text.encode()
    return len(encoded).to_bytes(8, "little") + encoded


def _hash_value(digest: Any, key: str, value: object) -> None:
    if not isinstance(value, Tensor):
        digest.update(_text(key) + _text(repr(value)))
        return
    digest.update(_form(key, value.dtype, value.shape))
    try:
        digest.update(value.numpy().ravel())
    except (TypeError, RuntimeError):  # on a device, with gradients, or of a type not in NumPy
        values = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        digest.update(values.view(torch.uint8).numpy())


@lru_cache(1 << 12)
def _form(key: str, dtype: torch.dtype, shape: torch.Size) -> bytes:
    return _text(key) + _text(f"{dtype} {[*shape]}")
