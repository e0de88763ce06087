"""From what a user asks for to splits: those of the data, read from files, or made."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import ConfigError, DataError, SplitError
from ..tasks import infer_task
from ..utils import Level
from ..utils.files import read_regular
from .making import (
    kfold_parts,
    parse_fold_count,
    parse_shares,
    random_parts,
    scaffold_parts,
    stratified_parts,
)
from .types import LINKS, PARTS, Parts, Split, Splits


class Splittable(Protocol):
    """What a split is made of: a data set, or the labels of a cache."""

    spec: str
    level: Level
    official: Splits | None
    #: Source row of each graph; None for 0, 1, 2, ...
    rows: np.ndarray | None
    smiles: Sequence[str] | None
    #: What the user should know is added here.
    notes: list[str]

    @property
    def label_ptr(self) -> np.ndarray:
        """First label row of each graph, and the number of rows: ``[num_graphs + 1]``."""
        ...

    def labels(self) -> np.ndarray:
        """Return the labels, NaN where missing: ``[rows, targets]``."""
        ...


#: What a split can be asked for with, for messages and help.
SPLIT_FORMS = (
    "auto, official, random[:TRAIN,VALID,TEST], stratified[:TRAIN,VALID,TEST], "
    "scaffold[:TRAIN,VALID,TEST], kfold:K, a splits .json file, "
    "or a folder of index files"
)


def resolve_splits(dataset: Splittable, spec: str | None, *, seed: int = 0) -> Splits:
    """Return the splits that ``spec`` asks for, checked against the data.

    ``spec`` is one of :data:`SPLIT_FORMS`; None is ``auto``: the official splits where the data
    comes with them, else stratified by class, else random. What the user should know about the
    result (a fallback, an empty part) is added to ``dataset.notes``.
    """
    spec = spec or "auto"
    total = int(dataset.label_ptr[-1])
    where = f"split {spec}"
    match spec.partition(":"):
        case "auto", "", _:
            splits = dataset.official or _made(dataset, "auto", "", total, seed, where)
        case "official", "", _:
            if dataset.official is None:
                raise SplitError(f"{where}: {dataset.spec} comes without official splits")
            splits = dataset.official
        case ("random" | "stratified" | "scaffold" | "kfold") as name, _, argument:
            splits = _made(dataset, name, argument, total, seed, where)
        case _:
            where = spec
            splits = _read(dataset, Path(spec).expanduser(), total)
    if (splits.unit, splits.total) != (dataset.level, total):
        raise SplitError(
            f"{where}: found a split of {splits.total} {splits.unit}s, "
            f"expected one of the {total} {dataset.level}s of {dataset.spec}"
        )
    splits.validate(where=where)
    _check_links(dataset, splits, where)
    for part in PARTS[1:]:
        if not all(len(getattr(fold, part)) for fold in splits.folds):
            _note(dataset, f"{where}: the {part} part is empty")
    return splits


def _check_links(dataset: Splittable, splits: Splits, where: str) -> None:
    """Refuse to score links that messages ran along: the model has seen that they are there."""
    own = dataset.official
    if own is None or not own.kind.startswith(LINKS):
        return
    for fold in splits.folds:
        seen = np.isin(np.concatenate([fold.valid, fold.test]), own.folds[0].train).sum()
        if seen:
            raise SplitError(
                f"{where}: found {seen} links to score that messages run along, expected others; "
                "use the split of the data (link_seed= and link_split= make another)"
            )


def _made(
    dataset: Splittable, name: str, argument: str, total: int, seed: int, where: str
) -> Splits:
    """Make a split: by scaffold, in k folds, stratified as far as the labels allow, or random."""
    if name == "kfold":
        num_folds = parse_fold_count(argument, total, where=where)
        folds = kfold_parts(total, _classes(dataset, where), num_folds, seed=seed)
        return _splits(dataset, f"kfold:{num_folds}", total, seed, folds)
    shares = parse_shares(argument, where=where)
    written = ",".join(f"{share:g}" for share in shares)
    if name == "scaffold":
        if dataset.smiles is None or dataset.level != "graph":
            raise SplitError(f"{where}: {dataset.spec} has no SMILES, expected one per graph")
        parts, note = scaffold_parts(dataset.smiles, shares)
        _note(dataset, note)
        return _splits(dataset, f"scaffold:{written}", total, None, [parts])
    classes = None if name == "random" else _classes(dataset, where, required=name == "stratified")
    if classes is not None:
        try:
            parts = stratified_parts(classes, shares, seed=seed, where=where)
            return _splits(dataset, f"stratified:{written}", total, seed, [parts])
        except SplitError as error:
            if name == "stratified":
                raise
            _note(dataset, f"{error}; rows were drawn at random instead")
    parts = random_parts(total, shares, seed=seed)
    return _splits(dataset, f"random:{written}", total, seed, [parts])


def _splits(
    dataset: Splittable, kind: str, total: int, seed: int | None, folds: Iterable[Parts]
) -> Splits:
    built = tuple(Split(*parts) for parts in folds)
    return Splits(kind=kind, unit=dataset.level, total=total, seed=seed, folds=built)


def _classes(dataset: Splittable, where: str, *, required: bool = False) -> np.ndarray | None:
    """Return the class number of each row, a missing label being a class too; None without any."""
    labels = dataset.labels()  # [rows, num_targets]
    try:
        kind = infer_task(labels, dataset.level).kind
    except DataError:
        kind = None
    if kind in ("binary", "multiclass"):
        return np.unique(labels[:, 0], return_inverse=True)[1]  # [rows]
    if kind == "multilabel":
        _note(dataset, f"{where}: several targets cannot be stratified, rows were drawn at random")
    elif required:
        raise SplitError(f"{where}: {dataset.spec} has no classes to stratify by; use random")
    return None


def _read(dataset: Splittable, path: Path, total: int) -> Splits:
    """Read a split from a splits file or a folder of index files."""
    if path.suffix == ".json":
        return Splits.load(path)
    if not path.is_dir():
        raise SplitError(f"split {path}: no such file or folder; expected {SPLIT_FORMS}")
    folds = read_folder(path)
    if dataset.level == "graph" and dataset.rows is not None:
        folds, note = to_positions(folds, dataset.rows, where=str(path))
        _note(dataset, note)
    return _splits(dataset, "files", total, None, folds)


def _note(dataset: Splittable, note: str) -> None:
    if note and note not in dataset.notes:
        dataset.notes.append(note)


# --- folders of index files, which others wrote

_SUFFIXES = (".csv", ".csv.gz", ".txt")

#: Bytes of a list of indices at most, unpacked: ten million of them, and more.
_MOST_BYTES = 2**28

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
