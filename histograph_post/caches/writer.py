"""Writing a cache: one shard after the other, and the manifest at the end."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from h5py import h5f
from torch import Tensor

from ..errors import CacheError
from ..utils.decoding import Sha256, decode, parse_json
from ..utils.files import (
    atomic_path,
    open_regular,
    read_limited,
    sha256_prefixes,
    to_json,
    write_text,
)
from .blocks import BlockMemory, RowBlock
from .hdf5 import CheckedFile, CompressedWriter, RowWriter, create_file, create_group
from .layout import Counts, Extent, Layout, ShardInfo, shard_name
from .manifest import MANIFEST_LIMIT, MANIFEST_NAME, Manifest
from .shard import check_contents


@dataclass(frozen=True)
class ShardGraphs:
    """The graphs of one shard, without activations and outputs.

    Args:
        start: Position of the first graph in the data set.
        num_nodes: Nodes per graph, ``[num_graphs]``.
        labels: A row per graph, node or link; NaN is a missing label. ``[rows, num_targets]``.
        edge_index: ``[2, num_edges]`` per graph, nodes numbered from 0 in each; read once.
        edge_label_index: The same for the labelled pairs of a link task.
    """

    start: int
    ids: Sequence[str]
    num_nodes: np.ndarray
    labels: np.ndarray
    edge_index: Iterable[Tensor] = ()
    edge_label_index: Iterable[Tensor] = ()

    def arrays(self, layout: Layout, where: str) -> tuple[dict[str, np.ndarray], Counts]:
        """Return every dataset but outputs and activations, checked, and their sizes."""
        try:
            ids = [graph_id.encode() for graph_id in self.ids]
        except UnicodeEncodeError as error:
            raise CacheError(
                f"{where}: found graph id {error.object!r}, expected text that UTF-8 can hold"
            ) from None
        arrays = {
            "ptr": _offsets(self.num_nodes),
            "id_ptr": _offsets([len(graph_id) for graph_id in ids]),
            "ids": np.frombuffer(b"".join(ids), "|u1"),
            "labels": np.ascontiguousarray(self.labels, "<f8"),
        }
        rows, num_edges = {"graph": len(ids), "node": int(arrays["ptr"][-1])}, 0
        if layout.level == "link":
            arrays["label_ptr"], arrays["edge_label_index"] = _pairs(self.edge_label_index)
            rows["link"] = arrays["edge_label_index"].shape[1]
        if layout.has_edges:
            arrays["edge_ptr"], arrays["edge_index"] = _pairs(self.edge_index)
            num_edges = arrays["edge_index"].shape[1]
        counts = Counts(len(ids), rows["node"], num_edges, num_labels=rows[layout.level])
        for dataset in layout.descriptors(counts, len(arrays["ids"])):
            found = arrays.get(dataset.name)
            if found is not None and found.shape != dataset.shape:
                raise CacheError(
                    f"{where}: found {dataset.name} of shape {found.shape}, "
                    f"expected {dataset.shape} for {len(self.ids)} graphs"
                )
        check_contents(arrays, counts.num_nodes, self.start, where)
        return arrays, counts


def _offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype("<i8")


def _pairs(pairs: Iterable[Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """Return the offsets and the node pairs of all graphs, side by side: ``[2, num_pairs]``."""
    parts = [pair.numpy().astype("<i4") for pair in pairs]
    sizes = [part.shape[1] for part in parts]
    return _offsets(sizes), np.concatenate([np.empty((2, 0), "<i4"), *parts], axis=1)


class ShardWriter:
    """One shard being written: in the end there is a complete file, or none.

    One thread fills a :meth:`block` after the other, in the order of the graphs; another calls
    :meth:`open`, :meth:`write` and :meth:`close`, or :meth:`discard`. Then :attr:`info` is the
    shard's entry in the manifest.
    """

    def __init__(
        self, folder: Path, index: int, layout: Layout, plan_hash: str, graphs: ShardGraphs
    ) -> None:
        self._path = folder / shard_name(index)
        self.index = index
        self._layout = layout
        self._plan_hash = plan_hash
        self._ids = graphs.ids
        self._arrays, self._counts = graphs.arrays(layout, str(self._path))
        self._numbers = {
            "index": index,
            "start": graphs.start,
            "stop": graphs.start + len(graphs.ids),
            "num_nodes": self._counts.num_nodes,
            "num_edges": self._counts.num_edges,
            "num_labels": self._counts.num_labels,
        }
        #: By the name of the dataset, in the order of the file.
        self._rows: dict[str, RowWriter] = {}
        self._next_graph = 0
        self._info: ShardInfo | None = None
        self._file: CheckedFile
        self._steps = self._writing()

    @property
    def num_graphs(self) -> int:
        """Graphs of the shard."""
        return len(self._ids)

    def open(self) -> None:
        """Create the file under a temporary name."""
        next(self._steps)

    def close(self) -> None:
        """Check and hash the file, and move it to its final name."""
        next(self._steps, None)

    @property
    def info(self) -> ShardInfo:
        """The manifest's entry for the shard, once it is closed."""
        if self._info is None:
            raise CacheError(f"{self._path}: found an unfinished shard, expected a closed one")
        return self._info

    def discard(self) -> None:
        """Remove what was written, unless the shard is closed."""
        self._steps.close()

    def block(self, graphs: range, memory: BlockMemory) -> RowBlock:
        """Return a block for the layers of these graphs of the shard.

        Unlike the rest, this may be called in another thread, and before the shard is open.
        """
        if not graphs.start < graphs.stop <= self.num_graphs:
            raise CacheError(
                f"{self._path}: found graphs {graphs.start} to {graphs.stop}, "
                f"expected at most {self.num_graphs}, and at least one at a time"
            )
        ptr = self._arrays["ptr"]
        return RowBlock(
            self._layout,
            graphs,
            int(ptr[graphs.stop] - ptr[graphs.start]),
            graph_of_row=partial(self._graph_of_row, ptr, graphs),
            where=str(self._path),
            memory=memory,
        )

    def _graph_of_row(self, ptr: np.ndarray, graphs: range, row: int) -> str:
        """Return the id of the graph that row ``row`` of a block belongs to."""
        return self._ids[int(np.searchsorted(ptr, ptr[graphs.start] + row, "right")) - 1]

    def write(self, block: RowBlock, outputs: Tensor | None = None) -> None:
        """Write the next block, which is filled, and the model's own outputs for its graphs."""
        self._expect(block.graphs.start, self._next_graph, "a block from graph")
        names = [spec.name for spec in self._layout.activations(self._counts.num_nodes)]
        rows = dict(zip(names, block.arrays(), strict=True))
        if (values := self._checked_outputs(block.graphs, outputs)) is not None:
            rows["outputs"] = values
        for name, array in rows.items():
            self._rows[name].write(array)
        self._file.check()
        self._next_graph = block.graphs.stop

    def _expect(self, found: object, expected: object, what: str) -> None:
        if found != expected:
            raise CacheError(f"{self._path}: found {what} {found}, expected {expected}")

    def _checked_outputs(self, graphs: range, outputs: Tensor | None) -> np.ndarray | None:
        """Return the outputs for some graphs, ``[rows, output_width]``, as they are stored."""
        width, level = self._layout.output_width, self._layout.output_level
        names = {"node": "ptr", "link": "label_ptr"}
        ptr = self._arrays[names[level]] if level in names else np.arange(self.num_graphs + 1)
        expected = None if width is None else (int(ptr[graphs.stop] - ptr[graphs.start]), width)
        found = None if outputs is None else tuple(outputs.shape)
        self._expect(found, expected, "outputs of shape")
        if outputs is None:
            return None
        values = outputs.detach().cpu()  # [rows, output_width]
        finite = torch.isfinite(values).all(dim=1)  # [rows]
        if not finite.all():
            graph = self._graph_of_row(ptr, graphs, int((~finite).nonzero()[0]))
            raise CacheError(
                f"graph {graph!r}: found an output of the model that is not finite, expected "
                "numbers"
            )
        return values.float().numpy()

    def _writing(self) -> Generator[None]:
        with atomic_path(self._path) as unfinished:
            with closing(CheckedFile(unfinished, self._path)) as self._file:
                file = create_file(self._file, self._plan_hash, self._numbers)
                try:
                    self._create_datasets(file)
                    self._file.check()
                    yield
                    if self._next_graph != self.num_graphs:
                        raise CacheError(
                            f"{self._path}: found {self._next_graph} graphs, "
                            f"expected {self.num_graphs} before the shard is closed"
                        )
                    extents = {name: rows.finish() for name, rows in self._rows.items()}
                finally:
                    try:
                        file.close()
                    finally:
                        self._file.check()
            self._info = self._entry(unfinished, extents)
            # Before the shard has its name, so that every shard has a record beside it.
            write_record(self._path, ShardRecord(self._plan_hash, self._info))

    def _create_datasets(self, file: h5f.FileID) -> None:
        layout, counts = self._layout, self._counts
        for dataset in layout.descriptors(counts, len(self._arrays["ids"])):
            self._rows[dataset.name] = RowWriter(file, dataset)
            if dataset.name != "outputs":
                self._rows[dataset.name].write(self._arrays[dataset.name])
        # The activations come last in the file, so that everything before them has one hash.
        if not layout.is_uniform:
            create_group(file, "activations")
        for dataset in layout.activations(counts.num_nodes):
            kind = CompressedWriter if layout.compression and dataset.num_bytes else RowWriter
            self._rows[dataset.name] = kind(file, dataset)

    def _entry(self, path: Path, extents: dict[str, tuple[Extent, ...]]) -> ShardInfo:
        """Return the manifest's entry for a finished file, which is read again for its hashes."""
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            info = ShardInfo(
                **self._numbers, num_bytes=size, sha256="", head_sha256="", extents=extents
            )
            info.validate(self._layout, str(self._path))
            head, whole = sha256_prefixes(file, (info.head_bytes(self._layout), size))
        return replace(info, sha256=whole, head_sha256=head)


# --- the records of finished shards, until there is a manifest


@dataclass(frozen=True)
class ShardRecord:
    """The file beside a finished shard: its entry in the manifest, and the plan it belongs to."""

    plan_hash: Sha256
    shard: ShardInfo


def record_path(shard: Path) -> Path:
    """Return the path of a shard's record."""
    return shard.with_suffix(".json")


def write_record(shard: Path, record: ShardRecord) -> None:
    """Write the record of a shard."""
    write_text(record_path(shard), to_json(asdict(record)))


def read_record(shard: Path) -> ShardRecord:
    """Read the record of a shard, checking every type."""
    path = record_path(shard)
    text = read_limited(path, MANIFEST_LIMIT)
    return decode(ShardRecord, parse_json(text, str(path)), str(path))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which completes the cache and replaces the records of its shards."""
    write_text(folder / MANIFEST_NAME, manifest.to_text())
    remove_records(folder)


def remove_records(folder: Path) -> None:
    """Remove the records of all shards."""
    for path in folder.glob("shard-*.json"):
        path.unlink(missing_ok=True)


def withdraw_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a cache incomplete again: write the records of its shards, remove the manifest."""
    for shard in manifest.shards:
        write_record(folder / shard_name(shard.index), ShardRecord(manifest.plan_hash, shard))
    (folder / MANIFEST_NAME).unlink(missing_ok=True)
