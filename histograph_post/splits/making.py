"""From ``--split`` to splits: the official ones of the data, read from files, or made.

They are made at random, stratified by class, in k folds, or for molecules by scaffold. Every part
is sorted.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

from ..errors import DataError, MissingExtraError, SplitError
from ..tasks import infer_task
from ..utils import Level
from ..utils.decoding import require_number
from .split import LINKS, PARTS, Parts, Split, Splits, read_folder, to_positions

#: Shares of the rows that train, validate and test.
Shares = tuple[float, float, float]

DEFAULT_SHARES: Shares = (0.8, 0.1, 0.1)


class Splittable(Protocol):
    """What a split is made from: a data set, or the labels of a cache."""

    spec: str
    level: Level
    official: Splits | None
    #: Source row of each graph; None for 0, 1, 2, ...
    rows: np.ndarray | None
    smiles: Sequence[str] | None
    #: Notes for the user are added here.
    notes: list[str]

    @property
    def label_ptr(self) -> np.ndarray:
        """First label row of each graph, and the number of rows: ``[num_graphs + 1]``."""
        ...

    def labels(self) -> np.ndarray:
        """Return the labels, NaN where missing: ``[rows, targets]``."""
        ...


#: Every form of ``--split``, for messages and help.
SPLIT_FORMS = (
    "auto, official, random[:TRAIN,VALID,TEST], stratified[:TRAIN,VALID,TEST], "
    "scaffold[:TRAIN,VALID,TEST], kfold:K, a splits .json file, "
    "or a folder of index files"
)


def resolve_splits(dataset: Splittable, spec: str | None, *, seed: int = 0) -> Splits:
    """Return the splits that ``spec`` asks for, checked against the data.

    ``spec`` is one of :data:`SPLIT_FORMS`; None is ``auto``: the official splits if the data has
    them, else stratified by class, else random. Notes on the result (a fallback, an empty part)
    are added to ``dataset.notes``.
    """
    require_number("split_seed", seed, low=0, high=2**32 - 1, whole=True)
    spec = spec or "auto"
    total = int(dataset.label_ptr[-1])
    where = f"split {spec}"
    match spec.partition(":"):
        case "auto", "", _:
            splits = dataset.official or _made(dataset, "auto", "", seed, where)
        case "official", "", _:
            if dataset.official is None:
                raise SplitError(f"{where}: {dataset.spec} comes without official splits")
            splits = dataset.official
        case ("random" | "stratified" | "scaffold" | "kfold") as name, _, argument:
            splits = _made(dataset, name, argument, seed, where)
        case _:
            where = spec
            splits = _read(dataset, Path(spec).expanduser())
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


def check_split(spec: str | None) -> None:
    """Refuse a specification that no data could meet, before they are read."""
    name, _, argument = (spec or "auto").partition(":")
    where = f"split {spec}"
    if name in ("random", "stratified", "scaffold"):
        parse_shares(argument, where=where)
    elif name == "kfold":
        parse_fold_count(argument, sys.maxsize, where=where)
    elif spec and spec not in ("auto", "official") and not Path(spec).expanduser().exists():
        raise SplitError(f"{where}: no such file or folder; expected {SPLIT_FORMS}")


def _check_links(dataset: Splittable, splits: Splits, where: str) -> None:
    """Refuse to score links that carry messages: the model has seen that they exist."""
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


def _made(dataset: Splittable, name: str, argument: str, seed: int, where: str) -> Splits:
    """Make a split: by scaffold, in k folds, stratified as far as the labels allow, or random."""
    total = int(dataset.label_ptr[-1])
    if name == "kfold":
        num_folds = parse_fold_count(argument, total, where=where)
        folds = kfold_parts(total, _classes(dataset, where), num_folds, seed=seed)
        return _splits(dataset, f"kfold:{num_folds}", seed, folds)
    shares = parse_shares(argument, where=where)
    written = ",".join(f"{share:g}" for share in shares)
    if name == "scaffold":
        if dataset.smiles is None or dataset.level != "graph":
            raise SplitError(f"{where}: {dataset.spec} has no SMILES, expected one per graph")
        parts, note = scaffold_parts(dataset.smiles, shares)
        _note(dataset, note)
        return _splits(dataset, f"scaffold:{written}", None, [parts])
    classes = None if name == "random" else _classes(dataset, where, required=name == "stratified")
    if classes is not None:
        try:
            parts = stratified_parts(classes, shares, seed=seed, where=where)
            return _splits(dataset, f"stratified:{written}", seed, [parts])
        except SplitError as error:
            if name == "stratified":
                raise
            _note(dataset, f"{error}; rows were drawn at random instead")
    parts = random_parts(total, shares, seed=seed)
    return _splits(dataset, f"random:{written}", seed, [parts])


def _splits(dataset: Splittable, kind: str, seed: int | None, folds: Iterable[Parts]) -> Splits:
    return Splits(
        kind=kind,
        unit=dataset.level,
        total=int(dataset.label_ptr[-1]),
        seed=seed,
        folds=tuple(Split(*parts) for parts in folds),
    )


def _classes(dataset: Splittable, where: str, *, required: bool = False) -> np.ndarray | None:
    """Return the class of each row, a missing label being one as well; None without classes."""
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


def _read(dataset: Splittable, path: Path) -> Splits:
    """Read a split from a splits file or a folder of index files."""
    if path.suffix == ".json":
        return Splits.load(path)
    if not path.is_dir():
        raise SplitError(f"split {path}: no such file or folder; expected {SPLIT_FORMS}")
    folds = read_folder(path)
    if dataset.level == "graph" and dataset.rows is not None:
        folds, note = to_positions(folds, dataset.rows, where=str(path))
        _note(dataset, note)
    return _splits(dataset, "files", None, folds)


def _note(dataset: Splittable, note: str) -> None:
    if note and note not in dataset.notes:
        dataset.notes.append(note)


# --- making the parts


def parse_shares(text: str, *, where: str) -> Shares:
    """Read ``0.8,0.1,0.1``: three shares that add up to one, the first above zero."""
    if not text:
        return DEFAULT_SHARES
    expected = "expected three shares that add up to 1, such as 0.8,0.1,0.1"
    try:
        train, valid, test = (float(share) for share in text.split(","))
        if not (0 < train <= 1 and 0 <= valid < 1 and 0 <= test < 1):  # or NaN
            raise ValueError
    except ValueError:
        raise SplitError(f"{where}: found {text!r}, {expected}") from None
    if abs(train + valid + test - 1) > 1e-6:
        raise SplitError(f"{where}: found shares of {train + valid + test:g} in all, {expected}")
    return train, valid, test


def parse_fold_count(text: str, total: int, *, where: str) -> int:
    """Read the number of folds: at least three, one each for training, validation and test."""
    if not (re.fullmatch(r"[0-9]{1,18}", text) and 3 <= int(text) <= total):
        raise SplitError(
            f"{where}: found {text!r} folds, expected kfold:K with K from 3 to {total}"
        )
    return int(text)


def random_parts(total: int, shares: Shares, *, seed: int) -> Parts:
    """Draw the parts at random."""
    order = np.random.default_rng(seed).permutation(total)  # [total]
    num_valid, num_test = _held_out(total, shares)
    test, valid, train = np.split(order, [num_test, num_test + num_valid])
    return np.sort(train), np.sort(valid), np.sort(test)


def stratified_parts(classes: np.ndarray, shares: Shares, *, seed: int, where: str) -> Parts:
    """Draw the parts so that each has the class proportions of the whole (``classes [total]``)."""
    num_valid, num_test = _held_out(len(classes), shares)
    rows = np.arange(len(classes))
    train, test = _stratified_draw(rows, classes, num_test, seed, where)
    train, valid = _stratified_draw(train, classes, num_valid, seed, where)
    return np.sort(train), np.sort(valid), np.sort(test)


def kfold_parts(
    total: int, classes: np.ndarray | None, num_folds: int, *, seed: int
) -> list[Parts]:
    """Cut the rows into folds; each is the test part once, with the next fold for validation."""
    rows = np.arange(total)
    # Stratification needs a class with a row in every fold.
    if classes is not None and np.bincount(classes).max() >= num_folds:
        folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    else:
        folds = KFold(num_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # A class smaller than the number of folds cannot be in all of them.
        warnings.filterwarnings("ignore", message="The least populated class")
        tests = [test for _, test in folds.split(rows, classes)]
    following = [*tests[1:], tests[0]]
    return [
        (np.setdiff1d(rows, np.concatenate([valid, test])), valid, test)
        for test, valid in zip(tests, following, strict=True)
    ]


def _held_out(total: int, shares: Shares) -> tuple[int, int]:
    """Return how many rows validate and test."""
    return round(total * shares[1]), round(total * shares[2])


def _stratified_draw(
    rows: np.ndarray, classes: np.ndarray, size: int, seed: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw ``size`` of the rows, stratified; return the other rows and these."""
    if size == 0:
        return rows, rows[:0]
    try:
        others, drawn = train_test_split(
            rows, test_size=size, stratify=classes[rows], random_state=seed
        )
    except ValueError as error:
        raise SplitError(
            f"{where}: the classes are too small to be stratified "
            f"(smallest: {np.bincount(classes).min()} of {len(classes)} rows): {error}"
        ) from None
    return others, drawn


def scaffold_parts(smiles: Sequence[str], shares: Shares) -> tuple[Parts, str]:
    """Test on scaffolds that training never saw; return the parts, and a note on unreadable SMILES.

    A molecule that cannot be read has no scaffold and goes to the test part.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    unread: list[int] = []
    for position, scaffold in enumerate(murcko_scaffolds(smiles)):
        (unread if scaffold is None else groups[scaffold]).append(position)
    # Of groups of equal size, the one that begins later goes first, as in OGB's own splits.
    by_size = sorted(groups.values(), key=lambda group: (len(group), group[0]), reverse=True)
    train_limit = shares[0] * len(smiles)
    valid_limit = (shares[0] + shares[1]) * len(smiles)
    train, valid, test = list[int](), list[int](), list(unread)
    for group in by_size:
        if len(train) + len(group) <= train_limit:
            train += group
        elif len(train) + len(valid) + len(group) <= valid_limit:
            valid += group
        else:
            test += group
    note = ""
    if unread:
        note = (
            f"scaffold split: {len(unread)} molecules cannot be read by RDKit and are in the test "
            f"part (first: number {unread[0]}, {smiles[unread[0]]})"
        )
    train_rows, valid_rows, test_rows = (
        np.sort(np.array(part, dtype=np.int64)) for part in (train, valid, test)
    )
    return (train_rows, valid_rows, test_rows), note


def murcko_scaffolds(smiles: Sequence[str]) -> list[str | None]:
    """Return each molecule's scaffold as SMILES ('' without rings), None if it is unreadable."""
    try:
        from rdkit import Chem, rdBase
        from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
    except ImportError:
        raise MissingExtraError("a scaffold split", extra="chem") from None
    with rdBase.BlockLogs():
        molecules = (Chem.MolFromSmiles(text.strip()) for text in smiles)
        return [
            None if molecule is None else MurckoScaffoldSmiles(mol=molecule, includeChirality=True)
            for molecule in molecules
        ]
