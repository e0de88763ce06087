"""Molecules as graphs: atoms and bonds as integers, as published checkpoints were trained on them.

``ogb``: 9 per atom, 3 per bond, as ``ogb.utils.smiles2graph`` gives them. ``pretrain``: 2 and 2, as
the pretrain-gnns family (Hu et al., "Strategies for Pre-training Graph Neural Networks") does.
``pyg``: 9 and 3 other ones, as ``torch_geometric.utils.from_smiles`` gives them.
Each bond is two directed edges, one after the other, in RDKit's order of bonds; PyG sorts them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils.smiles import e_map, x_map

from ..errors import DataError, MissingExtraError
from .tables import TextColumn

#: One atom or bond of RDKit (which has no types of its own) -> its integers.
Encoder = Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class MoleculeEncoding:
    """How to turn a molecule into a graph; an atom or bond it does not know raises KeyError."""

    name: str
    num_atom_features: int
    num_bond_features: int
    encode_atom: Encoder
    encode_bond: Encoder
    #: Whether edges are sorted by their first and second atom.
    sorts_edges: bool = False

    def graph(self, molecule: Any) -> Data:
        """Return the molecule as a graph of integer features."""
        # By index, as GetAtoms() checks the size at every step; into flat lists, as a tuple kept
        # per atom would set off the garbage collector again and again.
        atoms: list[int] = []
        for atom in map(molecule.GetAtomWithIdx, range(molecule.GetNumAtoms())):
            atoms += self.encode_atom(atom)
        ends: list[int] = []
        bonds: list[int] = []
        for bond in map(molecule.GetBondWithIdx, range(molecule.GetNumBonds())):
            begin, end = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
            ends += (begin, end, end, begin)
            bonds += self.encode_bond(bond) * 2
        edge_index = _matrix(ends, 2).t()  # [2, 2 * num_bonds]
        edge_attr = _matrix(bonds, self.num_bond_features)  # [2 * num_bonds, ...]
        if self.sorts_edges:
            order = (edge_index[0] * molecule.GetNumAtoms() + edge_index[1]).argsort()
            edge_index, edge_attr = edge_index[:, order], edge_attr[order]
        return Data(
            x=_matrix(atoms, self.num_atom_features),  # [num_atoms, num_atom_features]
            edge_index=edge_index.contiguous(),
            edge_attr=edge_attr,
        )


def molecule_encoding(name: str) -> MoleculeEncoding:
    """Return the encoding of that name."""
    if name not in MOLECULE_ENCODINGS:
        raise DataError(
            f"mol_features: found {name!r}, expected one of {', '.join(MOLECULE_ENCODINGS)}"
        )
    return MOLECULE_ENCODINGS[name]()


def import_rdkit() -> tuple[Any, Any]:
    """Return RDKit's ``Chem`` and ``rdBase``; the error names the extra to install."""
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise MissingExtraError("smiles: data", extra="chem") from None
    return Chem, rdBase


def _matrix(values: Sequence[int], width: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64).reshape(-1, width))


def _numbered(values: Sequence[Any]) -> dict[Any, int]:
    return {value: number for number, value in enumerate(values)}


def _ogb() -> MoleculeEncoding:
    chem, _ = import_rdkit()
    chiral, hybrid, kinds, stereo = (
        chem.ChiralType,
        chem.HybridizationType,
        chem.BondType,
        chem.BondStereo,
    )
    # Whatever a table lacks gets the number after its last, OGB's "misc".
    element = _numbered(range(1, 119)).get
    chirality = _numbered(
        [
            chiral.CHI_UNSPECIFIED,
            chiral.CHI_TETRAHEDRAL_CW,
            chiral.CHI_TETRAHEDRAL_CCW,
            chiral.CHI_OTHER,
        ]
    ).get
    charge = _numbered(range(-5, 6)).get
    hybridization = _numbered([hybrid.SP, hybrid.SP2, hybrid.SP3, hybrid.SP3D, hybrid.SP3D2]).get
    bond_type = _numbered([kinds.SINGLE, kinds.DOUBLE, kinds.TRIPLE, kinds.AROMATIC]).get
    bond_stereo = _numbered(
        [
            stereo.STEREONONE,
            stereo.STEREOZ,
            stereo.STEREOE,
            stereo.STEREOCIS,
            stereo.STEREOTRANS,
            stereo.STEREOANY,
        ]
    )

    def encode_atom(atom: Any) -> tuple[int, ...]:
        return (
            element(atom.GetAtomicNum(), 118),
            chirality(atom.GetChiralTag(), 4),
            min(atom.GetTotalDegree(), 11),
            charge(atom.GetFormalCharge(), 11),
            min(atom.GetTotalNumHs(), 9),
            min(atom.GetNumRadicalElectrons(), 5),
            hybridization(atom.GetHybridization(), 5),
            atom.GetIsAromatic(),
            atom.IsInRing(),
        )

    def encode_bond(bond: Any) -> tuple[int, ...]:
        return (
            bond_type(bond.GetBondType(), 4),
            bond_stereo[bond.GetStereo()],
            bond.GetIsConjugated(),
        )

    return MoleculeEncoding("ogb", 9, 3, encode_atom, encode_bond)


def _pretrain() -> MoleculeEncoding:
    chem, _ = import_rdkit()
    chiral, kinds, directions = chem.ChiralType, chem.BondType, chem.BondDir
    element = _numbered(range(1, 119))
    # The published tables have three rows: there is none for CHI_OTHER.
    chirality = _numbered(
        [chiral.CHI_UNSPECIFIED, chiral.CHI_TETRAHEDRAL_CW, chiral.CHI_TETRAHEDRAL_CCW]
    )
    bond_type = _numbered([kinds.SINGLE, kinds.DOUBLE, kinds.TRIPLE, kinds.AROMATIC])
    direction = _numbered([directions.NONE, directions.ENDUPRIGHT, directions.ENDDOWNRIGHT])

    def encode_atom(atom: Any) -> tuple[int, ...]:
        return element[atom.GetAtomicNum()], chirality[atom.GetChiralTag()]

    def encode_bond(bond: Any) -> tuple[int, ...]:
        return bond_type[bond.GetBondType()], direction[bond.GetBondDir()]

    return MoleculeEncoding("pretrain", 2, 2, encode_atom, encode_bond)


def _pyg() -> MoleculeEncoding:
    import_rdkit()
    atoms = {name: _numbered(values) for name, values in x_map.items()}
    bonds = {name: _numbered(values) for name, values in e_map.items()}

    def encode_atom(atom: Any) -> tuple[int, ...]:
        return (
            atoms["atomic_num"][atom.GetAtomicNum()],
            atoms["chirality"][str(atom.GetChiralTag())],
            atoms["degree"][atom.GetTotalDegree()],
            atoms["formal_charge"][atom.GetFormalCharge()],
            atoms["num_hs"][atom.GetTotalNumHs()],
            atoms["num_radical_electrons"][atom.GetNumRadicalElectrons()],
            atoms["hybridization"][str(atom.GetHybridization())],
            atom.GetIsAromatic(),
            atom.IsInRing(),
        )

    def encode_bond(bond: Any) -> tuple[int, ...]:
        return (
            bonds["bond_type"][str(bond.GetBondType())],
            bonds["stereo"][str(bond.GetStereo())],
            bond.GetIsConjugated(),
        )

    return MoleculeEncoding("pyg", 9, 3, encode_atom, encode_bond, sorts_edges=True)


#: Name -> encoding, built on first use: the tables need RDKit.
MOLECULE_ENCODINGS: dict[str, Callable[[], MoleculeEncoding]] = {
    "ogb": _ogb,
    "pretrain": _pretrain,
    "pyg": _pyg,
}


# --- rows of SMILES

#: Why most rows that give no graph do not.
UNREADABLE = "RDKit cannot read the SMILES"


class SmilesRows:
    """A column of SMILES, whose rows are read in any process."""

    def __init__(self, smiles: Sequence[str], features: str) -> None:
        self._smiles = smiles if isinstance(smiles, TextColumn) else TextColumn(smiles)
        self._features = features

    def __len__(self) -> int:
        return len(self._smiles)

    def key(self, start: int, stop: int) -> str:
        """Return a hash of the text, the encoding, and the version of what reads them."""
        _, rd_base = import_rdkit()
        digest = hashlib.sha256(f"smiles {self._features} {rd_base.rdkitVersion}".encode())
        self._smiles.update_digest(digest, start, stop)
        return digest.hexdigest()

    def graphs(self, start: int, stop: int, notes: Counter[str]) -> Iterator[Data | str]:
        """Yield the graph of each row, or why it has none."""
        yield from molecule_graphs(self._smiles[start:stop], molecule_encoding(self._features))

    def release(self) -> None:
        """Hold nothing that processes cannot share."""


def molecule_graphs(smiles: Iterable[str], encoding: MoleculeEncoding) -> Iterator[Data | str]:
    """Yield the graph of each molecule, or why it has none."""
    chem, rd_base = import_rdkit()
    with rd_base.BlockLogs():
        for text in smiles:
            molecule = chem.MolFromSmiles(text)
            if molecule is None or not molecule.GetNumAtoms():
                yield UNREADABLE if text else "no SMILES"
                continue
            try:
                yield encoding.graph(molecule)
            except KeyError as error:
                value = error.args[0]
                what = f"atomic number {value}" if type(value) is int else f"{value}"
                yield f"no {encoding.name} feature for {what}"
