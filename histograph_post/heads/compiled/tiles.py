"""Products of matrices, and parts of them, as functions that loops call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .product_code import Product, Way
from .vector_code import LANES, SIZE, VECTOR, Code

_NUMBER = types.int64


# numba looks at the names of arguments and calls these with types, which become code.
# mypy: disable-error-code="no-untyped-def"


@intrinsic(prefer_literal=True)
def multiply(typing, adds, left, right, from_column, result, to_column, width):
    """Write the product of two matrices, or add it to what is there.

    Args:
        typing: numba's.
        adds: Whether it is added, a constant.
        left: ``[m, k]``, any view.
        right: ``[k, n]`` from ``from_column`` on; values of a row are next to each other.
        from_column: Where it starts.
        result: ``[m, n]`` from ``to_column`` on; values of a row are next to each other.
        to_column: Where it starts.
        width: ``n``.
    """
    signature = types.void(adds, left, right, _NUMBER, result, _NUMBER, _NUMBER)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _product(code, signature.args, args).write()
        return code.nothing()

    return signature, write


@intrinsic(prefer_literal=True)
def multiply_ahead(typing, adds, left, right, from_column, result, to_column, width, ahead):
    """Do the same as :func:`multiply`, and fetch what is ahead meanwhile: see :mod:`.ahead`.

    Args:
        typing: numba's.
        adds: Whether it is added, a constant.
        left: ``[m, k]``, any view.
        right: ``[k, n]`` from ``from_column`` on; values of a row are next to each other.
        from_column: Where it starts.
        result: ``[m, n]`` from ``to_column`` on; values of a row are next to each other.
        to_column: Where it starts.
        width: ``n``.
        ahead: Where to go on and where to stop, ``[2]``.
    """
    signature = types.void(adds, left, right, _NUMBER, result, _NUMBER, _NUMBER, ahead)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        *of_product, ahead = args
        array = context.make_array(signature.args[7])(context, builder, ahead)
        next_, stop = (builder.gep(array.data, [code.number(place)]) for place in (0, 1))
        way = Way(code.keep(builder.load(next_)), builder.load(stop))
        _product(code, signature.args, of_product)._replace(way=way).write()
        builder.store(builder.load(way.next), next_)
        return code.nothing()

    return signature, write


def _product(code: Code, kinds: Sequence[Any], args: Sequence[ir.Value]) -> Product:
    """Return the product that :func:`multiply` is called for with these types of arguments."""
    _, left, right, from_column, result, to_column, width = args
    return Product(
        code,
        code.matrix(kinds[1], left),
        (code.matrix(kinds[2], right), from_column),
        (code.matrix(kinds[4], result), to_column),
        width,
        adds=kinds[0].literal_value,
    )


@intrinsic(prefer_literal=True)
def write_sums_of_pieces(typing, rows, weights, row, values, result):
    """Write weighted sums of the pieces of every row.

    Args:
        typing: numba's.
        rows: How many sums, a constant.
        weights: Of every piece in every sum, ``[m, k]``, any view.
        row: The first of the sums.
        values: ``[n, k * width]``; values of a row are next to each other.
        result: ``[n, m * width]``; values of a row are next to each other.
    """
    signature = types.void(rows, weights, _NUMBER, values, result)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _, weights, row, values, result = args
        weights = code.matrix(signature.args[1], weights)
        values, result = (
            code.matrix(signature.args[3], values),
            code.matrix(signature.args[4], result),
        )
        width, zero = builder.sdiv(values.columns, weights.columns), code.number(0)
        places = code.count_from(row, rows.literal_value)
        with cgutils.for_range(builder, values.rows) as loop:
            pieces = values.pieces(loop.index, weights.columns, width)
            sums = result.pieces(loop.index, weights.rows, width)
            product = Product(code, weights, (pieces, zero), (sums, zero), width, adds=False)
            product.write_rows(places)
        return code.nothing()

    return signature, write


@intrinsic
def fetch(typing, values):
    """Bring rows into the processor's cache in the order of memory, which is fastest.

    Args:
        typing: numba's.
        values: ``[n, m]``, rows next to each other.
    """
    signature = types.void(values)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        values = code.matrix(signature.args[0], args[0])
        step = code.number(LANES * SIZE)
        found = code.keep(code.constant(0))
        size = builder.mul(values.rows, values.row_step)
        with cgutils.for_range(builder, builder.udiv(size, step)) as loop:
            # The whole of it: this is three times as fast as a value of each line of the cache.
            vector = code.load(builder.add(values.start, builder.mul(loop.index, step)))
            builder.store(builder.fadd(builder.load(found), vector), found)
        code.use(builder.load(found))
        return code.nothing()

    return signature, write


@intrinsic(prefer_literal=True)
def add_tile_of_dots(typing, rows, others, left, row, right, other, width, result):
    """Add the products of some pieces of rows to as many places of a matrix.

    ``result[i, j]`` gets the sum over all rows of piece ``i`` of the left times piece ``j`` of the
    right.

    Args:
        typing: numba's.
        rows: How many pieces of the left, a constant.
        others: How many pieces of the right, a constant.
        left: ``[n, m * width]``; values of a row are next to each other.
        row: The first of the pieces of the left.
        right: ``[n, k * width]``; values of a row are next to each other.
        other: The first of the pieces of the right.
        width: Values of a piece.
        result: ``[m, k]``, or larger.
    """
    signature = types.void(rows, others, left, _NUMBER, right, _NUMBER, _NUMBER, result)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code = Code(context, builder)
        _, _, left, row, right, other, width, result = args
        left, right = code.matrix(signature.args[2], left), code.matrix(signature.args[4], right)
        result = code.matrix(signature.args[7], result)
        lefts = code.count_from(row, rows.literal_value)
        rights = code.count_from(other, others.literal_value)
        totals = [[code.keep(ir.Constant(VECTOR, None)) for _ in rights] for _ in lefts]
        with cgutils.for_range(builder, left.rows) as loop:
            of_left = left.pieces(loop.index, result.rows, width)
            of_right = right.pieces(loop.index, result.columns, width)

            def step(column: ir.Value, mask: ir.Value | None) -> None:
                values = [code.load(of_right.at(piece, column), mask) for piece in rights]
                for piece, own in zip(lefts, totals, strict=True):
                    factor = code.load(of_left.at(piece, column), mask)
                    for total, value in zip(own, values, strict=True):
                        code.add_product(total, factor, value)

            code.over_vectors(width, step)
        for place, own in zip(lefts, totals, strict=True):
            for piece, total in zip(rights, own, strict=True):
                code.add_value(code.total(builder.load(total)), result.at(place, piece))
        return code.nothing()

    return signature, write
