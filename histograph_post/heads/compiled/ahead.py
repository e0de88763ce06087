"""The history of the next graph is fetched while the last one is computed with.

Memory takes hundreds of cycles to answer, and takes in only a few requests at a time: a processor
that reads a history when it needs it waits for most of that time. A product of matrices leaves
room for a request in each of its steps. How far they are is two numbers: the address that is next,
and the one where to stop. They are addresses, because nothing is read there but by the processor.
"""

from __future__ import annotations

from .graph_records import Table
from .loops import Floats, Integers, Parts, loop
from .products import BLOCK, fetch_rows
from .vector_code import SIZE


@loop
def look_ahead(
    table: Table, parts: Parts, part: int, graph: int, channels: int, ahead: Integers
) -> None:
    """Say what is to be fetched: the history of the graph that this thread will probably read next.

    Args:
        table: The history.
        parts: Parts of the batch.
        part: The part that is read now.
        graph: The graph of it.
        channels: Of a layer.
        ahead: Filled in: from which address on and up to which, ``[2]``; zero if nothing is to be
            fetched, because there is no other graph, or it is copied or is too large.
    """
    following = graph + 1
    if following == parts.bounds[part + 1]:  # another thread may come first: then it is in vain
        following = parts.bounds[min(parts.next[0], len(parts.bounds) - 1)]
    ahead[:] = 0
    if following < len(table.starts) and table.stride == table.num_layers * channels:
        size = (table.ptr[following + 1] - table.ptr[following]) * table.stride
        if size <= BLOCK:
            ahead[0] = table.values.ctypes.data + table.starts[following] * table.stride * SIZE
            ahead[1] = ahead[0] + size * SIZE


@loop
def fetch_rest(history: Floats, ahead: Integers) -> None:
    """Bring a history ``[n, L * D]`` into the processor's cache, but for what is there already."""
    start, values = history.ctypes.data, history.reshape(-1)
    done = 0
    if start <= ahead[0] and ahead[1] == start + history.size * SIZE:
        done = (ahead[0] - start) // SIZE
    fetch_rows(values[done:].reshape(1, -1))
