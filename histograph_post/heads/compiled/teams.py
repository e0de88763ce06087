"""Loops that all threads of PyTorch run at once: each takes parts of the work until none is left.

Its threads are called from compiled code. A function of Python would have each of them wait for the
interpreter's lock, which takes longer than many of these loops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import wait
from threading import Lock
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...helper_threads import start_helper
from ...openmp import team_address
from .loops import Integers, Parts, loop
from .vector_code import INT, WORD, Code

#: Multiplications that are worth a second thread: a hundredth of a millisecond's.
TEAM_WORK = 500_000

#: What came of calling a loop in a team.
DONE, UNKNOWN, FAILED = 0, 1, 2

# numba looks at the names of arguments and calls this with types, which become code.
# mypy: disable-error-code="no-untyped-def"

_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def call_in_team(typing, entries, address, threads, arguments):
    """Call a loop in each of some threads, this one among them, and wait for all of them.

    The loop is known by its address alone: what it is made of would be compiled once more with
    whoever calls it.

    Args:
        typing: numba's.
        entries: Where the loop begins that is compiled for some types of arguments, by their
            :func:`number_of`: ``[2, n]``.
        address: Of what starts the threads, see :func:`~histograph_post.openmp.team_address`.
        threads: How many, as PyTorch has them: a team of another size is slow to come together.
        arguments: A tuple of what the loop is given.

    Returns:
        :data:`DONE`; :data:`UNKNOWN` if there is no entry for these types, and nothing was called;
        :data:`FAILED` if one of the calls failed: there was no memory.
    """
    signature = types.int64(entries, types.int64, types.int64, arguments)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        code, (entries, address, threads, values) = Code(context, builder), args
        kinds = tuple(signature.args[3].types)
        result = code.keep(code.number(UNKNOWN))
        entry = code.find(
            code.matrix(signature.args[0], entries), code.number(number_of(kinds)), code.number(0)
        )
        with builder.if_then(builder.icmp_signed("!=", entry, code.number(0))):
            # What a thread is handed: the arguments, where the loop is, and whether it failed.
            handed_kind = ir.LiteralStructType([values.type, WORD, WORD])
            handed = cgutils.alloca_once(builder, handed_kind)
            for place, value in enumerate((values, entry, code.number(DONE))):
                builder.store(value, cgutils.gep_inbounds(builder, handed, 0, place))
            member = _member(context, builder.module, handed_kind, kinds)
            starts = ir.FunctionType(ir.VoidType(), [member.type, _BYTES, INT, INT])
            builder.call(
                builder.inttoptr(address, starts.as_pointer()),
                [
                    member,
                    builder.bitcast(handed, _BYTES),
                    builder.trunc(threads, INT),
                    ir.Constant(INT, 0),  # no flags
                ],
            )
            builder.store(builder.load(cgutils.gep_inbounds(builder, handed, 0, 2)), result)
        return builder.load(result)

    return signature, write


def _member(
    context: Any, module: ir.Module, handed_kind: ir.Type, kinds: tuple[Any, ...]
) -> ir.Function:
    """Write what a thread does: call the loop with what it is handed."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES])
    member = ir.Function(module, kind, module.get_unique_name("member_of_team"))
    member.linkage = "internal"
    builder = ir.IRBuilder(member.append_basic_block())
    handed = builder.bitcast(member.args[0], handed_kind.as_pointer())
    values, entry, result = (cgutils.gep_inbounds(builder, handed, 0, place) for place in range(3))
    loop_kind = context.call_conv.get_function_type(types.void, kinds)
    status, _ = context.call_conv.call_function(
        builder,
        builder.inttoptr(builder.load(entry), loop_kind.as_pointer()),
        types.void,
        kinds,
        cgutils.unpack_tuple(builder, builder.load(values)),
    )
    with cgutils.if_unlikely(builder, status.is_error):
        builder.store(ir.Constant(WORD, FAILED), result)
    builder.ret_void()
    return member


def number_of(kinds: Sequence[Any]) -> int:
    """Return a number that stands for these types of arguments, the same in every process."""
    digest = hashlib.sha256(", ".join(map(str, kinds)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


class TeamLoop:
    """A loop that takes parts, in one thread or in several.

    Args:
        alone: Takes parts and does them as long as there are any, without the interpreter's lock;
            its first argument are the parts.
    """

    def __init__(self, alone: Any) -> None:
        self._alone, self._lock = alone, Lock()
        #: See :func:`call_in_team`.
        self._entries = np.zeros((2, 0), np.int64)

    def __call__(self, parts: Parts, *arguments: Any) -> None:
        """Do all parts, in as many threads as PyTorch uses."""
        threads = min(torch.get_num_threads(), len(parts.bounds) - 1)
        address = team_address() if threads > 1 else 0
        if not address:
            self._call_helped(threads, parts, *arguments)
            return
        team = address, torch.get_num_threads()
        found = start_team(self._entries, *team, parts, *arguments)
        if found == UNKNOWN:
            self._compile(parts, *arguments)
            found = start_team(self._entries, *team, parts, *arguments)
        if found != DONE:
            raise MemoryError("a loop over graphs failed in a thread, as it does without memory")

    def _compile(self, *arguments: Any) -> None:
        """Compile the loop for these arguments, and note where it begins."""
        kinds = tuple(self._alone.typeof_pyval(argument) for argument in arguments)
        self._alone.compile(kinds)
        compiled = self._alone.overloads[kinds]
        entry = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
        with self._lock:  # another thread may note where it begins for other arguments
            found = np.column_stack([self._entries, [number_of(kinds), entry]])
            self._entries = np.ascontiguousarray(found)

    def _call_helped(self, threads: int, parts: Parts, *arguments: Any) -> None:
        """Do all parts in this thread and in helpers, where PyTorch has no threads to be had."""
        coming = [start_helper(self._alone, parts, *arguments) for _ in range(threads - 1)]
        try:
            self._alone(parts, *arguments)
        finally:
            late = [helper for helper in coming if not helper.cancel()]
            wait(late)  # they write into the same tensors
        for helper in late:
            helper.result()


@loop
def start_team(entries: Integers, address: int, threads: int, *arguments: Any) -> int:
    """Do :func:`call_in_team` with all further arguments."""
    return call_in_team(entries, address, threads, arguments)
