"""The attention that nodes receive, from scores with a column for each node that gives it.

A vector of the processor holds the scores of as many givers for one receiver. A softmax over
receivers goes from row to row of it: its largest score, its sum and its gradient are made in every
place of the vector alike, without a sum across it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .loops import loop
from .vector_code import INTS, LANES, VECTOR, Code, Matrix

# numba looks at the names of arguments and calls these with types, which become code.
# mypy: disable-error-code="no-untyped-def"

#: Scores are multiplied with this first: powers of two are easier to make than those of e.
LOG2_E = np.float32(math.log2(math.e))

#: ``2^r = polynomial(r)`` for ``|r| <= 1/2``, from the highest power on, to single precision
#: (Cephes).
_POLYNOMIAL = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)

#: Added to a small number, it leaves the nearest whole one in the last bits of the sum.
_ROUNDING = 1.5 * 2**23

#: Below this, a power of two is the smallest normal number and not zero.
_LOWEST = -126.0

#: Where the exponent of a single precision number starts.
_EXPONENT_SHIFT = 23


@loop
def row_length(count: int) -> int:
    """Return the values of as many vectors as hold ``count``."""
    return (count + LANES - 1) // LANES * LANES


@intrinsic
def turn_square(typing, values, row, column, width, factor, result, to_column):
    """Write some columns of a few rows as rows, multiplied: a vector's length of both at most.

    Args:
        typing: numba's.
        values: ``[n, m]``; values of a row are next to each other.
        row: The first row; for rows past the end, the last one is taken.
        column: The first column.
        width: How many columns.
        factor: The factor.
        result: A row for each of the columns, of as many values as a vector has, from ``to_column``
            on; more of its rows may be written than there are columns, with zeros.
        to_column: Where they start.
    """
    number = types.int64
    signature = types.void(values, number, number, number, types.float32, result, number)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        values, row, column, width, factor, result, to_column = args
        values, result = (
            code.matrix(signature.args[0], values),
            code.matrix(signature.args[5], result),
        )
        mask, factor = code.mask(width), code.spread(factor)
        last = builder.sub(values.rows, code.number(1))
        vectors = []
        for place in code.count_from(row, LANES):
            inside = builder.icmp_signed("<", place, last)
            found = code.load(values.at(builder.select(inside, place, last), column), mask)
            vectors.append(builder.fmul(found, factor))
        for index, vector in enumerate(code.turned(vectors)):
            code.store(vector, result.at(code.number(index), to_column))
        return code.nothing()

    return signature, write


@intrinsic(prefer_literal=True)
def give_attention(typing, vectors, scores, givers, received):
    """Add the softmax of columns of scores to what every node receives.

    Args:
        typing: numba's.
        vectors: Of columns, a constant.
        scores: Times :data:`LOG2_E`, ``[n, vectors * LANES]`` or wider; used up.
        givers: How many columns count.
        received: Added to, ``[n]``.
    """
    signature = types.void(vectors, scores, types.int64, received)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _, scores, givers, received = args
        columns = _Columns(code, code.matrix(signature.args[1], scores), vectors.literal_value)
        received = code.matrix(signature.args[3], received)
        inverses, _ = columns.raise_all(givers, None)
        with cgutils.for_range(builder, columns.scores.rows) as each:
            total = code.constant(0)
            for raised, inverse in zip(columns.load(each.index), inverses, strict=True):
                total = code.multiply_add(raised, inverse, total)
            code.add_value(code.total(total), received.at(code.number(0), each.index))
        return code.nothing()

    return signature, write


@intrinsic(prefer_literal=True)
def give_attention_back(typing, vectors, scores, givers, factor, grad, received):
    """Do the same as :func:`give_attention`, and turn scores into the gradient of them.

    Args:
        typing: numba's.
        vectors: Of columns, a constant.
        scores: Times :data:`LOG2_E`, ``[n, vectors * LANES]`` or wider; become the gradient of what
            they were before that, times a factor, zero in columns that do not count.
        givers: How many columns count.
        factor: The factor.
        grad: Of what every node receives, ``[n]``.
        received: Added to, ``[n]``.
    """
    signature = types.void(vectors, scores, types.int64, types.float32, grad, received)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _, scores, givers, factor, grad, received = args
        columns = _Columns(code, code.matrix(signature.args[1], scores), vectors.literal_value)
        grad, received = (
            code.matrix(signature.args[4], grad),
            code.matrix(signature.args[5], received),
        )
        inverses, along = columns.raise_all(givers, grad)
        factor, zero = code.spread(factor), code.number(0)
        means = [
            builder.fmul(builder.fmul(sum_, inverse), factor)
            for sum_, inverse in zip(along, inverses, strict=True)
        ]
        with cgutils.for_range(builder, columns.scores.rows) as each:
            own = builder.fmul(code.spread(code.value(grad.at(zero, each.index))), factor)
            total, results = code.constant(0), []
            raised = columns.load(each.index)
            for power, inverse, mean in zip(raised, inverses, means, strict=True):
                attention = builder.fmul(power, inverse)
                total = builder.fadd(total, attention)
                results.append(builder.fmul(attention, builder.fsub(own, mean)))
            columns.store(results, each.index)
            code.add_value(code.total(total), received.at(zero, each.index))
        return code.nothing()

    return signature, write


class _Columns:
    """Code for some vectors of columns of scores, row by row.

    Args:
        code: Writes it.
        scores: ``[n, vectors * LANES]`` or wider.
        vectors: How many.
    """

    def __init__(self, code: Code, scores: Matrix, vectors: int) -> None:
        self.scores = scores
        self._code, self._vectors = code, vectors

    def load(self, row: ir.Value) -> list[ir.Value]:
        """Load a row."""
        return self._code.load_all(self.scores.at(row, self._code.number(0)), self._vectors, None)

    def store(self, values: list[ir.Value], row: ir.Value) -> None:
        """Store a row."""
        self._code.store_all(values, self.scores.at(row, self._code.number(0)), None)

    def raise_all(
        self, givers: ir.Value, grad: Matrix | None
    ) -> tuple[list[ir.Value], list[ir.Value]]:
        """Turn scores into powers, the largest of a column into one.

        Args:
            givers: How many columns count.
            grad: Of what every node receives, if the second result is asked for.

        Returns:
            What makes attention of the powers of each column, zero for one that does not count; and
            the sum of the powers of each column times the gradient.
        """
        code, builder = self._code, self._code.builder
        tops = [code.keep(code.constant(-math.inf)) for _ in range(self._vectors)]
        with cgutils.for_range(builder, self.scores.rows) as each:
            for value, top in zip(self.load(each.index), tops, strict=True):
                known = builder.load(top)
                more = builder.fcmp_ordered(">", value, known)  # a NaN comes back with its power
                builder.store(builder.select(more, value, known), top)
        totals, along = (
            [code.keep(code.constant(0)) for _ in range(self._vectors)] for _ in range(2)
        )
        largest = [builder.load(top) for top in tops]
        with cgutils.for_range(builder, self.scores.rows) as each:
            powers = [
                _power_of_two(code, code.subtract(value, top))
                for value, top in zip(self.load(each.index), largest, strict=True)
            ]
            self.store(powers, each.index)
            for power, total in zip(powers, totals, strict=True):
                builder.store(code.add(builder.load(total), power), total)
            if grad is not None:
                own = code.spread(code.value(grad.at(code.number(0), each.index)))
                for power, sum_ in zip(powers, along, strict=True):
                    code.add_product(sum_, power, own)
        inverses = []
        for index, total in enumerate(totals):
            counts = code.mask(builder.sub(givers, code.number(index * LANES)))
            inverse = builder.fdiv(code.constant(1), builder.load(total))
            inverses.append(code.let(counts, inverse, code.constant(0)))
        return inverses, [builder.load(sum_) for sum_ in along]


def _power_of_two(code: Code, value: ir.Value) -> ir.Value:
    """Write two to the power of what is not positive; NaN stays NaN."""
    builder, lowest = code.builder, code.constant(_LOWEST)
    value = builder.select(builder.fcmp_ordered("<", value, lowest), lowest, value)
    rounded = code.add(value, code.constant(_ROUNDING))
    rest = code.subtract(value, code.subtract(rounded, code.constant(_ROUNDING)))
    polynomial = code.constant(_POLYNOMIAL[0])
    for factor in _POLYNOMIAL[1:]:
        polynomial = code.multiply_add(polynomial, rest, code.constant(factor))
    exponent = builder.shl(builder.bitcast(rounded, INTS), code.integers(_EXPONENT_SHIFT))
    power = builder.bitcast(builder.add(builder.bitcast(polynomial, INTS), exponent), VECTOR)
    # The bits of some NaN would make it a number.
    return builder.select(builder.fcmp_ordered("ord", value, value), power, value)
