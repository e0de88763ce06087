"""Reading splits that others wrote: folders of index files, in OGB's or DGCNN's layout."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import SplitError
from .making import Parts

_SUFFIXES = (".csv", ".csv.gz", ".txt")
#: Part -> file names it goes by.
_PART_NAMES = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
_DGCNN_FOLDER = "10fold_idx"


def read_folder(folder: Path) -> list[Parts]:
    """Read the folds in a folder of 0-based index files, one index a line.

    OGB's layout is one fold: ``train``, ``valid`` and ``test``, each ``.csv``, ``.csv.gz`` or
    ``.txt``; a part without a file is empty. DGCNN's is ``train_idx-K.txt`` and
    ``test_idx-K.txt``, directly or in ``10fold_idx``: it knows no validation part, so each fold
    validates on the next one's test part, taken out of its training part.
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
        read_indices(path) if path else np.empty(0, dtype=np.int64) for path in found.values()
    )
    return [(train, valid, test)]


def read_indices(path: Path) -> np.ndarray:
    """Read one column of whole numbers as int64; the file may be gzipped."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("ascii")
    except FileNotFoundError:
        raise SplitError(f"{path}: no such file, expected one index a line") from None
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

    ``rows [num_graphs]`` is the source row of each graph; rows without a graph (a molecule that
    could not be read) lie between them. Which of the two the indices are shows in what they
    cover: all positions or all rows, or an index beyond the last position. Nothing else is
    certain, and is refused.
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
    trains = [read_indices(folder / f"train_idx-{number}.txt") for number in range(1, count + 1)]
    tests = [read_indices(folder / f"test_idx-{number}.txt") for number in range(1, count + 1)]
    valids = [*tests[1:], tests[0]]
    return [
        (train[~np.isin(train, valid)], valid, test)
        for train, valid, test in zip(trains, valids, tests, strict=True)
    ]
