"""Products of small matrices whose rows are next to each other in memory.

A library of matrix products is made for large ones, and costs a call each; these are inlined into
the loop over graphs, and as fast for the few dozen rows of a graph. Two rows are handled with four
others at a time, so that every value that is loaded is used several times.
"""

from __future__ import annotations

import numpy as np

from .loops import ZERO, Floats, loop


@loop
def add_product(left: Floats, right: Floats, result: Floats) -> None:
    """Add ``left [m, k] @ right [k, n]`` to ``result [m, n]``; ``left`` may be any view."""
    rows, inner = left.shape
    row = 0
    while row + 2 <= rows:
        a, b = result[row], result[row + 1]
        k = 0
        while k + 4 <= inner:
            w, x, y, z = right[k], right[k + 1], right[k + 2], right[k + 3]
            aw, ax, ay, az = left[row, k], left[row, k + 1], left[row, k + 2], left[row, k + 3]
            bw, bx = left[row + 1, k], left[row + 1, k + 1]
            by, bz = left[row + 1, k + 2], left[row + 1, k + 3]
            for column in range(len(w)):
                p, q, r, s = w[column], x[column], y[column], z[column]
                a[column] += aw * p + ax * q + ay * r + az * s
                b[column] += bw * p + bx * q + by * r + bz * s
            k += 4
        if k + 2 <= inner:
            w, x = right[k], right[k + 1]
            aw, ax, bw, bx = left[row, k], left[row, k + 1], left[row + 1, k], left[row + 1, k + 1]
            for column in range(len(w)):
                a[column] += aw * w[column] + ax * x[column]
                b[column] += bw * w[column] + bx * x[column]
            k += 2
        if k < inner:
            w, aw, bw = right[k], left[row, k], left[row + 1, k]
            for column in range(len(w)):
                a[column] += aw * w[column]
                b[column] += bw * w[column]
        row += 2
    if row < rows:
        a = result[row]
        k = 0
        while k + 4 <= inner:
            w, x, y, z = right[k], right[k + 1], right[k + 2], right[k + 3]
            aw, ax, ay, az = left[row, k], left[row, k + 1], left[row, k + 2], left[row, k + 3]
            for column in range(len(w)):
                a[column] += aw * w[column] + ax * x[column] + ay * y[column] + az * z[column]
            k += 4
        while k < inner:
            w, aw = right[k], left[row, k]
            for column in range(len(w)):
                a[column] += aw * w[column]
            k += 1


@loop
def add_row_products(left: Floats, right: Floats, result: Floats) -> None:
    """Add ``left [m, k] @ right.T [k, n]`` to ``result [m, n]``, which may be any view."""
    rows, columns = len(left), len(right)
    row = 0
    while row + 2 <= rows:
        a, b = left[row], left[row + 1]
        column = 0
        while column + 4 <= columns:
            w, x = right[column], right[column + 1]
            y, z = right[column + 2], right[column + 3]
            aw, ax, ay, az = ZERO, ZERO, ZERO, ZERO
            bw, bx, by, bz = ZERO, ZERO, ZERO, ZERO
            for k in range(len(a)):
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
        if column + 2 <= columns:
            w, x = right[column], right[column + 1]
            aw, ax, bw, bx = ZERO, ZERO, ZERO, ZERO
            for k in range(len(a)):
                p, q = a[k], b[k]
                aw += p * w[k]
                ax += p * x[k]
                bw += q * w[k]
                bx += q * x[k]
            result[row, column] += aw
            result[row, column + 1] += ax
            result[row + 1, column] += bw
            result[row + 1, column + 1] += bx
            column += 2
        if column < columns:
            result[row, column] += dot(a, right[column])
            result[row + 1, column] += dot(b, right[column])
        row += 2
    if row < rows:
        a = left[row]
        column = 0
        while column + 4 <= columns:
            w, x = right[column], right[column + 1]
            y, z = right[column + 2], right[column + 3]
            aw, ax, ay, az = ZERO, ZERO, ZERO, ZERO
            for k in range(len(a)):
                p = a[k]
                aw += p * w[k]
                ax += p * x[k]
                ay += p * y[k]
                az += p * z[k]
            result[row, column] += aw
            result[row, column + 1] += ax
            result[row, column + 2] += ay
            result[row, column + 3] += az
            column += 4
        while column < columns:
            result[row, column] += dot(a, right[column])
            column += 1


@loop
def dot(left: Floats, right: Floats) -> np.float32:
    """Return the sum of the products of two rows."""
    total = ZERO
    for place in range(len(left)):
        total += left[place] * right[place]
    return total


@loop
def add_rows(rows: Floats, result: Floats) -> None:
    """Add all rows ``[m, n]`` to ``result [n]``."""
    for row in range(len(rows)):
        source = rows[row]
        for column in range(len(source)):
            result[column] += source[column]


@loop
def take_mean(rows: Floats, result: Floats) -> None:
    """Write the mean of rows ``[m, n]``, zero if there are none, as ``result [n]``."""
    result[:] = ZERO
    add_rows(rows, result)
    result /= np.float32(max(len(rows), 1))
