"""How the loops are compiled, and how graphs are shared out among threads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic

from ..fast_path import LOOP_NORMALIZATIONS

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

#: Types of arguments: rows next to each other in memory, one of them, any view of a matrix; a count
#: and a factor; some counts.
ROWS, ROW, VIEW = numba.float32[:, ::1], numba.float32[::1], numba.float32[:, :]
NUMBER, FACTOR, NUMBERS = numba.int64, numba.float32, numba.int64[::1]

#: In single precision: a Python number would make a sum double.
ZERO, ONE = np.float32(0), np.float32(1)

_Loop = TypeVar("_Loop", bound=Callable[..., object])

#: Sums may be made in any order and products fused with them, which is what makes vectors of them;
#: infinite values and NaN stay what they are.
REASSOCIATED = {"reassoc", "contract", "nsz", "arcp"}

#: Multiplications that are not worth to be cut into parts: a tenth of a millisecond's.
SMALL_WORK = 2_000_000

#: Where parts end, in shares of all work: large ones first, because each has gradients of its own
#: that are added up in the end; then small ones, because threads wait for the last of them.
PART_ENDS = np.array([4, 8, 12, 16, 18, 20, 21, 22, 23]) / 24

#: Copies of a head that have half as many parts.
MANY_COPIES = 4


def loop(function: _Loop) -> _Loop:
    """Compile a function when it is first called, and keep the code for the next process."""
    return _compiled(function, None)


def part_of_loop(function: _Loop) -> _Loop:
    """Make a function a part of the one that calls it, compiled with it and not once more."""
    return _compiled(function, None, inline="always")


def loop_on(*types: Any) -> Callable[[_Loop], _Loop]:
    """Compile a function for these types of arguments alone: once, whatever views it is given."""
    return lambda function: _compiled(function, numba.void(*types))


def _compiled(function: _Loop, signature: Any, inline: str = "never") -> _Loop:
    options = {"nogil": True, "fastmath": REASSOCIATED, "error_model": "numpy", "inline": inline}
    keep = code_folder() is not None
    return cast(_Loop, numba.njit(signature, cache=keep, **options)(function))


@cache
def code_folder() -> str | None:
    """Return where code is kept, none of it older than the loops; None if there is no place."""
    try:
        folder: str = numba.njit(cache=True)(_nothing).stats.cache_path
    except RuntimeError:
        return None
    forget_old_code(Path(folder))
    return folder


def _nothing() -> None:
    """Do nothing; numba keeps the code of this as it does that of the loops."""


def forget_old_code(folder: Path) -> None:
    """Drop code of other loops than these: numba looks at the file of a function, not of others."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("*.py")), here.parent / "folded_maps.py"]
    texts = [source.read_bytes() for source in sources]
    digest = hashlib.sha256(b"".join([repr(LOOP_NORMALIZATIONS).encode(), *texts])).hexdigest()
    mark = folder / "loops.sha256"
    with suppress(OSError):
        if mark.read_text() == digest:
            return
    with suppress(OSError):  # another process may do the same
        folder.mkdir(parents=True, exist_ok=True)
        for source in sources:
            for kept in folder.glob(f"{source.stem}.*.nb[ci]"):
                kept.unlink(missing_ok=True)
        mark.write_text(digest)


class Parts(NamedTuple):
    """Parts of a batch that threads take one after the other."""

    #: The first graph of each part, and the number of graphs, ``[parts + 1]``.
    bounds: Integers
    #: The next part to be taken, ``[1]``.
    next: Integers


@intrinsic
def take_number(typing, next_number):  # type: ignore[no-untyped-def]  # numba looks at its names
    """Return a number and go on to the next, in one step that no other thread can come between.

    Args:
        typing: numba's.
        next_number: ``[1]``.
    """
    signature = numba.int64(next_number)

    def write(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        one = context.get_constant(numba.int64, 1)
        return builder.atomic_rmw("add", array.data, one, "monotonic")

    return signature, write


class Shares:
    """How the graphs of a batch are shared out among threads.

    The parts depend on the graphs alone, so that a result is the same for any number of threads;
    which thread takes a part depends on which of them is free.

    Args:
        costs: Multiplications of each graph, about: ``[num_graphs]``.
    """

    def __init__(self, costs: Integers) -> None:
        total = np.cumsum(costs)  # [num_graphs]
        goals = total[-1] * PART_ENDS if total[-1] > SMALL_WORK else []
        self._bounds = np.unique([0, *(np.searchsorted(total, goals) + 1), len(costs)])

    def parts(self, copies: int) -> Parts:
        """Return the parts, the first of them to be taken next.

        Args:
            copies: Of the head; many have large gradients, and half as many parts of them.
        """
        bounds = self._bounds
        if copies >= MANY_COPIES:
            bounds = np.append(bounds[:-1:2], bounds[-1])
        return Parts(bounds, np.zeros(1, np.int64))
