"""The code of a product of matrices, tile by tile, and of what is fetched meanwhile.

A tile stays in registers until all products are in it: four rows, or fewer, by some vectors of
columns. It is eight rows where there is one vector of columns alone, because a sum has to wait for
the last one that goes to the same register.
"""

from __future__ import annotations

from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from .vector_code import BIT, LANES, LINE, VECTOR, VECTORS, Code, Matrix

#: Rows of a tile, and of one that has a vector of columns alone.
ROWS, MANY_ROWS = 4, 8


class Way(NamedTuple):
    """What is fetched while something else is done."""

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


class Product(NamedTuple):
    """A product of matrices."""

    code: Code
    left: Matrix
    #: The right matrix, and its first column.
    right_from: tuple[Matrix, ir.Value]
    #: The result, and its first column.
    result_from: tuple[Matrix, ir.Value]
    #: How many columns.
    width: ir.Value
    #: Whether it is added to the result, or replaces it.
    adds: bool
    #: What is fetched meanwhile.
    way: Way | None = None

    def write(self) -> None:
        """Write all rows, as many at a time as there are."""
        code, builder, rows = self.code, self.code.builder, self.left.rows
        done = code.keep(code.number(0))
        with builder.if_then(builder.icmp_signed("<=", self.width, code.number(LANES))):
            strips = builder.udiv(rows, code.number(MANY_ROWS))
            mask = code.mask(self.width)
            with cgutils.for_range(builder, strips) as loop:
                first = builder.mul(loop.index, code.number(MANY_ROWS))
                self._write_tile(code.count_from(first, MANY_ROWS), code.number(0), 1, mask)
            builder.store(builder.mul(strips, code.number(MANY_ROWS)), done)
        start = builder.load(done)
        strips = builder.udiv(builder.sub(rows, start), code.number(ROWS))
        with cgutils.for_range(builder, strips) as loop:
            first = builder.add(start, builder.mul(loop.index, code.number(ROWS)))
            self.write_rows(code.count_from(first, ROWS))
        for count in (2, 1):  # what the number of rows has of these
            with builder.if_then(builder.trunc(builder.udiv(rows, code.number(count)), BIT)):
                first = builder.and_(rows, code.number(-2 * count))
                self.write_rows(code.count_from(first, count))

    def write_rows(self, places: list[ir.Value]) -> None:
        """Write some rows, four at most."""
        code, builder = self.code, self.code.builder
        chunk = code.number(VECTORS * LANES)
        chunks = builder.udiv(self.width, chunk)
        with cgutils.for_range(builder, chunks) as loop:
            self._write_tile(places, builder.mul(loop.index, chunk), VECTORS, None)
        done = builder.mul(chunks, chunk)
        rest = builder.sub(self.width, done)
        for vectors in range(1, VECTORS + 1):
            before = code.number((vectors - 1) * LANES)
            more = builder.icmp_signed(">", rest, before)
            enough = builder.icmp_signed("<=", rest, code.number(vectors * LANES))
            with builder.if_then(builder.and_(more, enough)):
                self._write_tile(places, done, vectors, code.mask(builder.sub(rest, before)))

    def _write_tile(
        self, places: list[ir.Value], column: ir.Value, vectors: int, mask: ir.Value | None
    ) -> None:
        """Write some rows from a column on, the last vector of them through a mask."""
        code, builder = self.code, self.code.builder
        (right, from_column), (result, to_column) = self.right_from, self.result_from
        source, target = builder.add(from_column, column), builder.add(to_column, column)
        zeros = [ir.Constant(VECTOR, None)] * vectors
        sums = []
        for place in places:
            start = code.load_all(result.at(place, target), vectors, mask) if self.adds else zeros
            sums.append([code.keep(part) for part in start])
        with cgutils.for_range(builder, self.left.columns) as loop:
            values = code.load_all(right.at(loop.index, source), vectors, mask)
            for place, own in zip(places, sums, strict=True):
                factor = code.spread(code.value(self.left.at(place, loop.index)))
                for total, part in zip(own, values, strict=True):
                    code.add_product(total, factor, part)
            if self.way is not None and (vectors == VECTORS or len(places) == MANY_ROWS):
                self.way.go_on(code)
        for place, own in zip(places, sums, strict=True):
            values = [builder.load(total) for total in own]
            code.store_all(values, result.at(place, target), mask)
