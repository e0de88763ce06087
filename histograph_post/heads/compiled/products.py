"""Products of small matrices whose rows are next to each other in memory.

A library of matrix products is made for large ones, and costs a call each; these are part of the
loop over graphs, and faster for the few dozen rows of a graph.
"""

from __future__ import annotations

import numpy as np

from .loops import NUMBER, NUMBERS, ROWS, VIEW, ZERO, Floats, Integers, loop, loop_on
from .tiles import add_tile_of_dots, fetch, multiply, multiply_ahead, write_sums_of_pieces
from .vector_code import VECTORS

#: Values of rows that are handled at a time: half of a processor's second cache.
BLOCK = 1 << 17

#: Whether the processor has registers for tiles of four by six.
WIDE = VECTORS == 4


@loop
def dot(left: Floats, right: Floats) -> np.float32:
    """Return the sum of the products of two rows."""
    total = ZERO
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@loop_on(VIEW, ROWS, NUMBER, ROWS, NUMBER, NUMBER)
def add_product(
    left: Floats, right: Floats, from_column: int, result: Floats, to_column: int, width: int
) -> None:
    """Add the product of two matrices to a third one, or to some columns of it.

    Args:
        left: ``[m, k]``, any view.
        right: ``[k, n]`` from ``from_column`` on.
        from_column: Where it starts.
        result: ``[m, n]`` from ``to_column`` on.
        to_column: Where it starts.
        width: ``n``.
    """
    multiply(True, left, right, from_column, result, to_column, width)


@loop_on(VIEW, ROWS, NUMBER, ROWS, NUMBER, NUMBER)
def write_product(
    left: Floats, right: Floats, from_column: int, result: Floats, to_column: int, width: int
) -> None:
    """Write the product of two matrices as a third one, or as some columns of it.

    Args:
        left: ``[m, k]``, any view.
        right: ``[k, n]`` from ``from_column`` on.
        from_column: Where it starts.
        result: Filled in, ``[m, n]`` from ``to_column`` on.
        to_column: Where it starts.
        width: ``n``.
    """
    multiply(False, left, right, from_column, result, to_column, width)


@loop_on(VIEW, ROWS, NUMBER, ROWS, NUMBER, NUMBER, NUMBERS)
def add_product_ahead(
    left: Floats,
    right: Floats,
    from_column: int,
    result: Floats,
    to_column: int,
    width: int,
    ahead: Integers,
) -> None:
    """Do the same as :func:`add_product`, and fetch what is ahead meanwhile: see :mod:`.ahead`."""
    multiply_ahead(True, left, right, from_column, result, to_column, width, ahead)


@loop_on(ROWS, ROWS, NUMBER, ROWS)
def add_dots(left: Floats, right: Floats, width: int, result: Floats) -> None:
    """Add the products of pieces of rows, summed over the rows, to a matrix.

    Args:
        left: ``[n, m * width]``, ``m`` pieces.
        right: ``[n, k * width]``, ``k`` pieces.
        width: Values of a piece.
        result: Of each piece of the left with each of the right, ``[m, k]`` or larger.
    """
    rows, others = left.shape[1] // width, right.shape[1] // width
    block = max(BLOCK // right.shape[1], 4)
    for first in range(0, len(left), block):
        some, of_others = left[first : first + block], right[first : first + block]
        if len(left) > block:
            fetch(of_others)
        row = 0
        while row + 4 <= rows:
            other = 0
            while WIDE and other + 6 <= others:
                add_tile_of_dots(4, 6, some, row, of_others, other, width, result)
                other += 6
            while other + 4 <= others:
                add_tile_of_dots(4, 4, some, row, of_others, other, width, result)
                other += 4
            if other + 2 <= others:
                add_tile_of_dots(4, 2, some, row, of_others, other, width, result)
                other += 2
            if other < others:
                add_tile_of_dots(4, 1, some, row, of_others, other, width, result)
            row += 4
        while row < rows:
            for other in range(others):
                add_tile_of_dots(1, 1, some, row, of_others, other, width, result)
            row += 1


@loop
def add_dots_of_rows(left: Floats, right: Floats, result: Floats) -> None:
    """Add the products of rows ``[m, k]`` with other rows ``[n, k]`` to ``[m, n]``, or larger."""
    add_dots(left.reshape(1, -1), right.reshape(1, -1), left.shape[1], result)


@loop_on(ROWS)
def fetch_rows(rows: Floats) -> None:
    """Bring rows into the processor's cache, if they fit: tiles do not read in memory's order."""
    if rows.size <= BLOCK:
        fetch(rows)


@loop_on(VIEW, ROWS, ROWS)
def sum_pieces(weights: Floats, values: Floats, result: Floats) -> None:
    """Write weighted sums of the pieces of every row.

    Args:
        weights: Of every piece in every sum, ``[m, k]``.
        values: ``[n, k * width]``, ``k`` pieces.
        result: Filled in, ``[n, m * width]``.
    """
    row, rows = 0, len(weights)
    while row + 4 <= rows:
        write_sums_of_pieces(4, weights, row, values, result)
        row += 4
    while row < rows:
        write_sums_of_pieces(1, weights, row, values, result)
        row += 1
