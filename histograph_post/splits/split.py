"""Splits: the rows that train, validate and test, in one or more folds.

A row is what the task predicts: a graph, a node (graphs concatenated) or a link. Splits are saved
as JSON, and read from that or from index files of other tools.
"""

from __future__ import annotations

import base64
import gzip
import io
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..errors import ConfigError, NotFoundError, SplitError
from ..utils import LEVELS, Level
from ..utils.decoding import Count, Form, decode, read_json_file
from ..utils.files import read_regular, write_json

#: The parts of a fold, in the order of every table.
PARTS = ("train", "valid", "test")

#: Splits with more rows than this in all are saved in a packed form.
PACKED_ROWS = 1_000_000

#: Row numbers of training, validation and test.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]

#: Prefix of the kind of splits that determine which edges carry messages.
LINKS = "links"

#: Row numbers: a list in JSON, which :class:`Split` turns into an array.
Rows = Annotated[np.ndarray, Form("a list", lambda value: isinstance(value, list))]


@dataclass(frozen=True, eq=False)
class Split:
    """One fold: the row numbers of its three parts, as read-only int64 arrays."""

    train: Rows
    valid: Rows
    test: Rows

    def __post_init__(self) -> None:
        for part in PARTS:
            object.__setattr__(self, part, _indices(getattr(self, part), part))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Split):
            return NotImplemented
        return all(np.array_equal(a, b) for a, b in zip(self.parts, other.parts, strict=True))

    @property
    def parts(self) -> Parts:
        """The row numbers of training, validation and test, in that order."""
        return self.train, self.valid, self.test


@dataclass(frozen=True)
class Splits:
    """One or more folds over the same rows, and how they were made."""

    kind: str
    unit: Level
    total: Count
    seed: int | None
    folds: tuple[Split, ...]

    def validate(self, *, where: str = "splits") -> None:
        """Raise :class:`SplitError` unless every fold is a valid split of ``total`` rows.

        Parts are in range and disjoint, without duplicates, and the training part is not empty.
        Rows may be in no part, and validation and test parts may be empty.
        """
        if self.unit not in LEVELS:
            raise SplitError(f"{where}: found unit {self.unit!r}, expected one of {LEVELS}")
        if not self.folds:
            raise SplitError(f"{where}: found no folds, expected at least one")
        for number, fold in enumerate(self.folds):
            self._validate_fold(fold, f"{where}: fold {number}" if len(self.folds) > 1 else where)

    def _validate_fold(self, fold: Split, where: str) -> None:
        if not len(fold.train):
            raise SplitError(f"{where}: found an empty training part, expected at least one row")
        parts = dict(zip(PARTS, fold.parts, strict=True))
        for part, rows in parts.items():
            outside = rows[(rows < 0) | (rows >= self.total)]
            if len(outside):
                raise SplitError(
                    f"{where}: found index {outside[0]} in {part}, "
                    f"expected 0 to {self.total - 1} ({self.total} {self.unit}s)"
                )
            values, counts = np.unique(rows, return_counts=True)
            if len(values) < len(rows):
                raise SplitError(
                    f"{where}: found index {values[counts > 1][0]} more than once in {part}, "
                    "expected every index once"
                )
        for one, other in combinations(PARTS, 2):
            shared = np.intersect1d(parts[one], parts[other], assume_unique=True)
            if len(shared):
                raise SplitError(
                    f"{where}: found index {shared[0]} in both {one} and {other}, "
                    "expected disjoint parts"
                )

    def to_json(self) -> dict[str, Any]:
        """Return the splits as plain values: lists of rows, or two bits per row of many."""
        packed = self._is_packed()
        folds = [
            {"packed": _packed(fold, self.total)}
            if packed
            else {part: rows.tolist() for part, rows in zip(PARTS, fold.parts, strict=True)}
            for fold in self.folds
        ]
        return {
            "kind": self.kind,
            "unit": self.unit,
            "total": self.total,
            "seed": self.seed,
            "folds": folds,
        }

    @classmethod
    def from_json(cls, value: Any, *, where: str = "splits") -> Splits:
        """Read and validate what :meth:`to_json` returned."""
        folds = value.get("folds") if isinstance(value, dict) else None
        if isinstance(folds, list) and any(isinstance(f, dict) and "packed" in f for f in folds):
            splits = decode(cls, {**value, "folds": []}, where, error=SplitError)
            splits = replace(
                splits,
                folds=tuple(
                    _unpacked(decode(_PackedFold, fold, where, error=SplitError), splits, where)
                    for fold in folds
                ),
            )
        else:
            splits = decode(cls, value, where, error=SplitError)
        splits.validate(where=where)
        return splits

    def _is_packed(self) -> bool:
        """Whether lists of rows would be long; only ascending rows can be packed."""
        parts = [part for fold in self.folds for part in fold.parts]
        return sum(map(len, parts)) > PACKED_ROWS and all(
            bool((part[1:] > part[:-1]).all()) for part in parts
        )

    def save(self, path: Path) -> None:
        """Write the splits as JSON; the same splits always give the same bytes."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Splits:
        """Read what :meth:`save` wrote."""
        if not os.path.lexists(path):
            raise NotFoundError(f"{path}: no such splits file")
        value = read_json_file(path, error=SplitError)
        return cls.from_json(value, where=str(path))


# --- many rows, at two bits each: 0 for no part, 1, 2 and 3 for those of PARTS


@dataclass(frozen=True)
class _PackedFold:
    packed: str


def _packed(fold: Split, total: int) -> str:
    codes = np.zeros(-(-total // 4) * 4, dtype=np.uint8)  # [total], and up to a whole byte
    for code, rows in enumerate(fold.parts, start=1):
        codes[rows] = code
    four = codes.reshape(-1, 4)  # the first row in the lowest bits
    return base64.b64encode((four << np.arange(0, 8, 2, dtype=np.uint8)).sum(1, np.uint8)).decode()


def _unpacked(fold: _PackedFold, splits: Splits, where: str) -> Split:
    try:
        four = np.frombuffer(base64.b64decode(fold.packed, validate=True), np.uint8)
    except ValueError as error:
        raise SplitError(f"{where}: found packed rows that are not base64 ({error})") from None
    if len(four) != -(-splits.total // 4):
        raise SplitError(
            f"{where}: found {len(four)} bytes of packed rows, expected {-(-splits.total // 4)}"
        )
    codes = ((four[:, None] >> np.arange(0, 8, 2, dtype=np.uint8)) & 3).reshape(-1)[: splits.total]
    return Split(*(np.flatnonzero(codes == code) for code in range(1, len(PARTS) + 1)))


def _indices(values: Any, part: str) -> np.ndarray:
    """Return a read-only int64 copy of a list of row numbers."""
    # From a list, numpy would quietly turn True into 1 and 2**63 into a float.
    try:
        found = np.asarray(values) if len(values) else np.empty(0, dtype=np.int64)
    except (ValueError, OverflowError):  # lists of several lengths, numbers of many digits
        found = np.empty(0, dtype=object)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise SplitError(f"{part}: found values of type {found.dtype}, expected a list of integers")
    if isinstance(values, list) and any(type(value) is bool for value in values):
        raise SplitError(f"{part}: found true/false, expected a list of integers")
    indices = found.astype(np.int64)
    indices.setflags(write=False)
    return indices


# --- folders of index files, written by other tools

_SUFFIXES = (".csv", ".csv.gz", ".txt")

#: Bytes of a list of indices at most, decompressed: enough for ten million of them.
_MOST_BYTES = 2**28

#: Part -> names of its file.
_PART_NAMES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
_DGCNN_FOLDER = "10fold_idx"


def read_folder(folder: Path) -> list[Parts]:
    """Read the folds in a folder of 0-based index files, one index per line.

    OGB's layout is one fold: ``train``, ``valid`` and ``test``, each ``.csv``, ``.csv.gz`` or
    ``.txt``; a part without a file is empty. DGCNN's is ``train_idx-K.txt`` and
    ``test_idx-K.txt``, directly or in ``10fold_idx``, without a validation part: each fold
    validates on the next one's test part, which is removed from its training part.
    """
    for place in (folder, folder / _DGCNN_FOLDER):
        if any(place.glob("train_idx-*.txt")):
            return _read_numbered(place)
    found = {part: _find_part(folder, names) for part, names in _PART_NAMES.items()}
    if found["train"] is None:
        raise SplitError(
            f"{folder}: found no training indices, expected train.csv, train.csv.gz, train.txt "
            "or train_idx-1.txt"
        )
    train, valid, test = (
        _read_indices(path) if path else np.empty(0, dtype=np.int64) for path in found.values()
    )
    return [(train, valid, test)]


def _find_part(folder: Path, names: Sequence[str]) -> Path | None:
    found = [
        folder / (name + suffix)
        for name in names
        for suffix in _SUFFIXES
        if (folder / (name + suffix)).is_file()
    ]
    if len(found) > 1:
        raise SplitError(f"{folder}: found both {found[0].name} and {found[1].name}, expected one")
    return found[0] if found else None


def _read_numbered(folder: Path) -> list[Parts]:
    """Read ``train_idx-K.txt`` and ``test_idx-K.txt`` for K = 1, 2, ..."""
    count = sum(1 for _ in folder.glob("train_idx-*.txt"))
    if count < 3:
        raise SplitError(
            f"{folder}: found {count} folds, expected at least 3 (the next one validates)"
        )
    trains = [_read_indices(folder / f"train_idx-{number}.txt") for number in range(1, count + 1)]
    tests = [_read_indices(folder / f"test_idx-{number}.txt") for number in range(1, count + 1)]
    valids = [*tests[1:], tests[0]]
    return [
        (train[~np.isin(train, valid)], valid, test)
        for train, valid, test in zip(trains, valids, tests, strict=True)
    ]


def _read_indices(path: Path) -> np.ndarray:
    """Read one column of whole numbers as int64; the file may be gzipped."""
    if not path.exists():
        raise SplitError(f"{path}: no such file, expected one index a line")
    try:
        raw = read_regular(path, _MOST_BYTES)
        if path.suffix == ".gz":
            with gzip.open(io.BytesIO(raw)) as unpacked:
                raw = unpacked.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise SplitError(f"{path}: found more than {_MOST_BYTES} bytes, expected fewer")
        text = raw.decode("ascii")
    except ConfigError as error:
        raise SplitError(str(error)) from None
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise SplitError(f"{path}: not a list of indices ({error})") from None
    values = []
    for number, line in enumerate(text.splitlines(), start=1):
        value = line.strip()
        # Eighteen digits always fit int64.
        if re.fullmatch(r"-?\d{1,18}", value):
            values.append(int(value))
        elif value:
            raise SplitError(f"{path}: line {number}: found {value[:40]!r}, expected one index")
    return np.array(values, dtype=np.int64)


def to_positions(
    folds: Sequence[Parts], rows: np.ndarray, *, where: str
) -> tuple[list[Parts], str]:
    """Turn indices that may be source rows into graph positions; return them with a note.

    ``rows [num_graphs]`` is the source row of each graph; some rows have no graph (a molecule that
    could not be read). Indices that cover all positions or all rows, or go beyond the last
    position, can only be one of the two. Any others are ambiguous and refused.
    """
    positions = np.arange(len(rows))
    if np.array_equal(rows, positions):
        return list(folds), ""
    used = np.unique(np.concatenate([part for fold in folds for part in fold]))
    if np.array_equal(used, positions):
        return list(folds), f"{where}: the indices are graph positions"
    last_row = int(rows.max())
    all_rows = np.array_equal(used, rows) or np.array_equal(used, np.arange(last_row + 1))
    if not all_rows and not (len(used) and used[-1] >= len(rows)):
        raise SplitError(
            f"{where}: found {len(used)} indices that could be source rows or graph positions "
            f"({len(rows)} graphs from {last_row + 1} rows), expected all of one or the other; "
            "a splits .json file always holds graph positions"
        )
    outside = used[(used < 0) | (used > last_row)]
    if len(outside):
        raise SplitError(
            f"{where}: found index {outside[0]}, expected source rows from 0 to {last_row}"
        )
    position_of_row = np.full(last_row + 1, -1, dtype=np.int64)  # [num_rows], -1 = no graph
    position_of_row[rows] = positions
    converted = []
    for fold in folds:
        train, valid, test = (position_of_row[part] for part in fold)
        converted.append((train[train >= 0], valid[valid >= 0], test[test >= 0]))
    left_out = int((position_of_row[used] < 0).sum())
    note = f"{where}: the indices are source rows"
    return converted, f"{note}; {left_out} of them have no graph" if left_out else note
