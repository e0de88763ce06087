"""Filling and copying rows, in loops that take no time to compile."""

from __future__ import annotations

import numpy as np

from .loops import FACTOR, ONE, ROW, ROWS, ZERO, Floats, loop, loop_on
from .vector_code import LINE, SIZE


@loop
def new_rows(count: int, width: int) -> Floats:
    """Return rows to be filled in, ``[count, width]``, from the start of a line of the cache on.

    A vector that is in two lines takes twice as long to load.
    """
    values = np.empty(count * width + LINE // SIZE, np.float32)
    first = -values.ctypes.data % LINE // SIZE
    return values[first : first + count * width].reshape(count, width)


@loop_on(ROW)
def clear_row(row: Floats) -> None:
    """Make a row zero."""
    for column in range(len(row)):
        row[column] = ZERO


@loop_on(ROWS)
def clear(rows: Floats) -> None:
    """Make all rows zero."""
    for row in range(len(rows)):
        clear_row(rows[row])


@loop_on(ROW, ROW)
def copy_row(source: Floats, target: Floats) -> None:
    """Copy a row."""
    for column in range(len(target)):
        target[column] = source[column]


@loop_on(ROW, FACTOR)
def scale_row(row: Floats, factor: np.float32) -> None:
    """Multiply a row."""
    for column in range(len(row)):
        row[column] *= factor


@loop_on(ROWS, FACTOR)
def scale(rows: Floats, factor: np.float32) -> None:
    """Multiply all rows."""
    for row in range(len(rows)):
        scale_row(rows[row], factor)


@loop_on(ROW, FACTOR, ROWS)
def repeat_row(source: Floats, factor: np.float32, rows: Floats) -> None:
    """Make every row the same one, multiplied."""
    for row in range(len(rows)):
        target = rows[row]
        for column in range(len(target)):
            target[column] = factor * source[column]


@loop_on(ROW, ROWS)
def add_row(source: Floats, rows: Floats) -> None:
    """Add a row to every row."""
    for row in range(len(rows)):
        target = rows[row]
        for column in range(len(target)):
            target[column] += source[column]


@loop_on(ROWS, ROW)
def add_rows(rows: Floats, result: Floats) -> None:
    """Add all rows ``[m, n]`` to ``result [n]``."""
    for row in range(len(rows)):
        source = rows[row]
        for column in range(len(source)):
            result[column] += source[column]


@loop_on(ROWS, ROW)
def take_mean(rows: Floats, result: Floats) -> None:
    """Write the mean of rows ``[m, n]``, zero if there are none, as ``result [n]``."""
    clear_row(result)
    add_rows(rows, result)
    scale_row(result, ONE / np.float32(max(len(rows), 1)))
