"""Making splits: at random, stratified by class, in k folds, and of molecules by their scaffold.

Every part comes back sorted, so the same rows always read the same.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from sklearn.model_selection import KFold, StratifiedKFold, train_test_split

from ..errors import MissingExtraError, SplitError
from .types import Parts

#: Shares of the rows that train, validate and test.
Shares = tuple[float, float, float]

DEFAULT_SHARES: Shares = (0.8, 0.1, 0.1)


def parse_shares(text: str, *, where: str) -> Shares:
    """Read ``0.8,0.1,0.1``: three shares that add up to one, the first above zero."""
    if not text:
        return DEFAULT_SHARES
    expected = "expected three shares that add up to 1, such as 0.8,0.1,0.1"
    try:
        train, valid, test = (float(share) for share in text.split(","))
    except ValueError:
        raise SplitError(f"{where}: found {text!r}, {expected}") from None
    # A chain of comparisons is false for NaN too.
    if not (0 < train <= 1 and 0 <= valid < 1 and 0 <= test < 1):
        raise SplitError(f"{where}: found {text!r}, {expected}")
    if abs(train + valid + test - 1) > 1e-6:
        raise SplitError(f"{where}: found shares of {train + valid + test:g} in all, {expected}")
    return train, valid, test


def parse_fold_count(text: str, total: int, *, where: str) -> int:
    """Read the number of folds: three at least, for training, validation and test each need one."""
    if not (text.isdecimal() and 3 <= int(text) <= total):
        raise SplitError(
            f"{where}: found {text!r} folds, expected kfold:K with K from 3 to {total}"
        )
    return int(text)


def random_parts(total: int, shares: Shares, *, seed: int) -> Parts:
    """Draw the parts at random."""
    order = np.random.default_rng(seed).permutation(total)  # [total]
    _, num_valid, num_test = _sizes(total, shares)
    test, valid, train = np.split(order, [num_test, num_test + num_valid])
    return np.sort(train), np.sort(valid), np.sort(test)


def stratified_parts(classes: np.ndarray, shares: Shares, *, seed: int, where: str) -> Parts:
    """Draw the parts so that each has the classes ``[total]`` in the proportions of the whole."""
    _, num_valid, num_test = _sizes(len(classes), shares)
    rows = np.arange(len(classes))
    train, test = _stratified_draw(rows, classes, num_test, seed, where)
    train, valid = _stratified_draw(train, classes, num_valid, seed, where)
    return np.sort(train), np.sort(valid), np.sort(test)


def kfold_parts(
    total: int, classes: np.ndarray | None, num_folds: int, *, seed: int
) -> list[Parts]:
    """Cut the rows into folds; each is tested once, and validated while the one before it is."""
    rows = np.arange(total)
    # Stratification needs some class that reaches every fold.
    if classes is not None and np.bincount(classes).max() >= num_folds:
        folds = StratifiedKFold(num_folds, shuffle=True, random_state=seed)
    else:
        folds = KFold(num_folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        # A class smaller than the number of folds is missing from some: nothing can change that.
        warnings.filterwarnings("ignore", message="The least populated class")
        tests = [test for _, test in folds.split(rows, classes)]
    following = [*tests[1:], tests[0]]
    return [
        (np.setdiff1d(rows, np.concatenate([valid, test])), valid, test)
        for test, valid in zip(tests, following, strict=True)
    ]


def _sizes(total: int, shares: Shares) -> tuple[int, int, int]:
    num_test, num_valid = round(total * shares[2]), round(total * shares[1])
    return total - num_valid - num_test, num_valid, num_test


def _stratified_draw(
    rows: np.ndarray, classes: np.ndarray, size: int, seed: int, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """Take ``size`` of the rows out, class by class; return what stays and what was taken."""
    if size == 0:
        return rows, rows[:0]
    try:
        stays, taken = train_test_split(
            rows, test_size=size, stratify=classes[rows], random_state=seed
        )
    except ValueError as error:
        raise SplitError(
            f"{where}: the classes are too small to be stratified "
            f"(smallest: {np.bincount(classes).min()} of {len(classes)} rows): {error}"
        ) from None
    return stays, taken


def scaffold_parts(smiles: Sequence[str], shares: Shares) -> tuple[Parts, str]:
    """Test on skeletons that training never saw; return the parts, and a note on unreadable ones.

    A molecule that cannot be read has no scaffold to share with another: it is tested on.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    unread: list[int] = []
    for position, scaffold in enumerate(murcko_scaffolds(smiles)):
        (unread if scaffold is None else groups[scaffold]).append(position)
    # Of two groups of one size, the one that begins later goes first: so do the splits OGB ships.
    by_size = sorted(groups.values(), key=lambda group: (len(group), group[0]), reverse=True)
    train_limit = shares[0] * len(smiles)
    valid_limit = (shares[0] + shares[1]) * len(smiles)
    train: list[int] = []
    valid: list[int] = []
    test = list(unread)
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
    return (_sorted(train), _sorted(valid), _sorted(test)), note


def murcko_scaffolds(smiles: Sequence[str]) -> list[str | None]:
    """Return each molecule's scaffold as SMILES ('' without rings), None for one not readable."""
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


def _sorted(positions: list[int]) -> np.ndarray:
    return np.sort(np.array(positions, dtype=np.int64))
