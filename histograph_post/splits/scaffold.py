"""The scaffold split of molecules: test on skeletons that training never saw.

Molecules are grouped by their Bemis-Murcko scaffold; whole groups, the largest first, fill
training, then validation, then test. This is the deterministic procedure of DeepChem, OGB and
the pretrain-gnns family, and it reproduces the splits OGB ships.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ..errors import MissingExtraError
from .making import Parts, Shares


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


def scaffold_parts(smiles: Sequence[str], shares: Shares) -> tuple[Parts, str]:
    """Split molecules by scaffold; return the parts, and a note where one could not be read.

    Such a molecule has no scaffold to share with another: it is tested on.
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


def _sorted(positions: list[int]) -> np.ndarray:
    return np.sort(np.array(positions, dtype=np.int64))
