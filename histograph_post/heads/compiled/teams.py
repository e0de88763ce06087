"""Loops that all threads of PyTorch run at once: each takes parts of the work until none is left.

Its threads are called from compiled code. A function of Python would have each of them wait for the
interpreter's lock, which takes longer than many of these loops.
"""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...helper_threads import start_helper
from ...openmp import team_address
from .loops import Parts
from .vector_code import INT

#: Multiplications that are worth a second thread: a hundredth of a millisecond's.
TEAM_WORK = 500_000

# numba looks at the names of arguments and calls this with types, which become code.
# mypy: disable-error-code="no-untyped-def"

_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def call_in_team(typing, address, threads, function, arguments):
    """Call a loop in each of some threads, this one among them, and wait for all of them.

    Args:
        typing: numba's.
        address: Of what starts them, see :func:`~histograph_post.openmp.team_address`.
        threads: How many, as PyTorch has them: a team of another size is slow to come together.
        function: The loop, without a result.
        arguments: A tuple of what it is given.

    Returns:
        Whether one of the calls failed: there was no memory.
    """
    signature = types.boolean(types.int64, types.int64, function, arguments)

    def write(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        address, threads, _, values = args
        _, _, function, kinds = signature.args
        called = function.get_call_type(context.typing_context, tuple(kinds.types), {})
        compiled = function.dispatcher.overloads[called.args]
        context.active_code_library.add_linking_library(compiled.library)

        # What a thread is handed: the arguments, and where to say that it failed.
        handed_kind = ir.LiteralStructType([values.type, INT])
        handed = cgutils.alloca_once(builder, handed_kind)
        builder.store(values, cgutils.gep_inbounds(builder, handed, 0, 0))
        builder.store(ir.Constant(INT, 0), cgutils.gep_inbounds(builder, handed, 0, 1))

        # What a thread calls with that.
        kind = ir.FunctionType(ir.VoidType(), [_BYTES])
        member = ir.Function(builder.module, kind, builder.module.get_unique_name("in_team"))
        member.linkage = "internal"
        inside = ir.IRBuilder(member.append_basic_block())
        own = inside.bitcast(member.args[0], handed_kind.as_pointer())
        passed = inside.load(cgutils.gep_inbounds(inside, own, 0, 0))
        status, _ = context.call_conv.call_function(
            inside,
            context.declare_function(builder.module, compiled.fndesc),
            called.return_type,
            called.args,
            cgutils.unpack_tuple(inside, passed),
        )
        with cgutils.if_unlikely(inside, status.is_error):
            inside.store(ir.Constant(INT, 1), cgutils.gep_inbounds(inside, own, 0, 1))
        inside.ret_void()

        starts = ir.FunctionType(ir.VoidType(), [kind.as_pointer(), _BYTES, INT, INT])
        builder.call(
            builder.inttoptr(address, starts.as_pointer()),
            [
                member,
                builder.bitcast(handed, _BYTES),
                builder.trunc(threads, INT),
                ir.Constant(INT, 0),  # no flags
            ],
        )
        failed = builder.load(cgutils.gep_inbounds(builder, handed, 0, 1))
        return builder.icmp_signed("!=", failed, ir.Constant(INT, 0))

    return signature, write


class TeamLoop:
    """A loop that takes parts, in one thread or in several.

    Args:
        alone: Takes parts and does them as long as there are any, without the interpreter's lock;
            its first argument are the parts.
        in_team: Takes the address of what starts a team and the number of its threads, then what
            ``alone`` takes, and has each of them call it: by :func:`call_in_team`, because code
            that is kept must name its loops.
    """

    def __init__(self, alone: Any, in_team: Any) -> None:
        self._alone, self._in_team = alone, in_team

    def __call__(self, parts: Parts, *arguments: Any) -> None:
        """Do all parts, in as many threads as PyTorch uses."""
        threads = min(torch.get_num_threads(), len(parts.bounds) - 1)
        address = team_address() if threads > 1 else 0
        if address:
            self._in_team(address, torch.get_num_threads(), parts, *arguments)
            return
        coming = [start_helper(self._alone, parts, *arguments) for _ in range(threads - 1)]
        try:
            self._alone(parts, *arguments)
        finally:
            late = [helper for helper in coming if not helper.cancel()]
            wait(late)  # they write into the same tensors
        for helper in late:
            helper.result()
