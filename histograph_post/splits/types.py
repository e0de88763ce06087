"""What a split is: the rows that train, validate and test, in one or more folds.

A row is what the task predicts: a graph, a node (graphs concatenated) or a link.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ..errors import NotFoundError, SplitError
from ..utils import LEVELS, Level
from ..utils.decoding import Count, Form, decode, read_json_file
from ..utils.files import write_json

#: The parts of a fold, in the order every table shows them.
PARTS = ("train", "valid", "test")

#: Splits that name more rows than this in all have them packed in a file.
PACKED_ROWS = 1_000_000

#: Row numbers of training, validation and test.
Parts = tuple[np.ndarray, np.ndarray, np.ndarray]

#: How the kind of a split begins that decided which edges of the graphs carry messages.
LINKS = "links"

#: Row numbers: a list in JSON, which :class:`Split` makes an array of.
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
    """One or more folds over the same rows, with how they came about."""

    kind: str
    unit: Level
    total: Count
    seed: int | None
    folds: tuple[Split, ...]

    def validate(self, *, where: str = "splits") -> None:
        """Raise :class:`SplitError` unless every fold is a sound split of ``total`` rows.

        Parts are in range and disjoint, nothing is listed twice, and there is something to train
        on. Rows that no part names are allowed, and so are empty validation and test parts.
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
        """Return the splits as plain values: lists of rows, or two bits a row of many."""
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
        """Rebuild splits from :meth:`to_json`, checking everything on the way."""
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
        """Whether lists of rows would be long; only rows in rising order can be packed."""
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


# --- many rows, at two bits each: 0 in no part, else one more than the place of the part in PARTS


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
        raise SplitError(f"{where}: found packed rows that are no base64 ({error})") from None
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
