"""Rows of SMILES as graphs, and why a row has none; many rows stay on disk."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch_geometric.data import Data

from .columns import TextColumn
from .molecule_features import MoleculeEncoding, import_rdkit, molecule_encoding
from .row_blocks import Skipped

_UNREADABLE = "RDKit cannot read their SMILES"

#: How many skipped rows are listed: all of them, unless the file is no table of molecules.
_LISTED = 200


class SmilesRows:
    """A column of SMILES, whose rows are read in any process.

    Args:
        smiles: The text of every row.
        features: The name of the encoding.
    """

    def __init__(self, smiles: Sequence[str], features: str) -> None:
        self._smiles = smiles if isinstance(smiles, TextColumn) else TextColumn.of(smiles)
        self._features = features

    def __len__(self) -> int:
        return len(self._smiles)

    def key(self, start: int, stop: int) -> str:
        """Return a hash of the text, the encoding, and the version of what reads them."""
        _, rd_base = import_rdkit()
        digest = hashlib.sha256(f"smiles {self._features} {rd_base.rdkitVersion}".encode())
        self._smiles.update_digest(digest, start, stop)
        return digest.hexdigest()

    def graphs(self, start: int, stop: int, notes: Counter[str]) -> Iterator[Data | Skipped]:
        """Yield the graph of each row, or why it has none."""
        yield from molecule_graphs(self._smiles[start:stop], molecule_encoding(self._features))

    def release(self) -> None:
        """Hold nothing that processes cannot share."""


def molecule_graphs(smiles: Iterable[str], encoding: MoleculeEncoding) -> Iterator[Data | Skipped]:
    """Yield the graph of each molecule, or why it has none."""
    unknown = f"an atom or bond has no {encoding.name} feature"
    chem, rd_base = import_rdkit()
    with rd_base.BlockLogs():
        for text in smiles:
            molecule = chem.MolFromSmiles(text)
            if molecule is None or not molecule.GetNumAtoms():
                yield Skipped(_UNREADABLE, _short(text))
                continue
            try:
                yield encoding.graph(molecule)
            except KeyError as error:
                yield Skipped(unknown, f"{_short(text)} ({error.args[0]})")


def skipped_notes(skipped: Sequence[tuple[int, Skipped]], num_rows: int) -> list[str]:
    """Return a note for each reason why rows have no graph."""
    reasons: dict[str, list[str]] = {}
    for row, (reason, shown) in skipped:
        reasons.setdefault(reason, []).append(f"row {row} {shown}")
    return [
        f"{len(rows)} of {num_rows} rows skipped, {reason}: {', '.join(rows[:_LISTED])}"
        f"{', ...' if len(rows) > _LISTED else ''} (rows count from 0, below the header)"
        for reason, rows in sorted(reasons.items(), key=lambda pair: pair[0] != _UNREADABLE)
    ]


def _short(smiles: str) -> str:
    return f"{smiles[:40]}..." if len(smiles) > 43 else smiles or "(blank)"
