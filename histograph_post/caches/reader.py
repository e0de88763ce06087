"""Reading a cache: zero-copy histories per graph, flat batches, labels, outputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch
from torch import Tensor

from ..errors import CacheError, DataError
from ..splits import Splits
from ..utils.files import follows_links, read_limited
from .layout import shard_name
from .manifest import MOLECULES_NAME, SPLITS_LIMIT, Manifest, read_manifest, read_splits
from .shard import (
    TORCH_TYPES,
    CachedBatch,
    CachedGraph,
    History,
    Shard,
    as_tensor,
    most_open_shards,
    read_graph,
)

#: Activations in a piece of :meth:`Cache.pieces`, at most: with one more, torch starts threads to
#: copy them, which takes longer than the copy.
PIECE_VALUES = (1 << 15) - 1

#: Pieces after which their pages are released: a page that is touched maps others around it.
MAPPED_PIECES = 8


class Span(NamedTuple):
    """Graphs of a batch that are neighbours in a shard, and are read together.

    They are graphs ``start`` to ``stop`` of the shard, in rows ``first_row`` to ``stop_row``.
    """

    shard: int
    start: int
    stop: int
    first_row: int
    stop_row: int
    #: Place of the first of these graphs in the batch.
    position: int


class Cache:
    """An opened cache. Each process maps a shard when it first uses it.

    ``len(cache)`` is the number of graphs and ``cache[i]`` one of them. A cache can be pickled and
    forked, so it works in the workers of a ``DataLoader``.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._first_graphs = np.array([shard.start for shard in manifest.shards])  # [shards]
        self._open_shards: OrderedDict[int, Shard] = OrderedDict()

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the cache at ``path``: read and check its manifest; shards are opened lazily."""
        return cls(*read_manifest(path))

    def __len__(self) -> int:
        return self.num_graphs

    def __repr__(self) -> str:
        layout = self.manifest.layout
        return (
            f"{type(self).__name__}({str(self.path)!r}, graphs={self.num_graphs}, "
            f"layers={layout.num_layers}, dtype={layout.dtype})"
        )

    # Maps belong to a process; one that unpickles a cache makes its own.
    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "manifest": self.manifest}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def num_graphs(self) -> int:
        """Number of graphs."""
        return self.manifest.data.num_graphs

    @property
    def layer_names(self) -> tuple[str, ...]:
        """Names of the captured layers."""
        return self.manifest.layout.layer_names

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each layer."""
        return self.manifest.layout.widths

    @property
    def dtype(self) -> torch.dtype:
        """Type of the stored activations, and of every history."""
        return TORCH_TYPES[self.manifest.layout.dtype]

    @property
    def weights_sha256(self) -> str:
        """Hash of the weights that made the activations."""
        return self.manifest.weights_sha256

    @cached_property
    def num_nodes(self) -> np.ndarray:
        """Nodes per graph, ``[num_graphs]``."""
        return np.concatenate([np.diff(shard.arrays["ptr"]) for shard in self._all_shards()])

    @cached_property
    def node_ptr(self) -> np.ndarray:
        """First node of each graph, and the number of nodes: ``[num_graphs + 1]``."""
        return np.concatenate([[0], np.cumsum(self.num_nodes)])

    @cached_property
    def _shard_of_graph(self) -> np.ndarray:
        """Number of the shard of each graph, ``[num_graphs]``."""
        sizes = [shard.stop - shard.start for shard in self.manifest.shards]
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def label_ptr(self) -> np.ndarray:
        """First label row of each graph, and the number of rows: ``[num_graphs + 1]``."""
        level = self.manifest.layout.level
        if level == "graph":
            return np.arange(self.num_graphs + 1)
        name = "ptr" if level == "node" else "label_ptr"
        counts = [np.diff(shard.arrays[name]) for shard in self._all_shards()]
        return np.concatenate([[0], np.cumsum(np.concatenate(counts))])

    @cached_property
    def splits(self) -> Splits:
        """The splits that the cache was made with."""
        return read_splits(self.path, self.manifest)

    def ids(self) -> list[str]:
        """Return the names of all graphs."""
        return [graph_id for shard in self._all_shards() for graph_id in shard.ids]

    def molecules(self) -> list[tuple[str, str]] | None:
        """Return the SMILES and the name of each graph; None if they are not stored.

        Nothing in the cache depends on them: they are for drawings, and for scaffold splits.
        """
        path = self.path / MOLECULES_NAME
        if (path.is_symlink() and not follows_links()) or not path.is_file():
            return None
        lines = read_limited(path, SPLITS_LIMIT).decode(errors="replace").split("\n")[:-1]
        if len(lines) != self.num_graphs:
            return None
        return [(smiles, name) for smiles, _, name in (line.partition("\t") for line in lines)]

    def labels(self) -> np.ndarray:
        """Return all labels, NaN where missing: a row per graph, node or link, ``[rows, T]``."""
        return np.concatenate([shard.arrays["labels"] for shard in self._all_shards()])

    def to_split(self, official: Splits | None) -> Any:
        """Return what splits are made of (:class:`~histograph_post.splits.making.Splittable`)."""
        molecules = self.molecules()
        return SimpleNamespace(
            spec=str(self.path),
            level=self.manifest.layout.level,
            official=official,
            notes=[],
            smiles=None if molecules is None else [smiles for smiles, _ in molecules],
            rows=None,
            label_ptr=self.label_ptr,
            labels=self.labels,
        )

    def outputs(self) -> np.ndarray | None:
        """Return the model's own outputs, ``[rows, output_width]``; None if it has none."""
        if self.manifest.layout.output_width is None:
            return None
        return np.concatenate([shard.arrays["outputs"] for shard in self._all_shards()])

    def label_pairs(self) -> Tensor:
        """Return the labelled node pairs, numbered over the whole cache: ``[2, rows]``."""
        pairs = [shard.arrays["edge_label_index"] for shard in self._all_shards()]
        shift = np.repeat(self.node_ptr[:-1], np.diff(self.label_ptr))  # [rows]
        return torch.from_numpy(np.concatenate(pairs, axis=1) + shift)

    def edge_index(self) -> Tensor:
        """Return the edges of all graphs, numbered over the whole cache: ``[2, num_edges]``."""
        graphs = np.arange(self.num_graphs)
        return self._gather_edges(self._spans(graphs), self.node_ptr)

    def release(self) -> None:
        """Return the mapped pages to the system; they are read from the file again when needed."""
        for shard in self._open_shards.values():
            shard.release()

    @overload
    def __getitem__(self, index: int) -> CachedGraph: ...
    @overload
    def __getitem__(self, index: slice) -> list[CachedGraph]: ...
    def __getitem__(self, index: int | slice) -> CachedGraph | list[CachedGraph]:
        if isinstance(index, slice):
            return [self[each] for each in range(self.num_graphs)[index]]
        if not -self.num_graphs <= index < self.num_graphs:
            raise IndexError(f"graph {index} of {self.num_graphs}")
        index %= self.num_graphs
        number = int(self._shard_of_graph[index])
        place = index - int(self._first_graphs[number])
        return read_graph(self._shard(number), place, self.manifest.layout)

    def gather(self, indices: Sequence[int] | np.ndarray, *, edges: bool = False) -> CachedBatch:
        """Return a copy of several graphs as one flat batch, in the given order.

        With ``edges``, the batch has an ``edge_index``, its nodes numbered over the batch.
        """
        graphs, ptr = self._checked(indices)
        spans = self._spans(graphs)
        history = self._gather_history(spans)
        edge_index = self._gather_edges(spans, ptr) if edges else None
        return CachedBatch(history, torch.from_numpy(ptr), edge_index)

    def pieces(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[slice, list[Tensor]]]:
        """Yield the stored rows of several graphs, a small piece at a time, in file order.

        A piece, one tensor or one per layer, comes with its place in the batch that :meth:`gather`
        returns. It is a view of the file, to be used before the next piece: pages are released now
        and then, as in :meth:`release`.
        """
        graphs, ptr = self._checked(indices)
        step = max(1, PIECE_VALUES // max(1, sum(self.widths)))
        count = 0
        for span in sorted(self._spans(graphs)):
            for start in range(span.first_row, span.stop_row, step):
                stop = min(start + step, span.stop_row)
                first = int(ptr[span.position]) + start - span.first_row
                shard = self._shard(span.shard)
                stored = [source[start:stop] for source in shard.activations]
                layers = [as_tensor(values, self.manifest.layout) for values in stored]
                yield slice(first, first + stop - start), layers
                count += 1
                if count % MAPPED_PIECES == 0:
                    self.release()
        self.release()

    def _checked(self, indices: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return valid graph numbers, ``[batch]``, and their first rows, ``[batch + 1]``."""
        found = np.asarray(indices).reshape(-1)
        if len(found) and found.dtype.kind not in "iu":
            raise DataError(
                f"{self.path}: found graphs given as {found.dtype}, expected their numbers; "
                "those of a mask are np.flatnonzero(mask)"
            )
        graphs = found.astype(np.int64)
        if len(graphs) and not 0 <= graphs.min() <= graphs.max() < self.num_graphs:
            raise IndexError(f"graphs {graphs.min()} to {graphs.max()} of {self.num_graphs}")
        return graphs, np.concatenate([[0], np.cumsum(self.num_nodes[graphs])])

    def _spans(self, graphs: np.ndarray) -> list[Span]:
        """Return the spans of a batch in its order; sorted, they are in file order."""
        shards = self._shard_of_graph[graphs]  # [batch]
        breaks = np.flatnonzero((np.diff(graphs) != 1) | (np.diff(shards) != 0)) + 1
        positions = np.concatenate([[0], breaks])[: len(graphs)]  # [spans]
        next_positions = np.append(positions[1:], len(graphs))[: len(positions)]  # [spans]
        own, starts = shards[positions], graphs[positions]  # [spans] each
        stops = starts + next_positions - positions
        first_graphs = self._first_graphs[own]
        rows_before = self.node_ptr[first_graphs]
        columns = (
            own,
            starts - first_graphs,
            stops - first_graphs,
            self.node_ptr[starts] - rows_before,
            self.node_ptr[stops] - rows_before,
            positions,
        )
        return list(map(Span._make, np.stack(columns, axis=1).tolist()))

    def _gather_history(self, spans: list[Span]) -> History:
        layout = self.manifest.layout
        all_open = len(self.manifest.shards) <= most_open_shards()
        # By place in the batch; the first is empty, for a batch without graphs.
        pieces = {-1: [np.empty(d.shape, d.dtype) for d in layout.activations(0)]}
        # In file order: disks are faster that way, and a compressed chunk is expanded once.
        for span in sorted(spans):
            # Views of the files, unless they are compressed; a view keeps its file open.
            sources = self._shard(span.shard).activations
            stored = [source[span.first_row : span.stop_row] for source in sources]
            pieces[span.position] = stored if all_open else [values.copy() for values in stored]
        ordered = [pieces[position] for position in sorted(pieces)]
        # [num_nodes, L, D], or one [num_nodes, D_l] per layer
        batch = [as_tensor(np.concatenate(parts), layout) for parts in zip(*ordered, strict=True)]
        return batch[0] if layout.is_uniform else batch

    def _gather_edges(self, spans: list[Span], ptr: np.ndarray) -> Tensor:
        if not self.manifest.layout.has_edges:
            raise CacheError(f"{self.path}: found no edge_index, expected a cache made with edges")
        pairs, counts = [np.empty((2, 0), np.int64)], [np.empty(0, np.int64)]
        for span in spans:
            arrays = self._shard(span.shard).arrays
            bounds = arrays["edge_ptr"][span.start : span.stop + 1]
            pairs.append(arrays["edge_index"][:, bounds[0] : bounds[-1]])
            counts.append(np.diff(bounds))
        edge_index = np.concatenate(pairs, axis=1)  # [2, num_edges]
        edge_index += np.repeat(ptr[:-1], np.concatenate(counts))
        return torch.from_numpy(edge_index)

    def _all_shards(self) -> Iterator[Shard]:
        return (self._shard(number) for number in range(len(self.manifest.shards)))

    def _shard(self, number: int) -> Shard:
        shard = self._open_shards.get(number)
        if shard is None:
            info = self.manifest.shards[number]
            shard = Shard.open(self.path / shard_name(number), info, self.manifest.layout)
            # A view that is still in use keeps its map, even if its shard is dropped here.
            while len(self._open_shards) >= most_open_shards():
                self._open_shards.popitem(last=False)
            self._open_shards[number] = shard
        self._open_shards.move_to_end(number)
        return shard
