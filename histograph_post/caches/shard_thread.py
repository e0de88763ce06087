"""Writing shards in a thread of its own while the model computes the rows to come."""

from __future__ import annotations

import shutil
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from ..errors import CacheError
from .layout import ShardInfo
from .planning import CachePlan
from .row_writers import BlockMemory, RowBlock
from .writer import ShardWriter

#: Blocks that are being written or wait for it, at most. Two cover the time in which a shard is
#: hashed and synced.
_MOST_BLOCKS = 2


class ShardThread:
    """Writes the blocks of one shard after the other; a context manager.

    The shards and their blocks come in order. One shard at a time is unfinished, and none once the
    context is left. After an error nothing more is written; a later call, or the end of the
    context, raises it.
    """

    #: What the manifest says of every shard that is complete, by its number.
    infos: dict[int, ShardInfo]

    def __init__(self, plan: CachePlan, folder: Path) -> None:
        self.infos = {}
        self._plan = plan
        self._folder = folder
        self._memory = BlockMemory(plan.layout, plan.batch_nodes)
        # All blocks that wait, which a kill costs, are less than a shard.
        blocks_of_shard = plan.options.shard_bytes // (plan.batch_nodes * plan.layout.row_bytes)
        self._most_blocks = _MOST_BLOCKS if blocks_of_shard > _MOST_BLOCKS else 1
        self._pool = ThreadPoolExecutor(1)
        self._blocks: deque[Future[None]] = deque()
        self._stopped = False
        self._unfinished: ShardWriter | None = None

    def __enter__(self) -> Self:
        # The thread is there before the first block: one that is interrupted as it starts is lost.
        self._pool.submit(int).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._wait(0)
        finally:
            self._stopped = True
            self._pool.shutdown()  # after the block in hand, which must not be left half written
            if self._unfinished is not None:
                self._unfinished.discard()

    def block(self, writer: ShardWriter, graphs: range) -> RowBlock:
        """Return a block for these graphs of a shard."""
        return writer.block(graphs, self._memory)

    def write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        """Hand over a block that is filled; its first opens a shard, its last closes it."""
        self._wait(self._most_blocks - 1)
        self._blocks.append(self._pool.submit(self._write, writer, block, outputs))

    def _wait(self, most: int) -> None:
        """Wait until no more than ``most`` blocks are left; raise what went wrong with others."""
        while len(self._blocks) > most:
            self._blocks.popleft().result()

    def _write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        if self._stopped:
            return
        try:
            self._require_space(writer, block)
            if block.graphs.start == 0:
                self._unfinished = writer
                writer.open()
            writer.write(block, outputs)
            self._memory.give(block)
            if block.graphs.stop == writer.num_graphs:
                writer.close()
                self._unfinished = None
                self.infos[writer.index] = writer.info
        except BaseException:
            self._stopped = True
            raise

    def _require_space(self, writer: ShardWriter, block: RowBlock) -> None:
        """Stop before a full disk, which HDF5 does not survive."""
        # A plain shard takes all of its space at once, a compressed one by and by.
        if self._plan.layout.compression is not None:
            num_nodes, what = block.num_nodes, "batch"
        elif block.graphs.start == 0:
            num_nodes, what = writer.num_nodes, "shard"
        else:
            return
        needed = num_nodes * self._plan.layout.row_bytes
        free = shutil.disk_usage(self._folder).free
        if free < needed * 1.05 + 2**20:
            raise CacheError(
                f"{self._folder}: found {free / 1e6:.0f} MB of free space, "
                f"expected {needed / 1e6:.0f} MB for the next {what}; "
                "make room and give the same command again"
            )
