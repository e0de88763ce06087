"""Molecules as graphs: ``smiles:file.csv``, with any of the table's columns as targets.

Atoms and bonds become integers, as published checkpoints were trained on them. ``ogb``: 9 per atom,
3 per bond, as ``ogb.utils.smiles2graph`` gives them. ``pretrain``: 2 and 2, as the pretrain-gnns
family (Hu et al., "Strategies for Pre-training Graph Neural Networks") does. ``pyg``: 9 and 3 other
ones, as ``torch_geometric.utils.from_smiles`` gives them. Each bond is two directed edges, one
after the other, in RDKit's order of bonds; PyG sorts them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils.smiles import from_rdmol

from ..errors import DataError, MissingExtraError
from ..utils.text import listed
from .dataset import GraphDataset, as_links
from .labels import attach_labels, label_tensor
from .spec import (
    LEVEL_ARGS,
    STREAM_ARGS,
    OnProgress,
    Reading,
    as_bool,
    as_choice,
    check_names,
    level_options,
)
from .streaming import read_rows, sampled_rows, stays_on_disk
from .tables import (
    SelectedRows,
    Table,
    TextColumn,
    choose_targets,
    find_smiles,
    read_table,
    row_ids,
    row_names,
)

#: How many skipped rows are listed: all of them, unless the table is not one of molecules.
_LISTED = 200


def load_smiles(
    path: Path, args: Mapping[str, Any], reading: Reading | None = None
) -> GraphDataset:
    """Read a csv file with a column of SMILES and return a graph for each molecule in it.

    ``args``: ``smiles`` names the SMILES column (default: the one called that), ``targets`` the
    target columns (names or globs, separated by commas; empty for none; default: see
    :func:`choose_targets`), ``mol_features`` the encoding (``ogb``, ``pretrain`` or ``pyg``). A
    blank cell is a missing label. A row that cannot be turned into a graph is skipped and noted.
    ``stream`` decides whether graphs stay on disk (see :mod:`.streaming`); those of many rows do.
    """
    spec = f"smiles:{path}"
    check_names(args, ("smiles", "targets", "mol_features", *STREAM_ARGS, *LEVEL_ARGS), spec=spec)
    table = read_table(path)
    return read_molecules(
        table,
        args,
        spec=spec,
        smiles_column=find_smiles(table, args.get("smiles")),
        targets=args.get("targets"),
        reading=reading,
    )


def read_molecules(
    table: Table,
    args: Mapping[str, Any],
    *,
    spec: str,
    smiles_column: str,
    targets: Any,
    reading: Reading | None = None,
) -> GraphDataset:
    """Return a graph for each molecule of a table; see :func:`load_smiles`."""
    wanted = level_options(args, own="graph", spec=spec)
    features = as_choice(args, "mol_features", MOLECULE_ENCODINGS, default="ogb", spec=spec)
    stream = as_bool(args, "stream", default=None, spec=spec)
    reading = reading or Reading()
    molecules = MoleculeTable(table, spec, smiles_column, features, targets, reading)
    if wanted["level"] != "link" and stays_on_disk(table.num_rows, stream):
        return molecules.sample if reading.sampled else molecules.read()
    dataset = molecules.encoded(range(table.num_rows))
    return as_links(dataset, wanted["links"]) if wanted["level"] == "link" else dataset


class MoleculeTable:
    """A table of molecules, of which any rows can become graphs."""

    def __init__(
        self, table: Table, spec: str, column: str, features: str, targets: Any, reading: Reading
    ) -> None:
        self._table, self._spec, self._column = table, spec, column
        self._features, self._reading = features, reading
        columns, self._notes = choose_targets(table, column, targets)
        self._targets = list(columns)
        #: Of every row, NaN where missing: ``[num_rows, num_targets]``.
        self._labels = np.empty((table.num_rows, 0))
        if columns:
            self._labels = np.stack(list(columns.values()), axis=1)
        self._smiles = table.column(column)
        self._rows = SmilesRows(self._smiles, features)

    @cached_property
    def key(self) -> str:
        """A hash of what determines the graphs, their labels and their ids."""
        digest = hashlib.sha256(self._rows.key(range(len(self._rows))).encode())
        digest.update(self._labels.tobytes())
        for name in self._ids:
            digest.update(name.encode() + b"\0")
        return digest.hexdigest()

    def labels(self) -> np.ndarray:
        """Return the labels of every row, ``[num_rows, num_targets]``."""
        return self._labels

    def num_nodes(self) -> np.ndarray:
        """Estimate the nodes of each row from the length of its text, int64 ``[num_rows]``."""
        lengths = np.fromiter(map(len, self._smiles), np.int64, len(self._rows))
        ratio = self.sample.num_nodes.sum() / lengths[self.sample.rows].sum()
        return np.rint(lengths * ratio).astype(np.int64)

    @cached_property
    def _ids(self) -> SelectedRows:
        return row_ids(self._table, np.arange(len(self._rows)))

    @cached_property
    def sample(self) -> GraphDataset:
        """The graphs of a few rows, spread over the table."""
        found = self.encoded(sampled_rows(len(self._rows)).tolist())
        return replace(found, source=self, notes=list(self._notes))

    def encoded(self, rows: Sequence[int]) -> GraphDataset:
        """Return the graphs of some rows, in memory."""
        graphs, places, problems = encode([self._smiles[row] for row in rows], self._features)
        kept = np.array(rows, dtype=np.int64)[places]
        if self._targets:
            attach_labels(graphs, label_tensor(self._labels[kept]))  # [num_graphs, num_targets]
        problems = {rows[at]: why for at, why in problems.items()}
        return self._dataset(graphs, kept, problems)

    def read(
        self, rows: Sequence[range] | None = None, on_progress: OnProgress = None
    ) -> GraphDataset:
        """Return the graphs of these rows, some of their neighbours, or all; they stay on disk."""
        graphs = read_rows(
            self._rows, self._reading, spec=self._spec, wanted=rows, on_progress=on_progress
        )
        if self._targets:
            graphs.y = label_tensor(self._labels[graphs.rows])  # [num_graphs, num_targets]
        return replace(self._dataset(graphs, graphs.rows, graphs.skipped), source=self)

    def _dataset(
        self, graphs: Sequence[Data], rows: np.ndarray, problems: Mapping[int, str]
    ) -> GraphDataset:
        in_memory, num_rows = isinstance(graphs, list), len(graphs) + len(problems)
        if not graphs and (in_memory or num_rows == len(self._rows)):  # else a job's part may
            column = f"column {self._column!r}, in {num_rows} rows"
            raise DataError(f"{self._spec}: found no molecule RDKit can read in {column}")
        # Whether a column has ids is decided by all rows: a job does not see those of others.
        ids = row_ids(self._table, rows) if in_memory else SelectedRows(rows, self._ids.column)
        return GraphDataset(
            spec=self._spec,
            graphs=graphs,
            ids=ids,
            level="graph",
            target_names=self._targets,
            rows=rows,
            smiles=SelectedRows(rows, self._smiles),
            names=row_names(self._table, rows),
            table=replace(self._table, problems=problems),
            notes=[*self._notes, *_skipped(problems, self._smiles, num_rows)],
        )


def encode(smiles: Sequence[str], features: str) -> tuple[list[Data], np.ndarray, dict[int, str]]:
    """Return a graph per readable molecule, the row of each, and why other rows have none."""
    graphs: list[Data] = []
    rows: list[int] = []
    problems: dict[int, str] = {}
    for row, made in enumerate(molecule_graphs(smiles, features)):
        if isinstance(made, str):
            problems[row] = made
        else:
            graphs.append(made)
            rows.append(row)
    return graphs, np.array(rows, dtype=np.int64), problems


def _skipped(problems: Mapping[int, str], smiles: Sequence[str], num_rows: int) -> list[str]:
    """Return notes on the rows without a graph, of so many that were read."""
    unreadable, unknown = [], []
    for row, problem in problems.items():
        named = f"row {row} {_short(smiles[row])}"
        if problem in (UNREADABLE, "no SMILES"):
            unreadable.append(named)
        else:
            unknown.append(f"{named} ({problem})")
    return [
        f"{len(skipped)} of {num_rows} rows without a graph, {reason}: "
        f"{listed(skipped, _LISTED)} (rows count from 0, below the header)"
        for skipped, reason in (
            (unreadable, "RDKit cannot read their SMILES"),
            (unknown, "an atom or bond has no such feature"),
        )
        if skipped
    ]


def _short(smiles: str) -> str:
    return f"{smiles[:40]}..." if len(smiles) > 43 else smiles or "(blank)"


# --- encodings

#: A molecule of RDKit -> a graph of integer features.
Encoding = Callable[[Any], Data]

#: One atom or bond of RDKit (which has no types of its own) -> its integers.
Encoder = Callable[[Any], tuple[int, ...]]


@dataclass(frozen=True)
class IntegerFeatures:
    """How a molecule becomes a graph; an unknown atom or bond raises KeyError."""

    num_atom_features: int
    num_bond_features: int
    encode_atom: Encoder
    encode_bond: Encoder

    def __call__(self, molecule: Any) -> Data:
        """Return the molecule as a graph of integer features."""
        # By index, as GetAtoms() checks the size at every step; into flat lists, as one tuple per
        # atom would trigger the garbage collector again and again.
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
        return Data(
            x=_matrix(atoms, self.num_atom_features),  # [num_atoms, num_atom_features]
            edge_index=edge_index.contiguous(),
            edge_attr=edge_attr,
        )


def import_rdkit() -> tuple[Any, Any]:
    """Return RDKit's ``Chem`` and ``rdBase``; the error names the extra to install."""
    try:
        from rdkit import Chem, rdBase
    except ImportError:
        raise MissingExtraError("smiles: data", extra="chem") from None
    return Chem, rdBase


def _matrix(values: Sequence[int], width: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64).reshape(-1, width))


def _numbered(values: Iterable[Any]) -> dict[Any, int]:
    return {value: number for number, value in enumerate(values)}


def _members(enumeration: Any, names: str) -> dict[Any, int]:
    """Number some members of one of RDKit's enumerations."""
    return _numbered(getattr(enumeration, name) for name in names.split())


_BOND_TYPES = "SINGLE DOUBLE TRIPLE AROMATIC"
_CHIRALITY = "CHI_UNSPECIFIED CHI_TETRAHEDRAL_CW CHI_TETRAHEDRAL_CCW"


def _ogb() -> Encoding:
    chem, _ = import_rdkit()
    # Anything missing from a table gets the number after its last, OGB's "misc".
    element = _numbered(range(1, 119)).get
    chirality = _members(chem.ChiralType, f"{_CHIRALITY} CHI_OTHER").get
    charge = _numbered(range(-5, 6)).get
    hybridization = _members(chem.HybridizationType, "SP SP2 SP3 SP3D SP3D2").get
    bond_type = _members(chem.BondType, _BOND_TYPES).get
    stereo = _members(chem.BondStereo, "STEREONONE STEREOZ STEREOE STEREOCIS STEREOTRANS STEREOANY")

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
            stereo[bond.GetStereo()],
            bond.GetIsConjugated(),
        )

    return IntegerFeatures(9, 3, encode_atom, encode_bond)


def _pretrain() -> Encoding:
    chem, _ = import_rdkit()
    element = _numbered(range(1, 119))
    # The published tables have three rows: there is none for CHI_OTHER.
    chirality = _members(chem.ChiralType, _CHIRALITY)
    bond_type = _members(chem.BondType, _BOND_TYPES)
    direction = _members(chem.BondDir, "NONE ENDUPRIGHT ENDDOWNRIGHT")

    def encode_atom(atom: Any) -> tuple[int, ...]:
        return element[atom.GetAtomicNum()], chirality[atom.GetChiralTag()]

    def encode_bond(bond: Any) -> tuple[int, ...]:
        return bond_type[bond.GetBondType()], direction[bond.GetBondDir()]

    return IntegerFeatures(2, 2, encode_atom, encode_bond)


#: Name -> encoding, built on first use: the tables need RDKit.
MOLECULE_ENCODINGS: dict[str, Callable[[], Encoding]] = {
    "ogb": _ogb,
    "pretrain": _pretrain,
    "pyg": lambda: from_rdmol,
}


# --- rows of SMILES

#: Why most rows that give no graph do not.
UNREADABLE = "RDKit cannot read the SMILES"


class SmilesRows:
    """A column of SMILES as a source of rows."""

    def __init__(self, smiles: Sequence[str], features: str) -> None:
        self._smiles = smiles if isinstance(smiles, TextColumn) else TextColumn(smiles)
        self._features = features

    def __len__(self) -> int:
        return len(self._smiles)

    def key(self, rows: range) -> str:
        """Return a hash of the text, the encoding, and the version of RDKit."""
        _, rd_base = import_rdkit()
        digest = hashlib.sha256(f"smiles {self._features} {rd_base.rdkitVersion}".encode())
        self._smiles.update_digest(digest, rows)
        return digest.hexdigest()

    def graphs(self, rows: range, notes: Counter[str]) -> Iterator[Data | str]:
        """Yield the graph of each row, or why it has none."""
        yield from molecule_graphs(self._smiles[rows.start : rows.stop], self._features)

    def release(self) -> None:
        """Do nothing: text can be shared."""


def molecule_graphs(smiles: Iterable[str], features: str) -> Iterator[Data | str]:
    """Yield the graph of each molecule in one of the encodings, or why it has none."""
    chem, rd_base = import_rdkit()
    encoding = MOLECULE_ENCODINGS[features]()
    with rd_base.BlockLogs():
        for text in smiles:
            molecule = chem.MolFromSmiles(text)
            if molecule is None or not molecule.GetNumAtoms():
                yield UNREADABLE if text else "no SMILES"
                continue
            try:
                yield encoding(molecule)
            except (KeyError, ValueError) as error:  # the latter by PyG
                value = error.args[0]
                what = f"atomic number {value}" if type(value) is int else f"{value}"
                yield f"no {features} feature for {what}"
