"""Columns of text that take little more memory than the text itself.

A Python string takes 50 bytes before its first character, and a table has millions of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np


class TextColumn(Sequence[str]):
    """Cells of a column, one after the other in UTF-8; a cell becomes text when it is asked for."""

    def __init__(self, contents: bytes | bytearray, ends: array[int]) -> None:
        self._contents = contents
        #: Where each cell ends.
        self._ends = ends

    @classmethod
    def of(cls, cells: Sequence[str]) -> TextColumn:
        """Return the column of these cells."""
        building = ColumnBuilder()
        for cell in cells:
            building.append(cell)
        return building.column()

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        begin = self._ends[at - 1] if at else 0
        return self._contents[begin : self._ends[at]].decode()

    def __iter__(self) -> Iterator[str]:
        begin = 0
        for end in self._ends:
            yield self._contents[begin:end].decode()
            begin = end

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def update_digest(self, digest: Any, start: int, stop: int) -> None:
        """Hash some of the cells, and where each ends."""
        begin = self._ends[start - 1] if start else 0
        ends = np.array(self._ends[start:stop], dtype="<i8") - begin
        digest.update(ends.tobytes())
        digest.update(self._contents[begin : self._ends[stop - 1]])


class ColumnBuilder:
    """Takes the cells of a column one by one."""

    def __init__(self) -> None:
        self._contents, self._ends = bytearray(), array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def append(self, cell: str) -> None:
        """Add a cell."""
        self._contents += cell.encode()
        self._ends.append(len(self._contents))

    def column(self) -> TextColumn:
        """Return the column."""
        return TextColumn(self._contents, self._ends)


class SelectedRows(Sequence[str]):
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

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._name(row) for row in self.rows[index].tolist()]
        return self._name(int(self.rows[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def _name(self, row: int) -> str:
        return str(row) if self.column is None else self.column[row]


def is_row_numbers(names: Sequence[str]) -> bool:
    """Whether these are the numbers of rows, no two of which are the same."""
    return isinstance(names, SelectedRows) and names.column is None
