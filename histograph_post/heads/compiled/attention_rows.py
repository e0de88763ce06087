"""The attention that some nodes give, from their scores, and the gradient of it.

Rows are as long as whole vectors of the processor: see :func:`row_length`. What is past the last
value of a row of scores is not looked at, and becomes zero.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import exponential
from .loops import loop
from .vector_code import FLOAT, INTS, LANES, Code, Matrix

# numba looks at the names of arguments and calls these with types, which become code.
# mypy: disable-error-code="no-untyped-def"


@loop
def row_length(count: int) -> int:
    """Return the values of as many vectors as hold ``count``."""
    return (count + LANES - 1) // LANES * LANES


@intrinsic(prefer_literal=True)
def give_attention(typing, rows, scores, row, count, received):
    """Add the softmax of some rows of scores to what every node receives.

    Args:
        typing: numba's.
        rows: How many, a constant.
        scores: ``[m, length]``; the rows are used up.
        row: The first of them.
        count: Values of a row.
        received: Added to, ``[length]``.
    """
    signature = types.void(rows, scores, types.int64, types.int64, received)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _, scores, row, count, received = args
        scores = code.matrix(signature.args[1], scores)
        received = code.matrix(signature.args[4], received)
        places = code.count_from(row, rows.literal_value)
        inverses = _write_softmax(code, scores, places, count)

        def step(column: ir.Value, mask: ir.Value | None) -> None:
            target = received.at(code.number(0), column)
            total = code.load(target)
            for place, inverse in zip(places, inverses, strict=True):
                total = code.multiply_add(code.load(scores.at(place, column)), inverse, total)
            code.store(total, target)

        code.over_vectors(count, step)
        return code.nothing()

    return signature, write


@intrinsic(prefer_literal=True)
def give_attention_back(typing, rows, scores, row, count, factor, grad, received):
    """Do the same as :func:`give_attention`, and turn the rows into the gradient of the scores.

    Args:
        typing: numba's.
        rows: How many, a constant.
        scores: ``[m, length]``; the rows become their gradient, times a factor.
        row: The first of them.
        count: Values of a row.
        factor: The factor.
        grad: Of the attention, ``[length]``, zero past its last value.
        received: Added to, ``[length]``.
    """
    number = types.int64
    signature = types.void(rows, scores, number, number, types.float32, grad, received)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, zero = Code(context, builder), ir.Constant(ir.IntType(64), 0)
        _, scores, row, count, factor, grad, received = args
        scores, grad = code.matrix(signature.args[1], scores), code.matrix(signature.args[5], grad)
        received, factor = code.matrix(signature.args[6], received), code.spread(factor)
        places = code.count_from(row, rows.literal_value)
        inverses = _write_softmax(code, scores, places, count)
        along = [code.keep(code.constant(0)) for _ in places]

        def add(column: ir.Value, mask: ir.Value | None) -> None:
            own, total = code.load(grad.at(zero, column)), code.load(received.at(zero, column))
            for place, inverse, sum_ in zip(places, inverses, along, strict=True):
                value = builder.fmul(code.load(scores.at(place, column)), inverse)
                total = builder.fadd(total, value)
                code.add_product(sum_, value, own)
            code.store(total, received.at(zero, column))

        code.over_vectors(count, add)
        means = [code.spread(code.total(builder.load(sum_))) for sum_ in along]
        factors = [builder.fmul(inverse, factor) for inverse in inverses]

        def turn(column: ir.Value, mask: ir.Value | None) -> None:
            own = code.load(grad.at(zero, column))
            for place, mean, factor in zip(places, means, factors, strict=True):
                value = builder.fmul(code.load(scores.at(place, column)), factor)
                value = builder.fmul(value, builder.fsub(own, mean))
                code.store(value, scores.at(place, column))

        code.over_vectors(count, turn)
        return code.nothing()

    return signature, write


def _write_softmax(
    code: Code, scores: Matrix, places: list[ir.Value], count: ir.Value
) -> list[ir.Value]:
    """Turn rows of scores into exponentials; return what to multiply each with, in all places."""
    builder, lowest = code.builder, code.constant(-math.inf)
    largest = [code.keep(lowest) for _ in places]
    totals = [code.keep(code.constant(0)) for _ in places]

    def compare(column: ir.Value, mask: ir.Value | None) -> None:
        for place, known in zip(places, largest, strict=True):
            value = code.let(mask, code.load(scores.at(place, column)), lowest)
            found = builder.load(known)
            more = builder.fcmp_ordered(">", value, found)  # a NaN comes back with its exponential
            builder.store(builder.select(more, value, found), known)

    code.over_vectors(count, compare)
    tops = [code.spread(code.largest(builder.load(known))) for known in largest]

    def raise_(column: ir.Value, mask: ir.Value | None) -> None:
        for place, top, total in zip(places, tops, totals, strict=True):
            value = builder.fsub(code.load(scores.at(place, column)), top)
            value = code.let(mask, _exponential(code, value), code.constant(0))
            builder.store(builder.fadd(builder.load(total), value), total)
            code.store(value, scores.at(place, column))

    code.over_vectors(count, raise_)
    one, sums = ir.Constant(FLOAT, 1.0), [code.total(builder.load(total)) for total in totals]
    return [code.spread(builder.fdiv(one, sum_)) for sum_ in sums]


def _exponential(code: Code, value: ir.Value) -> ir.Value:
    """Write what :func:`.exponential.exponential` does with one value, for a vector of them."""
    builder, known = code.builder, exponential
    lowest = code.constant(known.LOWEST)
    value = builder.select(builder.fcmp_ordered("<", value, lowest), lowest, value)
    scaled = code.multiply_add(value, code.constant(known.LOG2_E), code.constant(known.HALF))
    power = code.call("floor", value.type, [scaled])
    rest = code.multiply_add(power, code.constant(-known.LN2_HIGH), value)
    rest = code.multiply_add(power, code.constant(-known.LN2_LOW), rest)
    polynomial = code.constant(known.P0)
    for factor in (known.P1, known.P2, known.P3, known.P4, known.P5):
        polynomial = code.multiply_add(polynomial, rest, code.constant(factor))
    fraction = code.multiply_add(builder.fmul(polynomial, rest), rest, rest)
    fraction = builder.fadd(fraction, code.constant(1))
    is_number = builder.fcmp_ordered("ord", power, power)  # there is no integer for NaN
    whole = builder.fptosi(builder.select(is_number, power, code.constant(0)), INTS)
    exponent = builder.add(whole, code.integers(known.EXPONENT_BIAS))
    bits = builder.shl(exponent, code.integers(known.EXPONENT_SHIFT))
    return builder.fmul(fraction, builder.bitcast(bits, value.type))
