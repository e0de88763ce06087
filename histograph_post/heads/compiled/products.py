"""Products of small matrices whose rows are next to each other in memory.

A library of matrix products is made for large ones, and costs a call each; these are inlined into
the loop over graphs, and as fast for the few dozen rows of a graph. Several rows are handled with
several others at a time, so that every value that is loaded is used as often.
"""

from __future__ import annotations

import numpy as np

from .loops import NUMBER, ROWS, VIEW, ZERO, Floats, loop, loop_on


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
    rows, inner = left.shape
    row = 0
    while row + 2 <= rows:
        a = result[row, to_column : to_column + width]
        b = result[row + 1, to_column : to_column + width]
        k = 0
        while k + 4 <= inner:
            w = right[k, from_column : from_column + width]
            x = right[k + 1, from_column : from_column + width]
            y = right[k + 2, from_column : from_column + width]
            z = right[k + 3, from_column : from_column + width]
            aw, ax, ay, az = left[row, k], left[row, k + 1], left[row, k + 2], left[row, k + 3]
            bw, bx = left[row + 1, k], left[row + 1, k + 1]
            by, bz = left[row + 1, k + 2], left[row + 1, k + 3]
            for column in range(width):
                p, q, r, s = w[column], x[column], y[column], z[column]
                a[column] += aw * p + ax * q + ay * r + az * s
                b[column] += bw * p + bx * q + by * r + bz * s
            k += 4
        while k < inner:
            w = right[k, from_column : from_column + width]
            aw, bw = left[row, k], left[row + 1, k]
            for column in range(width):
                a[column] += aw * w[column]
                b[column] += bw * w[column]
            k += 1
        row += 2
    if row < rows:
        a = result[row, to_column : to_column + width]
        for k in range(inner):
            w, aw = right[k, from_column : from_column + width], left[row, k]
            for column in range(width):
                a[column] += aw * w[column]


@loop_on(ROWS, NUMBER, ROWS, VIEW, NUMBER)
def add_row_products(
    left: Floats, from_column: int, right: Floats, result: Floats, width: int
) -> None:
    """Add the products of all rows of two matrices to a third one.

    Args:
        left: ``[m, k]`` from ``from_column`` on.
        from_column: Where it starts.
        right: ``[n, k]``.
        result: ``[m, n]``, any view.
        width: ``k``.
    """
    rows, columns = len(left), len(right)
    row = 0
    while row + 2 <= rows:
        a = left[row, from_column : from_column + width]
        b = left[row + 1, from_column : from_column + width]
        column = 0
        while column + 4 <= columns:
            w, x = right[column], right[column + 1]
            y, z = right[column + 2], right[column + 3]
            aw, ax, ay, az = ZERO, ZERO, ZERO, ZERO
            bw, bx, by, bz = ZERO, ZERO, ZERO, ZERO
            for k in range(width):
                p, q = a[k], b[k]
                aw += p * w[k]
                ax += p * x[k]
                ay += p * y[k]
                az += p * z[k]
                bw += q * w[k]
                bx += q * x[k]
                by += q * y[k]
                bz += q * z[k]
            result[row, column] += aw
            result[row, column + 1] += ax
            result[row, column + 2] += ay
            result[row, column + 3] += az
            result[row + 1, column] += bw
            result[row + 1, column + 1] += bx
            result[row + 1, column + 2] += by
            result[row + 1, column + 3] += bz
            column += 4
        while column < columns:
            w, aw, bw = right[column], ZERO, ZERO
            for k in range(width):
                aw += a[k] * w[k]
                bw += b[k] * w[k]
            result[row, column] += aw
            result[row + 1, column] += bw
            column += 1
        row += 2
    if row < rows:
        a = left[row, from_column : from_column + width]
        for column in range(columns):
            result[row, column] += dot(a, right[column])
