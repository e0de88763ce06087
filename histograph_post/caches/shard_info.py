"""One shard as the manifest describes it: which graphs, how much, and where in the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ..errors import CacheError
from ..utils.decoding import Count, Form, Sha256, is_count
from .layout import Counts, Dataset, Layout

#: Every dataset starts at a multiple of this, so that mapped values are aligned for any CPU.
ALIGNMENT = 64

#: The most that deflate can expand a byte into; more is a bomb.
MAX_DEFLATE_RATIO = 1032

#: Where a piece of a dataset lies in its file: (offset, bytes).
Extent = tuple[int, int]


def _are_extents(pieces: Any) -> bool:
    return isinstance(pieces, list) and all(
        isinstance(piece, list) and len(piece) == 2 and all(map(is_count, piece))
        for piece in pieces
    )


#: The pieces of a dataset. There may be a million, so they are read in one go.
Extents = Annotated[
    tuple[Extent, ...],
    Form("a list of [offset, bytes]", _are_extents, lambda pieces: tuple(map(tuple, pieces))),
]


def shard_name(index: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{index:05d}.h5"


@dataclass(frozen=True)
class ShardInfo:
    """What the manifest says of one shard: which graphs, how much, and where in the file.

    ``extents`` names the bytes of every dataset: one piece where it is stored as it is, none where
    it is empty, one piece per chunk where it is compressed. A reader needs nothing else to map the
    values, so opening a cache never hands a foreign file to the HDF5 library.
    """

    index: Count
    start: Count
    stop: Count
    num_nodes: Count
    num_edges: Count
    num_labels: Count
    num_bytes: Count
    sha256: Sha256
    #: Of everything before the activations, which a reader checks before it uses any of it.
    head_sha256: Sha256
    extents: Mapping[str, Extents]

    @property
    def counts(self) -> Counts:
        """How much the shard holds."""
        return Counts(self.stop - self.start, self.num_nodes, self.num_edges, self.num_labels)

    def datasets(self, layout: Layout) -> tuple[Dataset, ...]:
        """Return every dataset of the shard, the activations last."""
        id_bytes = sum(size for _, size in self.extents.get("ids", ()))
        return layout.descriptors(self.counts, id_bytes) + layout.activations(self.num_nodes)

    def head_bytes(self, layout: Layout) -> int:
        """Return the bytes before the activations: descriptors, graphs, labels and outputs."""
        names = [dataset.name for dataset in layout.activations(self.num_nodes)]
        starts = [offset for name in names for offset, _ in self.extents[name]]
        return min(starts, default=self.num_bytes)

    def validate(self, layout: Layout, where: str) -> None:
        """Refuse counts and places that contradict the layout or the size of the file."""
        where = f"{where}: shard {self.index}"
        rows = {"graph": self.stop - self.start, "node": self.num_nodes}
        if self.num_labels != rows.get(layout.level, self.num_labels):
            raise CacheError(
                f"{where}: found {self.num_labels} label rows, expected {rows[layout.level]}"
            )
        if self.num_edges and not layout.has_edges:
            raise CacheError(f"{where}: found {self.num_edges} edges, expected none")
        datasets = {dataset.name: dataset for dataset in self.datasets(layout)}
        if set(self.extents) != set(datasets):
            raise CacheError(f"{where}: found {sorted(self.extents)}, expected {sorted(datasets)}")
        for name, dataset in datasets.items():
            self._validate_extents(dataset, layout, f"{where}, dataset {name!r}")
        # Overlapping pieces would let a small file stand for any amount of data.
        end = 0
        for offset, size in sorted(piece for pieces in self.extents.values() for piece in pieces):
            if offset < end:
                raise CacheError(
                    f"{where}: found data at {offset}, expected it to start after {end}, "
                    "where the dataset before it ends"
                )
            end = offset + size
        if end > self.num_bytes:
            raise CacheError(
                f"{where}: found data up to byte {end}, expected no more than the "
                f"{self.num_bytes} bytes of the file"
            )

    def _validate_extents(self, dataset: Dataset, layout: Layout, where: str) -> None:
        extents = self.extents[dataset.name]
        if any(offset % ALIGNMENT for offset, _ in extents):
            raise CacheError(
                f"{where}: found data at {extents[0][0]}, expected a multiple of {ALIGNMENT}"
            )
        if not (layout.compression and dataset.is_activations):
            expected = [dataset.num_bytes] if dataset.num_bytes else []
            if [size for _, size in extents] != expected:
                raise CacheError(
                    f"{where}: found pieces of {[size for _, size in extents][:4]} bytes, "
                    f"expected {expected}"
                )
            return
        num_chunks = -(-dataset.shape[0] // dataset.chunk_rows)
        if len(extents) != num_chunks:
            raise CacheError(f"{where}: found {len(extents)} chunks, expected {num_chunks}")
        chunk_bytes = dataset.chunk_rows * dataset.row_bytes
        smallest = min((size for _, size in extents), default=chunk_bytes)
        if chunk_bytes > MAX_DEFLATE_RATIO * smallest:
            raise CacheError(
                f"{where}: found a chunk of {smallest} bytes that would expand to {chunk_bytes}, "
                f"expected no more than {MAX_DEFLATE_RATIO} times its size"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the shard's entry as plain values."""
        extents = {name: [list(piece) for piece in pieces] for name, pieces in self.extents.items()}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**values, "extents": extents}
