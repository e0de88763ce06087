"""Code with the vectors of the processor, in the compiler's own language.

What a compiler makes of a loop over the few dozen values of a row spends most of its time before
and after its vectors, and loads and stores what could stay in registers. numba has no vectors of
its own; it lets a function write the code it stands for, which is what is done with this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, config
from numba.core.codegen import get_host_cpu_features


def vectors_of(features: str) -> tuple[int, int]:
    """Return the values of a vector, and how many of them a tile is wide, by a processor's names.

    Args:
        features: What it has, as LLVM names it.
    """
    if "+avx512f" in features:
        return 16, 4
    return (8, 2) if "+avx" in features else (4, 2)


#: Values of a vector, and vectors of a row of a tile: with four rows, most of the registers. What
#: numba compiles for is what counts, which is less than the processor has if it is told so.
LANES, VECTORS = vectors_of(
    get_host_cpu_features() if config.CPU_FEATURES is None else config.CPU_FEATURES
)

#: Bytes of a value.
SIZE = 4

#: Bytes that a processor's cache takes in at a time.
LINE = 64

BIT, INT, WORD, FLOAT = ir.IntType(1), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)
_MASK = ir.VectorType(BIT, LANES)

#: Flags of a product and the sum it is part of. numba adds its own to what has none, among them
#: that terms may change places, which is not meant here: an exponential depends on their order.
_FUSED = ("contract",)


class Matrix(NamedTuple):
    """A matrix in the code that is being written."""

    builder: ir.IRBuilder
    #: Address of the first value.
    start: ir.Value
    rows: ir.Value
    columns: ir.Value
    #: Bytes to the next row.
    row_step: ir.Value
    #: Bytes to the next column.
    column_step: ir.Value

    def at(self, row: ir.Value, column: ir.Value) -> ir.Value:
        """Return the address of a place."""
        add, mul = self.builder.add, self.builder.mul
        return add(add(self.start, mul(row, self.row_step)), mul(column, self.column_step))

    def pieces(self, row: ir.Value, count: ir.Value, width: ir.Value) -> Matrix:
        """View a row as a matrix of pieces."""
        step, zero = self.builder.mul(width, self.column_step), ir.Constant(WORD, 0)
        return Matrix(self.builder, self.at(row, zero), count, width, step, self.column_step)


class Code:
    """Writes code.

    Args:
        context: numba's, of what is being compiled.
        builder: Where the code is written.
    """

    def __init__(self, context: Any, builder: ir.IRBuilder) -> None:
        self._context, self.builder = context, builder

    def number(self, value: int) -> ir.Constant:
        """Return a whole number."""
        return ir.Constant(WORD, value)

    def constant(self, value: float | np.float32) -> ir.Constant:
        """Return a vector of one value."""
        return ir.Constant(VECTOR, [ir.Constant(FLOAT, float(value))] * LANES)

    def integers(self, value: int | np.int32) -> ir.Constant:
        """Return a vector of one whole number."""
        return ir.Constant(INTS, [ir.Constant(INT, int(value))] * LANES)

    def count_from(self, first: ir.Value, count: int) -> list[ir.Value]:
        """Return whole numbers that follow each other."""
        return [self.builder.add(first, self.number(step)) for step in range(count)]

    def matrix(self, kind: Any, value: ir.Value) -> Matrix:
        """Look into numba's description of a matrix, or of a row; ``kind`` is its type."""
        builder = self.builder
        array = self._context.make_array(kind)(self._context, builder, value)
        shape = cgutils.unpack_tuple(builder, array.shape, kind.ndim)
        steps = cgutils.unpack_tuple(builder, array.strides, kind.ndim)
        if kind.ndim == 1:
            shape, steps = [self.number(1), *shape], [self.number(0), *steps]
        if kind.layout == "C":
            steps[1] = self.number(kind.dtype.bitwidth // 8)
        return Matrix(builder, builder.ptrtoint(array.data, WORD), *shape, *steps)

    def find(self, pairs: Matrix, number: ir.Value, otherwise: ir.Value) -> ir.Value:
        """Return what stands below a number in two rows of whole numbers, if it is there."""
        builder, found = self.builder, self.keep(otherwise)

        def at(row: int, column: ir.Value) -> ir.Value:
            place = pairs.at(self.number(row), column)
            return builder.load(builder.inttoptr(place, WORD.as_pointer()))

        with cgutils.for_range(builder, pairs.columns) as each:
            is_it = builder.icmp_signed("==", at(0, each.index), number)
            with builder.if_then(is_it):
                builder.store(at(1, each.index), found)
        return builder.load(found)

    def keep(self, value: ir.Value) -> ir.Value:
        """Give a value that changes a place of its own, which becomes a register."""
        return cgutils.alloca_once_value(self.builder, value)

    def value(self, address: ir.Value) -> ir.Value:
        """Load one value."""
        return self.builder.load(self.builder.inttoptr(address, FLOAT.as_pointer()))

    def add_value(self, value: ir.Value, address: ir.Value) -> None:
        """Add to one value."""
        total = self.builder.fadd(self.value(address), value)
        self.builder.store(total, self.builder.inttoptr(address, FLOAT.as_pointer()))

    def use(self, vector: ir.Value) -> None:
        """Make the compiler believe that all of a vector is used for something."""
        bits = self.builder.bitcast(self.total(vector), INT)
        kind = ir.FunctionType(ir.VoidType(), [INT])
        self.builder.asm(kind, "", "r", [bits], side_effect=True)

    def prefetch(self, address: ir.Value) -> None:
        """Ask for what is at an address to be brought into the processor's second cache.

        Nothing waits for it, and an address where there is nothing does no harm.
        """
        place = self.builder.inttoptr(address, ir.IntType(8).as_pointer())
        args = [place, *(ir.Constant(INT, value) for value in (0, 2, 1))]  # to read, near, data
        kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        self.builder.call(function, args)

    def spread(self, value: ir.Value) -> ir.Value:
        """Return a vector of one value, a float or a whole number."""
        kind = VECTOR if value.type == FLOAT else INTS
        empty = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(empty, value, ir.Constant(INT, 0))
        return self.builder.shuffle_vector(first, empty, ir.Constant(INTS, None))

    def multiply_add(self, left: ir.Value, right: ir.Value, more: ir.Value) -> ir.Value:
        """Return ``left * right + more``."""
        product = self.builder.fmul(left, right, flags=_FUSED)
        return self.builder.fadd(product, more, flags=_FUSED)

    def add(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Return the sum of two vectors, as it stands: no other sum may take its place."""
        return self.builder.fadd(left, right, flags=_FUSED)

    def subtract(self, left: ir.Value, right: ir.Value) -> ir.Value:
        """Return the difference of two vectors, as it stands."""
        return self.builder.fsub(left, right, flags=_FUSED)

    def turned(self, vectors: Sequence[ir.Value]) -> list[ir.Value]:
        """Return as many vectors as each has values: the first values of all, the second, ..."""
        found, step = list(vectors), LANES // 2
        while step:
            # Blocks of this size, above the diagonal and below it, change places.
            following = list(found)
            for first in (index for index in range(LANES) if not index & step):
                pair = found[first], found[first + step]
                for place, own in ((first, 0), (first + step, step)):
                    lanes = [
                        (lane & ~step | own) + (LANES if lane & step else 0)
                        for lane in range(LANES)
                    ]
                    choice = ir.Constant(INTS, [ir.Constant(INT, lane) for lane in lanes])
                    following[place] = self.builder.shuffle_vector(*pair, choice)
            found, step = following, step // 2
        return found

    def add_product(self, total: ir.Value, left: ir.Value, right: ir.Value) -> None:
        """Add the product of two vectors to a kept one."""
        builder = self.builder
        builder.store(self.multiply_add(left, right, builder.load(total)), total)

    def total(self, vector: ir.Value) -> ir.Value:
        """Return the sum of the values of a vector."""
        zero = ir.Constant(FLOAT, 0)
        return self.call("vector.reduce.fadd", FLOAT, [zero, vector], fastmath=("reassoc",))

    def mask(self, count: ir.Value) -> ir.Value:
        """Return what lets the first values of a vector through."""
        lanes = ir.Constant(INTS, [ir.Constant(INT, lane) for lane in range(LANES)])
        count = self.spread(self.builder.trunc(count, INT))
        return self.builder.icmp_signed("<", lanes, count)

    def let(self, mask: ir.Value | None, value: ir.Value, otherwise: ir.Value) -> ir.Value:
        """Return what a mask lets through, and something else in other places."""
        return value if mask is None else self.builder.select(mask, value, otherwise)

    def load(self, address: ir.Value, mask: ir.Value | None = None) -> ir.Value:
        """Load a vector, zero where a mask does not let it through."""
        place = self.builder.inttoptr(address, VECTOR.as_pointer())
        if mask is None:
            return self.builder.load(place, align=SIZE)
        args = [place, ir.Constant(INT, SIZE), mask, ir.Constant(VECTOR, None)]
        return self.call("masked.load", VECTOR, args, suffix=".p0")

    def store(self, value: ir.Value, address: ir.Value, mask: ir.Value | None = None) -> None:
        """Store a vector where a mask lets it through."""
        place = self.builder.inttoptr(address, VECTOR.as_pointer())
        if mask is None:
            self.builder.store(value, place, align=SIZE)
        else:
            args = [value, place, ir.Constant(INT, SIZE), mask]
            self.call("masked.store", ir.VoidType(), args, suffix=".p0")

    def load_all(self, address: ir.Value, vectors: int, mask: ir.Value | None) -> list[ir.Value]:
        """Load vectors that are next to each other, the last of them through a mask."""
        return [self.load(*place) for place in self._vectors(address, vectors, mask)]

    def store_all(
        self, values: Sequence[ir.Value], address: ir.Value, mask: ir.Value | None
    ) -> None:
        """Store vectors next to each other, the last of them through a mask."""
        places = self._vectors(address, len(values), mask)
        for value, place in zip(values, places, strict=True):
            self.store(value, *place)

    def over_vectors(
        self, count: ir.Value, write: Callable[[ir.Value, ir.Value | None], None]
    ) -> None:
        """Write a loop over the vectors of a row, the last of which may be masked.

        Args:
            count: Values of the row.
            write: Writes what is to be done from a column on, through a mask if there is one.
        """
        builder, lanes = self.builder, self.number(LANES)
        whole = builder.udiv(count, lanes)
        with cgutils.for_range(builder, whole) as loop:
            write(builder.mul(loop.index, lanes), None)
        done = builder.mul(whole, lanes)
        rest = builder.sub(count, done)
        with builder.if_then(builder.icmp_signed(">", rest, self.number(0))):
            write(done, self.mask(rest))

    def call(
        self,
        name: str,
        result: ir.Type,
        args: Sequence[ir.Value],
        *,
        suffix: str = "",
        fastmath: Sequence[str] = (),
    ) -> ir.Value:
        """Call one of LLVM's own functions of vectors of floats."""
        kind = ir.FunctionType(result, [arg.type for arg in args])
        full = f"llvm.{name}.v{LANES}f32{suffix}"
        function = cgutils.get_or_insert_function(self.builder.module, kind, full)
        return self.builder.call(function, args, fastmath=fastmath)

    def nothing(self) -> ir.Value:
        """Return what a function without a result returns."""
        return self._context.get_dummy_value()

    def _vectors(
        self, address: ir.Value, count: int, mask: ir.Value | None
    ) -> list[tuple[ir.Value, ir.Value | None]]:
        """Place the vectors from an address on, and mask the last."""
        places = []
        for index in range(count):
            place = self.builder.add(address, self.number(index * LANES * SIZE))
            own = mask if index == count - 1 else None
            places.append((place, own))
        return places
