"""Rows of SMILES as graphs, and why a row has none; many rows stay on disk."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from torch_geometric.data import Data

from .molecule_features import MoleculeEncoding, import_rdkit, molecule_encoding
from .row_blocks import Skipped
from .tables import TextColumn

#: Why most rows that give no graph do not.
UNREADABLE = "RDKit cannot read the SMILES"


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
    chem, rd_base = import_rdkit()
    with rd_base.BlockLogs():
        for text in smiles:
            molecule = chem.MolFromSmiles(text)
            if molecule is None or not molecule.GetNumAtoms():
                yield Skipped(UNREADABLE if text else "no SMILES")
                continue
            try:
                yield encoding.graph(molecule)
            except KeyError as error:
                value = error.args[0]
                what = f"atomic number {value}" if type(value) is int else f"{value}"
                yield Skipped(f"no {encoding.name} feature for {what}")
