"""Tables of molecules: csv, Parquet and Arrow files as a header and columns of text.

A table may have millions of rows, and a Python string takes 50 bytes before its first character:
so columns take little more memory than their text. Parquet and Arrow files, which are also what
Hugging Face's ``datasets`` writes, are read batch by batch with pyarrow (extra ``arrow``).
"""

from __future__ import annotations

import csv
import gzip
import zlib
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, overload

import numpy as np

from ..errors import DataError, MissingExtraError, NotFoundError
from ..utils.text import first_line

#: How the names of tables end that pyarrow reads.
ARROW_FILES = (".parquet", ".arrow", ".feather")

_LONGEST_LINE = 2**24


class _Cells(Sequence[str]):
    """Cells that become text when they are asked for."""

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
    """A column: its cells one after the other in UTF-8."""

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

    def update_digest(self, digest: Any, start: int, stop: int) -> None:
        """Hash some of the cells, and where each ends."""
        begin = self._ends[start - 1] if start else 0
        ends = np.array(self._ends[start:stop], dtype="<i8") - begin
        digest.update(ends.tobytes())
        digest.update(self._contents[begin : self._ends[stop - 1]])


class SelectedRows(_Cells):
    """Some rows of a column, or the numbers of the rows where there is no column.

    Args:
        rows: Which: int64 ``[selected]``.
        column: The cells; None for the numbers themselves.
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
    """Whether these are the numbers of rows, no two of which are the same."""
    return isinstance(names, SelectedRows) and names.column is None


@dataclass(frozen=True)
class Table:
    """A file's header and, for each column, the text of every row."""

    path: Path
    header: tuple[str, ...]
    columns: tuple[Sequence[str], ...]

    @property
    def num_rows(self) -> int:
        """How many rows there are below the header."""
        return len(self.columns[0])

    def column(self, name: str) -> Sequence[str]:
        """Return the cells of the column with this name."""
        return self.columns[self.header.index(name)]

    def numbers(self, name: str) -> np.ndarray | None:
        """Return a column as float64, NaN where blank; None when a cell is not a finite number."""
        cells = self.column(name)
        try:
            values = np.fromiter((float(cell) if cell else np.nan for cell in cells), np.float64)
        except ValueError:
            return None
        return None if np.isinf(values).any() else values


def read_table(path: Path) -> Table:
    """Read a csv file (gzipped or not) with a header, or a file of Parquet or Arrow.

    Cells lose the white space around them.
    """
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    header, columns = (_read_arrow if path.suffix in ARROW_FILES else _read_csv)(path)
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
    """Yield the lines of a file; one without end, as a small archive can hold, is refused."""
    while line := file.readline(_LONGEST_LINE):
        if len(line) == _LONGEST_LINE and not line.endswith(("\r", "\n")):
            raise DataError(
                f"{path}: found a line of more than {_LONGEST_LINE} characters, expected a csv file"
            )
        yield line


def _read_arrow(path: Path) -> tuple[tuple[str, ...], tuple[TextColumn, ...]]:
    """Return the columns of texts and numbers; others are left out."""
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
    """Return a value as a csv file has it."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()
