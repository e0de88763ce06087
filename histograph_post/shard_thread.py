"""Writing shards in a thread of their own while the model computes the rows to come."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from .background import Background
from .cache_plan import CachePlan
from .errors import CacheError
from .storage import BlockMemory, RowBlock, ShardInfo, ShardWriter

#: Blocks that are being written or wait for it: the model runs ahead by one batch, no more, so
#: that a kill costs no more than the shard that is being written.
_BLOCKS_WAITING = 1


class ShardThread:
    """Writes the blocks of one shard after the other; a context manager.

    The shards and their blocks come in order; there is one unfinished shard at a time, and none
    once an error has left the context. An error of the thread is raised by a later call.
    """

    #: What the manifest says of every shard that is complete, by its number.
    infos: dict[int, ShardInfo]

    def __init__(self, plan: CachePlan, folder: Path) -> None:
        self.infos = {}
        self._plan = plan
        self._folder = folder
        self._background = Background(_BLOCKS_WAITING)
        self._memory = BlockMemory(plan.layout, plan.batch_nodes)
        self._unfinished: ShardWriter | None = None

    def __enter__(self) -> Self:
        self._background.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._background.__exit__(kind, error, traceback)
        finally:
            if self._unfinished is not None:
                self._unfinished.discard()

    def block(self, writer: ShardWriter, graphs: range) -> RowBlock:
        """Return a block for these graphs of a shard."""
        return writer.block(graphs, self._memory)

    def write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        """Hand over a block that is filled; its first opens a shard, its last closes it."""
        self._background.run(self._write, writer, block, outputs)

    def _write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        # A plain shard takes all of its space at once, a compressed one by and by.
        is_first, compressed = block.graphs.start == 0, self._plan.layout.compression is not None
        if compressed:
            self._check_space(block.num_nodes, "batch")
        elif is_first:
            self._check_space(writer.num_nodes, "shard")
        if is_first:
            self._unfinished = writer
            writer.open()
        writer.write(block, outputs)
        self._memory.give(block)
        if block.graphs.stop == writer.num_graphs:
            writer.close()
            self._unfinished = None
            self.infos[writer.info.index] = writer.info

    def _check_space(self, num_nodes: int, what: str) -> None:
        """Stop before a full disk, which HDF5 does not survive."""
        needed = num_nodes * self._plan.layout.row_bytes
        free = shutil.disk_usage(self._folder).free
        if free < needed * 1.05 + 2**20:
            raise CacheError(
                f"{self._folder}: found {free / 1e6:.0f} MB of free space, "
                f"expected {needed / 1e6:.0f} MB for the next {what}; "
                "make room and give the same command again"
            )
