"""Reading a csv table of text cells, and the columns of numbers in it."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import DataError, NotFoundError


@dataclass(frozen=True)
class Table:
    """A csv file: its header and, for each column, the text of every row."""

    path: Path
    header: tuple[str, ...]
    columns: tuple[tuple[str, ...], ...]

    @property
    def num_rows(self) -> int:
        """How many rows there are below the header."""
        return len(self.columns[0])

    def column(self, name: str) -> tuple[str, ...]:
        """Return the cells of the column with this name."""
        return self.columns[self.header.index(name)]

    def numbers(self, name: str) -> np.ndarray | None:
        """Return a column as float64, NaN where blank; None when a cell is not a finite number."""
        try:
            values = np.array([float(cell) if cell else np.nan for cell in self.column(name)])
        except ValueError:
            return None
        return None if np.isinf(values).any() else values


def read_table(path: Path) -> Table:
    """Read a csv file (gzipped or not) with a header; cells lose the white space around them."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        # utf-8-sig: spreadsheets put a byte order mark before the first column's name.
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = tuple(cell.strip() for cell in next(reader, ()))
            rows = [
                _checked(row, header, f"{path}: line {reader.line_num}") for row in reader if row
            ]
    except (csv.Error, gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a readable csv file ({error})") from None
    if not rows:
        raise DataError(f"{path}: found no rows, expected a header and at least one row")
    repeated = {name for name in header if header.count(name) > 1}
    if repeated:
        raise DataError(f"{path}: found column {min(repeated)!r} more than once")
    return Table(path, header, tuple(zip(*rows, strict=True)))


def _checked(row: Sequence[str], header: Sequence[str], where: str) -> list[str]:
    if len(row) != len(header):
        raise DataError(f"{where}: found {len(row)} cells, expected {len(header)} as in the header")
    return [cell.strip() for cell in row]
