"""From what a user asks for to splits: with the data, from files, or made."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from ..errors import DataError, SplitError
from ..tasks import infer_task
from ..utils.levels import Level
from .files import read_folder, to_positions
from .making import (
    Parts,
    kfold_parts,
    parse_fold_count,
    parse_shares,
    random_parts,
    stratified_parts,
)
from .scaffold import scaffold_parts
from .types import LINKS, PARTS, Split, Splits


class Splittable(Protocol):
    """What a split is made of: a data set, or the labels of a cache."""

    spec: str
    level: Level
    official: Splits | None
    #: Source row of each graph; None for 0, 1, 2, ...
    rows: np.ndarray | None
    smiles: list[str] | None
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
