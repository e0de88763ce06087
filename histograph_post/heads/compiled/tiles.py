"""Tiles of a product of matrices, which stay in registers until all products are in them.

A tile is four rows, or fewer, by some vectors of columns; or four rows by four other rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .vector_code import BIT, LANES, LINE, SIZE, VECTOR, VECTORS, Code, Matrix

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
        _, left, right, from_column, result, to_column, width = args
        _write_product(
            code,
            code.matrix(signature.args[1], left),
            (code.matrix(signature.args[2], right), from_column),
            (code.matrix(signature.args[4], result), to_column),
            width,
            adds=adds.literal_value,
        )
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
        _, left, right, from_column, result, to_column, width, ahead = args
        array = context.make_array(signature.args[7])(context, builder, ahead)
        next_, stop = (builder.gep(array.data, [code.number(place)]) for place in (0, 1))
        way = Way(code.keep(builder.load(next_)), builder.load(stop))
        _write_product(
            code,
            code.matrix(signature.args[1], left),
            (code.matrix(signature.args[2], right), from_column),
            (code.matrix(signature.args[4], result), to_column),
            width,
            adds=adds.literal_value,
            way=way,
        )
        builder.store(builder.load(way.next), next_)
        return code.nothing()

    return signature, write


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
            _write_rows(code, weights, places, (pieces, zero), (sums, zero), width, adds=False)
        return code.nothing()

    return signature, write


class Way(NamedTuple):
    """What is fetched while something else is done, in the code that is being written."""

    #: Address of what is next, kept.
    next: ir.Value
    #: Address where to stop.
    stop: ir.Value

    def go_on(self, code: Code) -> None:
        """Ask for a line of the cache, without waiting for it."""
        builder = code.builder
        place = builder.load(self.next)
        code.prefetch(place)
        after = builder.add(place, code.number(LINE))
        more = builder.icmp_unsigned("<", after, self.stop)
        builder.store(builder.select(more, after, self.stop), self.next)


def _write_product(
    code: Code,
    left: Matrix,
    right_from: tuple[Matrix, ir.Value],
    result_from: tuple[Matrix, ir.Value],
    width: ir.Value,
    *,
    adds: bool,
    way: Way | None = None,
) -> None:
    """Write all rows of a product, four at a time as long as there are as many.

    Args:
        code: Where to.
        left: The left matrix.
        right_from: The right matrix, and its first column.
        result_from: The result, and its first column.
        width: How many columns.
        adds: Whether they are added to the result, or replace it.
        way: What is fetched meanwhile.
    """
    builder = code.builder

    def write(first: ir.Value, rows: int) -> None:
        places = code.count_from(first, rows)
        _write_rows(code, left, places, right_from, result_from, width, adds=adds, way=way)

    strips = builder.udiv(left.rows, code.number(4))
    with cgutils.for_range(builder, strips) as loop:
        write(builder.mul(loop.index, code.number(4)), 4)
    for rows in (2, 1):
        with builder.if_then(builder.trunc(builder.udiv(left.rows, code.number(rows)), BIT)):
            done = builder.and_(left.rows, code.number(-2 * rows))
            write(done, rows)


def _write_rows(
    code: Code,
    left: Matrix,
    places: list[ir.Value],
    right_from: tuple[Matrix, ir.Value],
    result_from: tuple[Matrix, ir.Value],
    width: ir.Value,
    *,
    adds: bool,
    way: Way | None = None,
) -> None:
    """Write some rows of a product.

    Args:
        code: Where to.
        left: The left matrix.
        places: The rows.
        right_from: The right matrix, and its first column.
        result_from: The result, and its first column.
        width: How many columns.
        adds: Whether they are added to the result, or replace it.
        way: What is fetched meanwhile.
    """
    builder = code.builder
    (right, from_column), (result, to_column) = right_from, result_from

    def tile(column: ir.Value, vectors: int, mask: ir.Value | None) -> None:
        source, target = builder.add(from_column, column), builder.add(to_column, column)
        zeros = [ir.Constant(VECTOR, None)] * vectors
        sums = []
        for place in places:
            start = code.load_all(result.at(place, target), vectors, mask) if adds else zeros
            sums.append([code.keep(part) for part in start])
        with cgutils.for_range(builder, left.columns) as loop:
            values = code.load_all(right.at(loop.index, source), vectors, mask)
            for place, own in zip(places, sums, strict=True):
                factor = code.spread(code.value(left.at(place, loop.index)))
                for total, part in zip(own, values, strict=True):
                    code.add_product(total, factor, part)
            if way is not None and vectors == VECTORS:
                way.go_on(code)
        for place, own in zip(places, sums, strict=True):
            values = [builder.load(total) for total in own]
            code.store_all(values, result.at(place, target), mask)

    chunk = code.number(VECTORS * LANES)
    chunks = builder.udiv(width, chunk)
    with cgutils.for_range(builder, chunks) as loop:
        tile(builder.mul(loop.index, chunk), VECTORS, None)
    done = builder.mul(chunks, chunk)
    rest = builder.sub(width, done)
    for vectors in range(1, VECTORS + 1):
        before = code.number((vectors - 1) * LANES)
        more = builder.icmp_signed(">", rest, before)
        enough = builder.icmp_signed("<=", rest, code.number(vectors * LANES))
        with builder.if_then(builder.and_(more, enough)):
            tile(done, vectors, code.mask(builder.sub(rest, before)))


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
