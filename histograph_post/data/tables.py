"""Tables of molecules: csv, Parquet and Arrow files as columns of text, and what the columns are.

A table may have millions of rows, and a Python string takes 50 bytes before its first character,
so a column is stored as one buffer of text. Parquet and Arrow files, such as Hugging Face's
``datasets`` writes, are read batch by batch with pyarrow (extra ``arrow``).
"""

from __future__ import annotations

import csv
import gzip
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TextIO, overload

import numpy as np

from ..errors import DataError, MissingExtraError, NotFoundError
from ..utils.text import first_line, listed

#: Suffixes of tables that pyarrow reads.
_ARROW_FILES = (".parquet", ".arrow", ".feather")

_LONGEST_LINE = 2**24


class _Cells(Sequence[str]):
    """Cells that are decoded when they are indexed."""

    __hash__ = None  # type: ignore[assignment]

    @abstractmethod
    def _cell(self, at: int) -> str: ...

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        places = range(len(self))[index]
        return self._cell(places) if isinstance(places, int) else list(map(self._cell, places))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)


class TextColumn(_Cells):
    """A column: its cells in UTF-8, concatenated."""

    def __init__(self, cells: Sequence[str] = ()) -> None:
        self._contents = bytearray()
        #: Where each cell ends.
        self._ends = array("q")
        for cell in cells:
            self.append(cell)

    def append(self, cell: str) -> None:
        """Add a cell."""
        self._contents += cell.encode()
        self._ends.append(len(self._contents))

    def __len__(self) -> int:
        return len(self._ends)

    def _cell(self, at: int) -> str:
        begin = self._ends[at - 1] if at else 0
        return self._contents[begin : self._ends[at]].decode()

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for end in self._ends:
            yield self._contents[begin:end].decode()
            begin = end

    def update_digest(self, digest: Any, rows: range) -> None:
        """Hash the cells of consecutive rows, and where each ends."""
        begin = self._ends[rows.start - 1] if rows.start else 0
        ends = np.array(self._ends[rows.start : rows.stop], dtype="<i8") - begin
        digest.update(ends.tobytes())
        digest.update(self._contents[begin : self._ends[rows.stop - 1]])


class SelectedRows(_Cells):
    """Some rows of a column.

    Args:
        rows: Their numbers: int64 ``[selected]``.
        column: The cells; None for the row numbers themselves.
    """

    def __init__(self, rows: np.ndarray, column: Sequence[str] | None = None) -> None:
        self.rows = rows
        self.column = column

    def __len__(self) -> int:
        return len(self.rows)

    def _cell(self, at: int) -> str:
        row = int(self.rows[at])
        return str(row) if self.column is None else self.column[row]


def is_row_numbers(names: Sequence[str]) -> bool:
    """Whether these are row numbers, which are unique."""
    return isinstance(names, SelectedRows) and names.column is None


@dataclass(frozen=True)
class Table:
    """A file's header and, for each column, the text of every row."""

    path: Path
    header: tuple[str, ...]
    columns: tuple[Sequence[str], ...]
    #: Row number -> why the row gave no graph.
    problems: Mapping[int, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of rows below the header."""
        return len(self.columns[0])

    def column(self, name: str) -> Sequence[str]:
        """Return the cells of the column with this name."""
        return self.columns[self.header.index(name)]

    def numbers(self, name: str) -> np.ndarray | None:
        """Return a column as float64, NaN where blank; None when a cell is not a finite number."""
        values = self._floats(name)
        return None if values is None or np.isinf(values).any() else values

    def labels(self, name: str) -> np.ndarray | None:
        """Return a column as :meth:`numbers` does, but refuse one with an infinite number."""
        values = self._floats(name)
        for row in np.flatnonzero(np.isinf(values))[:1] if values is not None else ():
            raise DataError(
                f"{self.path}: column {name!r}: found {self.column(name)[row]!r} in row {row + 1}, "
                "expected finite numbers or blank cells (other columns: targets=NAME)"
            )
        return values

    def _floats(self, name: str) -> np.ndarray | None:
        cells = self.column(name)
        try:
            return np.fromiter((float(cell) if cell else np.nan for cell in cells), np.float64)
        except ValueError:
            return None


def read_table(path: Path) -> Table:
    """Read a csv file (gzipped or not) with a header, or a Parquet or Arrow file.

    Cells are stripped of white space.
    """
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    header, columns = (_read_arrow if path.suffix in _ARROW_FILES else _read_csv)(path)
    if not columns or not len(columns[0]):
        raise DataError(f"{path}: found no rows, expected a header and at least one row")
    repeated = {name for name in header if header.count(name) > 1}
    if repeated:
        raise DataError(f"{path}: found column {min(repeated)!r} more than once")
    return Table(path, header, columns)


def _read_csv(path: Path) -> tuple[tuple[str, ...], tuple[TextColumn, ...]]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        # utf-8-sig: spreadsheets put a byte order mark before the first column's name.
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(_lines(file, path))
            header = tuple(cell.strip() for cell in next(reader, ()))
            columns = tuple(TextColumn() for _ in header)
            for row in reader:
                if row and len(row) != len(header):
                    raise DataError(
                        f"{path}: line {reader.line_num}: found {len(row)} cells, expected "
                        f"{len(header)} as in the header"
                    )
                for column, cell in zip(columns, row, strict=False):  # a blank line has none
                    column.append(cell.strip())
    except (csv.Error, gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable csv file ({error})") from None
    return header, columns


def _lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yield the lines of a file; an endless one, which fits in a small archive, is refused."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(("\r", "\n")):
            raise DataError(
                f"{path}: found a line of more than {_LONGEST_LINE} characters, expected a csv file"
            )
        yield line


def _read_arrow(path: Path) -> tuple[tuple[str, ...], tuple[TextColumn, ...]]:
    """Return the columns of text and numbers; others are skipped."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet, types
    except ImportError:
        raise MissingExtraError(f"{path}: a table of Parquet or Arrow", extra="arrow") from None
    batches: Iterable[Any]
    try:
        with pyarrow.memory_map(str(path)) as file:
            if path.suffix == ".parquet":
                table = parquet.ParquetFile(file)
                schema, batches = table.schema_arrow, table.iter_batches()
            elif file.read(6) == b"ARROW1":
                table = ipc.open_file(file)
                schema = table.schema
                batches = map(table.get_batch, range(table.num_record_batches))
            else:  # a stream, as Hugging Face's datasets stores it
                file.seek(0)
                batches = table = ipc.open_stream(file)
                schema = table.schema
            names = tuple(
                field.name
                for field in schema
                if not (types.is_nested(field.type) or types.is_binary(field.type))
            )
            columns = tuple(TextColumn() for _ in names)
            for batch in batches:
                for column, name in zip(columns, names, strict=True):
                    for value in batch.column(name).to_pylist():
                        column.append(_arrow_cell(value))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a readable table ({first_line(error)})") from None
    return names, columns


def _arrow_cell(value: Any) -> str:
    """Return a value as it would be in a csv file."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()


# --- what the columns are

#: Names of columns of row ids, compared in lower case and without punctuation.
_ID_COLUMNS = ("molid", "moleculeid", "compoundid", "id", "name", "num", "index", "idx", "unnamed0")

#: Names of columns of molecule names, compared in the same way.
_NAME_COLUMNS = ("name", "compoundname", "compoundid", "moleculename", "drugname", "drug", "title")

#: From so many rows on, a column of rising integers is taken for a count of the rows.
_MIN_COUNTED_ROWS = 10


def find_smiles(table: Table, wanted: object) -> str:
    """Return the name of the column of SMILES."""
    if wanted is not None and str(wanted) in table.header:
        return str(wanted)
    sought = "smiles" if wanted is None else str(wanted)
    matching = [name for name in table.header if name.lower() == sought.lower()]
    if len(matching) != 1:
        raise DataError(
            f"{table.path}: found {len(matching) or 'no'} columns called {sought!r}, expected one "
            f"of {listed(table.header)}: name it with smiles=COLUMN"
        )
    return matching[0]


def choose_targets(
    table: Table, smiles_column: str, wanted: Any
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return the target columns by name, and a note where they were guessed.

    ``wanted`` is a list of names, or text in which commas separate them. Without it, the target is
    the only column of numbers (other than a count of the rows), or all of them when each is 0/1.
    Any other choice is the user's: tables often have descriptors beside targets.
    """
    others = [name for name in table.header if name != smiles_column]
    if wanted is not None:
        return _wanted_targets(table, others, wanted), []
    columns = {
        name: numbers
        for name in others
        if (numbers := table.labels(name)) is not None
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
            f"({listed(list(columns))}), expected a choice: targets=NAME,... (globs allowed, "
            "targets= for none)",
            details="columns of numbers:\n" + "\n".join(f"  {name}" for name in columns),
        )
    return columns, [f"targets: {listed(list(columns))} (guessed; targets=NAME,... to choose)"]


def _wanted_targets(table: Table, columns: Sequence[str], wanted: Any) -> dict[str, np.ndarray]:
    if not isinstance(wanted, list | tuple):
        # A column's own name may be a number, or have a comma in it.
        name = str(wanted)
        wanted = [name] if name in columns else name.split(",")
    chosen: dict[str, np.ndarray] = {}
    for pattern in filter(None, (str(name).strip() for name in wanted)):
        named = pattern in columns
        matching = [pattern] if named else [name for name in columns if fnmatchcase(name, pattern)]
        found = {name: numbers for name in matching if (numbers := table.labels(name)) is not None}
        if not found:
            problem = "has cells that are not numbers" if named else "matches no column of numbers"
            raise DataError(
                f"{table.path}: target {pattern!r} {problem}, expected some of {listed(columns)}",
                details="columns:\n" + "\n".join(f"  {name}" for name in columns),
            )
        chosen |= found
    return chosen


def _counts_rows(name: str, numbers: np.ndarray) -> bool:
    """Whether a column of numbers is an index of the rows, by its name or its values."""
    ascending = bool((np.diff(numbers) > 0).all() and (numbers == np.round(numbers)).all())
    return ascending and (_plain(name) in _ID_COLUMNS or len(numbers) >= _MIN_COUNTED_ROWS)


def row_ids(table: Table, rows: np.ndarray) -> SelectedRows:
    """Return the cells of a column of ids if they are unique, else the row numbers."""
    plain = {_plain(name): name for name in table.header}
    for name in _ID_COLUMNS:
        if name in plain:
            ids = SelectedRows(rows, table.column(plain[name]))
            if all(ids) and len(set(ids)) == len(ids):
                return ids
    return SelectedRows(rows)


def row_names(table: Table, rows: np.ndarray) -> Sequence[str] | None:
    """Return the cells of the column of names, if the table has one."""
    plain = {_plain(name): name for name in reversed(table.header)}
    found = next((plain[name] for name in _NAME_COLUMNS if name in plain), None)
    return None if found is None else SelectedRows(rows, table.column(found))


def args_for_prediction(
    path: Path, trained: Mapping[str, Any], targets: Sequence[str]
) -> dict[str, Any]:
    """Return the arguments with which a table is read to predict its rows.

    Its labels are the targets of the head if it has them all; otherwise it has none. The column of
    SMILES has the name it had in training, if there is one of that name.
    """
    table = read_table(path)
    known = all(name in table.header and table.numbers(name) is not None for name in targets)
    args: dict[str, Any] = {"targets": list(targets) if known else ""}
    if trained.get("smiles") in table.header:
        args["smiles"] = trained["smiles"]
    return args


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())
