"""Graphs in block files: written once, memory-mapped to read graphs from them.

A block is a safetensors file: ``rows`` (the row of each graph), and for each attribute
``values.NAME`` (of all graphs, concatenated) and ``sizes.NAME`` (how many of them each graph has).
Integers are stored in the narrowest type that holds them; the metadata has the types of the
attributes, the key of the block, and which rows were skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..errors import DataError
from ..utils.decoding import parse_json
from ..utils.files import write_bytes

#: Part of every key and fingerprint: blocks in another format are written again.
FORMAT = "histograph rows 1"

#: What reading a damaged or foreign file can raise.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, safetensors.SafetensorError)

#: Types for integers, the narrowest first.
_NARROW = (torch.uint8, torch.int16, torch.int32)

#: Blocks that are mapped at a time.
_MAPPED_BLOCKS = 512


def write_block(
    path: Path,
    key: str,
    first_row: int,
    made: Sequence[Data | str],
    notes: Counter[str],
    spec: str,
) -> None:
    """Write the graphs of consecutive rows, refusing graphs that differ in form.

    Args:
        key: Hash of what determines the graphs.
        made: The graph of each row, or why it has none.
        notes: What was changed in the graphs, and in how many.
    """
    graphs = {row: each for row, each in enumerate(made, first_row) if isinstance(each, Data)}
    skipped = [[row, each] for row, each in enumerate(made, first_row) if isinstance(each, str)]
    tensors = {"rows": torch.tensor(list(graphs), dtype=torch.int64)}
    types: dict[str, str] = {}
    first = next(iter(graphs), first_row)
    names = list(graphs[first].to_dict()) if graphs else []
    for row, graph in graphs.items():
        if sorted(graph.to_dict()) != sorted(names):
            raise DataError(
                f"{spec}: row {row}: found attributes {', '.join(graph.to_dict())}, "
                f"expected {', '.join(names)} as in row {first}"
            )
    for name in names:
        values = [_value(graph, name, f"{spec}: row {row}") for row, graph in graphs.items()]
        for value, row in zip(values, graphs, strict=True):
            # Once concatenated, other forms could not be separated again.
            if _form(value, name) != _form(values[0], name):
                raise DataError(
                    f"{spec}: row {row}: {name} is {value.dtype} {list(value.shape)}, expected "
                    f"{values[0].dtype} {list(values[0].shape)} but for the graph's size, as in "
                    f"row {first}"
                )
        dim = _cat_dim(name)
        tensors[f"sizes.{name}"] = _narrowed(torch.tensor([each.size(dim) for each in values]))
        tensors[f"values.{name}"] = _narrowed(torch.cat(values, dim))
        types[name] = str(values[0].dtype).removeprefix("torch.")
    about = json.dumps({"key": key, "types": types, "skipped": skipped, "notes": dict(notes)})
    write_bytes(path, safetensors.torch.save(tensors, {"about": about}))


def _value(graph: Data, name: str, where: str) -> Tensor:
    value = graph[name]
    if not isinstance(value, Tensor):
        raise DataError(
            f"{where}: {name} is {type(value).__name__}, expected tensors in graphs that stay on "
            "disk; stream=false reads all of them into memory"
        )
    return value.reshape(1, -1) if name == "y" else value if value.dim() else value[None]


def _form(value: Tensor, name: str) -> tuple[str, list[int]]:
    shape = list(value.shape)
    shape[_cat_dim(name)] = 0
    return str(value.dtype).removeprefix("torch."), shape


def _cat_dim(name: str) -> int:
    """Return the dimension along which graphs are concatenated; PyTorch Geometric's rule."""
    return -1 if "index" in name or name == "face" else 0


def _narrowed(values: Tensor) -> Tensor:
    """Return integers in the narrowest type that holds them."""
    if values.dtype in (torch.int64, torch.int32) and values.numel():
        low, high = int(values.min()), int(values.max())
        for kind in _NARROW:
            if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max:
                return values.to(kind).contiguous()
    return values.contiguous()


def key_of(path: Path) -> str | None:
    """Return the key of a block; None if there is none that can be read."""
    with contextlib.suppress(*_UNREADABLE), safetensors.safe_open(path, "pt") as file:
        return str(_about(file)["key"])
    return None


def _about(file: Any) -> dict[str, Any]:
    about: dict[str, Any] = parse_json(file.metadata()["about"].encode(), "about")
    return about


class _Mapped(NamedTuple):
    """The graphs of a memory-mapped block."""

    #: Attribute -> the values of all graphs, concatenated.
    values: dict[str, Tensor]
    #: Attribute -> where each graph's values begin, and their number: int64 ``[graphs + 1]``.
    bounds: dict[str, np.ndarray]
    #: Attribute -> its type in graphs.
    types: dict[str, torch.dtype]

    @classmethod
    def open(cls, path: Path) -> _Mapped:
        values, bounds, types = {}, {}, {}
        with safetensors.safe_open(path, "pt") as file:
            for name, kind in _about(file)["types"].items():
                if name != "y":
                    values[name] = file.get_tensor(f"values.{name}")
                    sizes = file.get_tensor(f"sizes.{name}").numpy()
                    bounds[name] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
                    types[name] = getattr(torch, kind)
        return cls(values, bounds, types)

    def columns(self, start: int, stop: int, names: Collection[str]) -> dict[str, list[Tensor]]:
        columns = {}
        for name in names or self.values:
            bounds, dim = self.bounds[name][start : stop + 1], _cat_dim(name)
            some = self.values[name].narrow(dim, int(bounds[0]), int(bounds[-1] - bounds[0]))
            some = some.to(self.types[name], copy=True)
            columns[name] = list(some.split(np.diff(bounds).tolist(), dim))
        return columns


@dataclass(frozen=True)
class _Block:
    """A block without its graphs."""

    path: Path
    #: Row, nodes and edges of each graph: int64 ``[graphs]``.
    rows: np.ndarray
    num_nodes: np.ndarray
    num_edges: np.ndarray
    #: Labels, if the rows have some: ``[graphs, targets]``.
    y: Tensor | None
    #: Attribute -> its type and the shape of one entry; empty for a block without graphs.
    form: dict[str, tuple[str, list[int]]]
    skipped: list[tuple[int, str]]
    notes: Counter[str]
    #: Hash of the values.
    digest: bytes

    @classmethod
    def look_at(cls, path: Path) -> _Block:
        """Read a block, hashing all of it."""
        digest = hashlib.sha256()
        form: dict[str, tuple[str, list[int]]] = {}
        with safetensors.safe_open(path, "pt") as file:
            about = _about(file)
            types = about["types"]
            for name in sorted(file.keys()):
                stored = file.get_tensor(name)
                digest.update(f"{name} {stored.dtype} {list(stored.shape)}".encode())
                digest.update(stored.view(torch.uint8).numpy())
                kind, _, attribute = name.partition(".")
                if kind == "values":
                    form[attribute] = (types[attribute], _form(stored, attribute)[1])
            rows = file.get_tensor("rows").numpy()
            nodes, edges = (
                file.get_tensor(f"sizes.{name}").numpy().astype(np.int64) if form else rows
                for name in ("x", "edge_index")
            )  # without graphs there are no rows
            y = None
            if "y" in form:
                y = file.get_tensor("values.y").to(getattr(torch, types["y"]))
        digest.update(json.dumps(types, sort_keys=True).encode())
        skipped = [(row, problem) for row, problem in about["skipped"]]
        notes = Counter(about["notes"])
        return cls(path, rows, nodes, edges, y, form, skipped, notes, digest.digest())

    def described(self) -> str:
        return ", ".join(f"{name} {kind} {shape}" for name, (kind, shape) in self.form.items())


class StreamedGraphs(Sequence[Data]):
    """Graphs in block files, all of one form; ``graphs[i]`` and ``graphs[a:b]`` read them."""

    def __init__(self, paths: Sequence[Path], spec: str) -> None:
        try:
            blocks = [_Block.look_at(path) for path in paths]
        except _UNREADABLE as error:
            raise DataError(
                f"{spec}: found unreadable rows ({error}), expected them as written"
            ) from error
        filled = [block for block in blocks if block.form]
        for block in filled:
            if block.form != filled[0].form:
                raise DataError(
                    f"{spec}: rows {block.rows[0]} to {block.rows[-1]}: found "
                    f"{block.described()}, expected {filled[0].described()} as in row "
                    f"{filled[0].rows[0]}"
                )
        self._paths = list(paths)
        #: First graph of each block, and the number of graphs: ``[blocks + 1]``.
        self._first = np.cumsum([0, *(len(block.rows) for block in blocks)])
        self.rows = np.concatenate([block.rows for block in blocks])
        self.num_nodes = np.concatenate([block.num_nodes for block in blocks])
        self.num_edges = np.concatenate([block.num_edges for block in blocks])
        #: Row number -> why the row has no graph.
        self.skipped = dict(pair for block in blocks for pair in block.skipped)
        self.notes = sum((block.notes for block in blocks), Counter[str]())
        self._digests = [block.digest for block in blocks]
        found = [block.y for block in blocks if block.y is not None]
        #: Labels, ``[graphs, targets]``: those of the blocks, or set later.
        self.y = torch.cat(found) if found else None
        self._mapped: OrderedDict[int, _Mapped] = OrderedDict()

    def __len__(self) -> int:
        return len(self.rows)

    # Maps belong to a process; another one opens its own.
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": OrderedDict()}

    @overload
    def __getitem__(self, index: int) -> Data: ...
    @overload
    def __getitem__(self, index: slice) -> list[Data]: ...
    def __getitem__(self, index: int | slice) -> Data | list[Data]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step > 0:
                return self._between(start, max(start, stop))[::step]
            return [self[at] for at in range(start, stop, step)]
        at = range(len(self))[index]
        return self._between(at, at + 1)[0]

    def __iter__(self) -> Iterator[Data]:
        for first, stop in itertools.pairwise(self._first.tolist()):
            yield from self._between(first, stop)

    def labels(self) -> np.ndarray:
        """Return the labels as float64 ``[graphs, targets]``."""
        return np.empty((len(self), 0)) if self.y is None else self.y.double().numpy()

    def update_digest(self, digest: Any) -> None:
        """Hash the contents of all graphs."""
        digest.update(f"{FORMAT} {len(self)}".encode())
        for each in self._digests:
            digest.update(each)
        digest.update(self.rows.astype("<i8").tobytes())
        if self.y is not None:
            digest.update(f"{self.y.dtype} {list(self.y.shape)}".encode())
            digest.update(self.y.contiguous().numpy())

    def columns(self, members: range, *names: str) -> dict[str, list[Tensor]]:
        """Return attributes of neighbouring graphs, all or those named, without making graphs."""
        found: dict[str, list[Tensor]] = {}
        start, stop = members.start, members.stop
        number = int(np.searchsorted(self._first, start, side="right")) - 1
        while start < stop:
            first, end = int(self._first[number]), min(stop, int(self._first[number + 1]))
            if end > start:
                block = self._block(number).columns(start - first, end - first, names)
                for name, values in block.items():
                    found.setdefault(name, []).extend(values)
            start, number = max(start, end), number + 1
        if self.y is not None and found and not names:
            y = self.y[members.start : stop].clone()  # [graphs, targets]
            found["y"] = list((y.squeeze(1) if y.size(1) == 1 else y).split(1))
        return found

    def _between(self, start: int, stop: int) -> list[Data]:
        columns = self.columns(range(start, stop))
        contiguous = {name: map(Tensor.contiguous, each) for name, each in columns.items()}
        names, values = list(contiguous), zip(*contiguous.values(), strict=True)
        return [Data(**dict(zip(names, each, strict=True))) for each in values]

    def _block(self, number: int) -> _Mapped:
        newest = next(reversed(self._mapped), None)
        if newest == number - 1:
            del self._mapped[newest]  # graphs are read in order: it is no longer needed
        block = self._mapped.pop(number, None) or _Mapped.open(self._paths[number])
        while len(self._mapped) >= _MAPPED_BLOCKS:
            self._mapped.popitem(last=False)
        self._mapped[number] = block
        return block
