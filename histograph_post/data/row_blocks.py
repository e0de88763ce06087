"""The file of a block of graphs: written once, mapped as often as its graphs are asked for.

Safetensors: ``rows`` (the row of each graph), and for each attribute ``values.NAME`` (of all
graphs, one after the other) and ``sizes.NAME`` (how many of them each graph has). Whole numbers are
stored as narrow as they fit; the metadata has the types that graphs have them in, the key of the
block, and which rows were skipped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch_geometric.data import Data

from ..errors import DataError
from ..utils.files import atomic_path

#: What a file that is damaged, or none of ours, can raise.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, safetensors.SafetensorError)

#: Types that whole numbers are stored as, the narrowest first.
_NARROW = (torch.uint8, torch.int16, torch.int32)


class Skipped(NamedTuple):
    """A row that has no graph."""

    #: Why.
    problem: str


class Block(NamedTuple):
    """The graphs of a block as its file has them, mapped."""

    #: Attribute -> the values of all graphs, one after the other.
    values: dict[str, Tensor]
    #: Attribute -> first place of each graph's values, and their number: int64 ``[graphs + 1]``.
    bounds: dict[str, np.ndarray]
    #: Attribute -> type that graphs have it in.
    types: dict[str, torch.dtype]

    def graphs(self, start: int, stop: int) -> list[Data]:
        """Return some of the graphs."""
        columns = {}
        for name, stored in self.values.items():
            bounds = self.bounds[name][start : stop + 1]
            dim = _cat_dim(name)
            some = stored.narrow(dim, int(bounds[0]), int(bounds[-1] - bounds[0]))
            columns[name] = some.to(self.types[name], copy=True).split(
                np.diff(bounds).tolist(), dim
            )
        return [
            Data(**{name: parts[graph].contiguous() for name, parts in columns.items()})
            for graph in range(stop - start)
        ]


@dataclass(frozen=True)
class AboutBlock:
    """What is known of a block without its graphs."""

    path: Path
    #: Row of each graph: int64 ``[graphs]``.
    rows: np.ndarray
    #: Nodes of each graph: int64 ``[graphs]``.
    num_nodes: np.ndarray
    #: Edges of each graph: int64 ``[graphs]``.
    num_edges: np.ndarray
    #: Labels, if the rows have some: ``[graphs, targets]``.
    y: Tensor | None
    #: Attribute -> its type and the shape of one entry; empty for a block without graphs.
    form: dict[str, tuple[str, list[int]]]
    skipped: list[tuple[int, Skipped]]
    notes: Counter[str]
    #: Hash of the values.
    digest: str


def write_block(
    path: Path,
    key: str,
    first_row: int,
    made: Sequence[Data | Skipped],
    notes: Counter[str],
    spec: str,
) -> None:
    """Write the graphs of consecutive rows, refusing graphs that differ in form.

    Args:
        path: The file.
        key: Hash of what decides the graphs.
        first_row: Row of the first of ``made``.
        made: A graph per row, or why it has none.
        notes: What was changed in the graphs, and in how many.
        spec: The data, for messages.
    """
    graphs = [(first_row + at, each) for at, each in enumerate(made) if isinstance(each, Data)]
    tensors = {"rows": torch.tensor([row for row, _ in graphs], dtype=torch.int64)}
    types: dict[str, str] = {}
    names = list(graphs[0][1].to_dict()) if graphs else []
    for row, graph in graphs:
        if sorted(graph.to_dict()) != sorted(names):
            raise DataError(
                f"{spec}: row {row}: found attributes {', '.join(graph.to_dict())}, "
                f"expected {', '.join(names)} as in row {graphs[0][0]}"
            )
    for name in names:
        values = [_value(graph, name, f"{spec}: row {row}") for row, graph in graphs]
        _check_alike(values, [row for row, _ in graphs], name, spec)
        dim = _cat_dim(name)
        tensors[f"sizes.{name}"] = _narrowed(torch.tensor([each.size(dim) for each in values]))
        tensors[f"values.{name}"] = _narrowed(torch.cat(values, dim))
        types[name] = str(values[0].dtype).removeprefix("torch.")
    skipped = [
        [first_row + at, each.problem] for at, each in enumerate(made) if isinstance(each, Skipped)
    ]
    about = {"key": key, "types": types, "skipped": skipped, "notes": dict(notes)}
    with atomic_path(path) as partial:
        text = json.dumps(about)
        safetensors.torch.save_file(tensors, partial, {"about": text})


def _value(graph: Data, name: str, where: str) -> Tensor:
    value = graph[name]
    if not isinstance(value, Tensor):
        raise DataError(
            f"{where}: {name} is {type(value).__name__}, expected tensors in graphs that stay on "
            "disk; stream=false reads all of them into memory"
        )
    return value.reshape(1, -1) if name == "y" else value if value.dim() else value[None]


def _check_alike(values: Sequence[Tensor], rows: Sequence[int], name: str, spec: str) -> None:
    """Refuse graphs that cannot be told apart again once they are joined."""
    expected = _form(values[0], name)
    for value, row in zip(values, rows, strict=True):
        if _form(value, name) != expected:
            raise DataError(
                f"{spec}: row {row}: {name} is {value.dtype} {list(value.shape)}, expected "
                f"{values[0].dtype} {list(values[0].shape)} but for the graph's size, as in row "
                f"{rows[0]}"
            )


def _form(value: Tensor, name: str) -> tuple[str, list[int]]:
    shape = list(value.shape)
    shape[_cat_dim(name)] = 0
    return str(value.dtype).removeprefix("torch."), shape


def _cat_dim(name: str) -> int:
    """Return along which dimension graphs are joined; PyTorch Geometric's rule."""
    return -1 if "index" in name or name == "face" else 0


def _narrowed(values: Tensor) -> Tensor:
    """Return whole numbers in the narrowest type that has them."""
    if values.dtype not in (torch.int64, torch.int32) or not values.numel():
        return values.contiguous()
    low, high = int(values.min()), int(values.max())
    for kind in _NARROW:
        if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max:
            return values.to(kind).contiguous()
    return values.contiguous()


def key_of(path: Path) -> str | None:
    """Return the key of a block that is there; None where there is none that can be read."""
    with contextlib.suppress(*UNREADABLE):
        return str(_read_about(path)["key"])
    return None


def _read_about(path: Path) -> dict[str, Any]:
    with safetensors.safe_open(path, "pt") as file:
        about: dict[str, Any] = json.loads(file.metadata()["about"])
    return about


def map_block(path: Path) -> Block:
    """Map the graphs of a block; nothing of them is read before it is used."""
    about = _read_about(path)
    values, bounds = {}, {}
    with safetensors.safe_open(path, "pt") as file:
        for name in about["types"]:
            if name != "y":
                values[name] = file.get_tensor(f"values.{name}")
                sizes = file.get_tensor(f"sizes.{name}").numpy()
                bounds[name] = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    types = {name: getattr(torch, about["types"][name]) for name in values}
    return Block(values, bounds, types)


def look_at(path: Path) -> AboutBlock:
    """Return what is known of a block without its graphs, and hash all of it."""
    about = _read_about(path)
    digest = hashlib.sha256()
    form: dict[str, tuple[str, list[int]]] = {}
    with safetensors.safe_open(path, "pt") as file:
        for name in sorted(file.keys()):
            stored = file.get_tensor(name)
            digest.update(f"{name} {stored.dtype} {list(stored.shape)}".encode())
            digest.update(stored.view(torch.uint8).numpy())
            kind, _, attribute = name.partition(".")
            if kind == "values":
                form[attribute] = (about["types"][attribute], _form(stored, attribute)[1])
        rows = file.get_tensor("rows").numpy()
        nodes, edges = (
            file.get_tensor(f"sizes.{name}").numpy().astype(np.int64) if form else rows
            for name in ("x", "edge_index")
        )  # without graphs there are no rows
        y = file.get_tensor("values.y") if "y" in form else None
    digest.update(json.dumps(about["types"], sort_keys=True).encode())
    if y is not None:
        y = y.to(getattr(torch, about["types"]["y"]))
    skipped = [(row, Skipped(problem)) for row, problem in about["skipped"]]
    notes = Counter(about["notes"])
    return AboutBlock(path, rows, nodes, edges, y, form, skipped, notes, digest.hexdigest())
