"""``smiles:file.csv``: the molecules of a table as graphs, with any of its columns as targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from ..errors import DataError
from .dataset import GraphDataset, SourceTable, as_links
from .molecule_features import (
    MOLECULE_ENCODINGS,
    UNREADABLE,
    MoleculeEncoding,
    SmilesRows,
    molecule_encoding,
    molecule_graphs,
)
from .row_blocks import StreamedGraphs
from .spec import (
    LEVEL_ARGS,
    STREAM_ARGS,
    Reading,
    as_choice,
    check_names,
    is_streamed,
    level_options,
)
from .streaming import read_rows
from .tables import SelectedRows, Table, read_table

#: Names of columns that number or name the rows, compared in lower case and without punctuation.
_ID_COLUMNS = ("molid", "moleculeid", "compoundid", "id", "name", "num", "index", "idx", "unnamed0")

#: Names of columns that hold what chemists call a molecule, compared in the same way.
_NAME_COLUMNS = ("name", "compoundname", "compoundid", "moleculename", "drugname", "drug", "title")

#: How many columns or names a message shows before it stops.
_SHOWN = 5

#: How many skipped rows are listed: all of them, unless the file is no table of molecules.
_LISTED = 200

#: A column of whole numbers that only ever grow counts the rows, unless there are this few.
_MIN_COUNTED_ROWS = 10


def load_smiles(
    path: Path, args: Mapping[str, Any], reading: Reading | None = None
) -> GraphDataset:
    """Read a csv file with a column of SMILES and return a graph for each molecule in it.

    ``args``: ``smiles`` names the SMILES column (default: the one called that), ``targets`` the
    target columns (names or globs, separated by commas; empty for none; default: see
    :func:`choose_targets`), ``mol_features`` the encoding (``ogb``, ``pretrain`` or ``pyg``). A
    blank cell is a missing label. A row that cannot be turned into a graph is skipped and noted.
    ``stream`` says whether graphs stay on disk (see :mod:`.streaming`); those of many rows do.
    """
    spec = f"smiles:{path}"
    check_names(args, ("smiles", "targets", "mol_features", *STREAM_ARGS, *LEVEL_ARGS), spec=spec)
    table = read_table(path)
    smiles_column = _smiles_column(table, args.get("smiles"))
    return read_molecules(
        table,
        args,
        spec=spec,
        smiles_column=smiles_column,
        targets=_names(args.get("targets")),
        reading=reading,
    )


def read_molecules(
    table: Table,
    args: Mapping[str, Any],
    *,
    spec: str,
    smiles_column: str,
    targets: str | Sequence[str] | None,
    reading: Reading | None = None,
) -> GraphDataset:
    """Return a graph for each molecule of a table; see :func:`load_smiles`."""
    wanted = level_options(args, own="graph", spec=spec)
    features = as_choice(args, "mol_features", MOLECULE_ENCODINGS, default="ogb", spec=spec)
    labels, notes = choose_targets(table, smiles_column, targets)
    smiles = table.column(smiles_column)
    encoding = molecule_encoding(features)
    graphs: Sequence[Data]
    if wanted["level"] != "link" and is_streamed(table.num_rows, args, spec=spec):
        graphs = kept = read_rows(SmilesRows(smiles, features), reading, spec=spec)
        rows, problems = kept.rows, kept.skipped
    else:
        graphs, rows, problems = encode(smiles, encoding)
    notes += _skipped(problems, smiles)
    if not graphs:
        raise DataError(f"{spec}: found no molecule RDKit can read in column {smiles_column!r}")
    if labels:
        values = np.stack(list(labels.values()), axis=1)  # [num_rows, num_targets]
        attach_labels(graphs, values[rows])
    dataset = GraphDataset(
        spec=spec,
        graphs=graphs,
        ids=row_ids(table, rows),
        level="graph",
        target_names=list(labels),
        rows=rows,
        smiles=SelectedRows(rows, smiles),
        names=_called(table, rows),
        table=SourceTable(table.header, table.columns, problems),
        notes=notes,
    )
    return as_links(dataset, wanted["links"]) if wanted["level"] == "link" else dataset


def attach_labels(graphs: Sequence[Data], labels: np.ndarray) -> None:
    """Give each graph its row of ``labels [num_graphs, num_targets]`` as ``y``.

    Whole numbers without a gap are stored as int64, as classes are; anything else as float32.
    """
    whole = not np.isnan(labels).any() and bool((labels == np.round(labels)).all())
    values = torch.from_numpy(labels).to(torch.int64 if whole else torch.float32)
    if isinstance(graphs, StreamedGraphs):
        graphs.y = values
        return
    for graph, row in zip(graphs, values, strict=True):
        graph.y = row.clone() if len(row) == 1 else row[None].clone()  # [1] or [1, num_targets]


def choose_targets(
    table: Table, smiles_column: str, wanted: str | Sequence[str] | None
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the target columns by name, and a note where they were guessed.

    Without ``wanted`` it is the only column of numbers (other than a count of the rows), or all of
    them when each is 0/1. Any other choice is the user's: descriptors often stand beside targets.
    """
    others = [name for name in table.header if name != smiles_column]
    if wanted is not None:
        return _wanted_targets(table, others, wanted), []
    columns = {
        name: numbers
        for name in others
        if (numbers := table.numbers(name)) is not None
        and not np.isnan(numbers).all()
        and not _counts_rows(name, numbers)
    }
    if not columns:
        return {}, [f"{table.path.name}: no column of numbers, so no labels"]
    all_binary = all(
        np.isin(numbers[~np.isnan(numbers)], (0, 1)).all() for numbers in columns.values()
    )
    if len(columns) > 1 and not all_binary:
        raise DataError(
            f"{table.path}: found {len(columns)} columns that could be targets "
            f"({_some(list(columns))}), expected a choice: targets=NAME,... (globs allowed, "
            "targets= for none)",
            details="columns of numbers:\n" + "\n".join(f"  {name}" for name in columns),
        )
    return columns, [f"targets: {_some(list(columns))} (guessed; targets=NAME,... to choose)"]


def _wanted_targets(
    table: Table, columns: Sequence[str], wanted: str | Sequence[str]
) -> dict[str, np.ndarray]:
    if isinstance(wanted, str):
        # A column's own name may have a comma in it.
        wanted = [wanted] if wanted in columns else wanted.split(",")
    chosen: dict[str, np.ndarray] = {}
    for pattern in filter(None, (str(name).strip() for name in wanted)):
        named = pattern in columns
        matching = [pattern] if named else [name for name in columns if fnmatchcase(name, pattern)]
        found = {name: numbers for name in matching if (numbers := table.numbers(name)) is not None}
        if not found:
            problem = "has cells that are not numbers" if named else "matches no column of numbers"
            raise DataError(
                f"{table.path}: target {pattern!r} {problem}, expected some of {_some(columns)}",
                details="columns:\n" + "\n".join(f"  {name}" for name in columns),
            )
        chosen |= found
    return chosen


def _counts_rows(name: str, numbers: np.ndarray) -> bool:
    """Whether a column of numbers is an index of the rows, by its name or its values."""
    ascending = bool((np.diff(numbers) > 0).all() and (numbers == np.round(numbers)).all())
    return ascending and (_plain(name) in _ID_COLUMNS or len(numbers) >= _MIN_COUNTED_ROWS)


def _smiles_column(table: Table, wanted: object) -> str:
    if wanted is not None and str(wanted) in table.header:
        return str(wanted)
    sought = "smiles" if wanted is None else str(wanted)
    matching = [name for name in table.header if name.lower() == sought.lower()]
    if len(matching) != 1:
        raise DataError(
            f"{table.path}: found {len(matching) or 'no'} columns called {sought!r}, expected one "
            f"of {_some(table.header)}: name it with smiles=COLUMN"
        )
    return matching[0]


def row_ids(table: Table, rows: np.ndarray) -> Sequence[str]:
    """Return the cells of a naming column where they are unique, else the row numbers."""
    plain = {_plain(name): name for name in table.header}
    for name in _ID_COLUMNS:
        if name in plain:
            ids = SelectedRows(rows, table.column(plain[name]))
            if all(ids) and len(set(ids)) == len(ids):
                return ids
    return SelectedRows(rows)


def _called(table: Table, rows: np.ndarray) -> Sequence[str] | None:
    """Return the cells of the column of names, if the table has one."""
    plain = {_plain(name): name for name in reversed(table.header)}
    found = next((plain[name] for name in _NAME_COLUMNS if name in plain), None)
    return None if found is None else SelectedRows(rows, table.column(found))


def encode(
    smiles: Sequence[str], encoding: MoleculeEncoding
) -> tuple[list[Data], np.ndarray, dict[int, str]]:
    """Return a graph per readable molecule, the row of each, and why other rows have none."""
    graphs: list[Data] = []
    rows: list[int] = []
    problems: dict[int, str] = {}
    for row, made in enumerate(molecule_graphs(smiles, encoding)):
        if isinstance(made, str):
            problems[row] = made
        else:
            graphs.append(made)
            rows.append(row)
    return graphs, np.array(rows, dtype=np.int64), problems


def _skipped(problems: Mapping[int, str], smiles: Sequence[str]) -> list[str]:
    """Return notes on the rows that gave no graph."""
    unreadable, unknown = [], []
    for row, problem in problems.items():
        named = f"row {row} {_short(smiles[row])}"
        if problem in (UNREADABLE, "no SMILES"):
            unreadable.append(named)
        else:
            unknown.append(f"{named} ({problem})")
    return [
        f"{len(skipped)} of {len(smiles)} rows skipped, {reason}: {_some(skipped, _LISTED)} "
        "(rows count from 0, below the header)"
        for skipped, reason in (
            (unreadable, "RDKit cannot read their SMILES"),
            (unknown, "an atom or bond has no such feature"),
        )
        if skipped
    ]


def args_for_prediction(
    path: Path, trained: Mapping[str, Any], targets: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments with which a table is read to predict its rows.

    Its labels are those that the head predicts, if it has them all; any other column of numbers is
    none. The column of SMILES is called as it was in training, if there is one of that name.
    """
    table = read_table(path)
    known = all(name in table.header and table.numbers(name) is not None for name in targets)
    args: dict[str, Any] = {"targets": list(targets) if known else ""}
    if trained.get("smiles") in table.header:
        args["smiles"] = trained["smiles"]
    return args


def _names(value: Any) -> str | Sequence[str] | None:
    """Return column names as text: a column may be called 1, which arrives as a number."""
    if value is None or isinstance(value, str):
        return value
    return [str(name) for name in value] if isinstance(value, list | tuple) else str(value)


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _some(items: Sequence[str], shown: int = _SHOWN) -> str:
    return ", ".join(items[:shown]) + (", ..." if len(items) > shown else "")


def _short(smiles: str) -> str:
    return f"{smiles[:40]}..." if len(smiles) > 43 else smiles or "(blank)"
