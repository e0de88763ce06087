"""Writing and hashing shards in threads of their own while the model computes the rows to come."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import CacheError
from . import BlockMemory, RowBlock, ShardInfo, ShardWriter
from .planning import CachePlan

# --- work that goes on in a thread of its own while the caller computes


class Background:
    """Runs jobs one after the other, in order, in one thread; a context manager.

    At most ``waiting`` jobs are under way: one more waits for the first of them. When a job fails,
    no later one runs, and its error is raised by the next :meth:`run` or :meth:`wait`, or at the
    end.
    """

    def __init__(self, waiting: int) -> None:
        self._waiting = waiting
        self._jobs: deque[Future[None]] = deque()
        self._failed = False
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        # The thread is there before the first job: one that is interrupted as it starts is lost.
        self._pool.submit(_nothing).result()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._failed = self._failed or error is not None
        interrupt = self._wait()
        self._pool.shutdown()  # at once: there is nothing left to do
        if error is None:
            if interrupt is not None:
                raise interrupt
            self._collect(0)

    def run(self, job: Callable[..., object], *arguments: Any) -> None:
        """Run a job after those that were given before it."""
        self._collect(self._waiting - 1)
        self._jobs.append(self._pool.submit(self._run, job, arguments))

    def wait(self) -> None:
        """Wait until all jobs are done."""
        self._collect(0)

    def _collect(self, left: int) -> None:
        """Wait until no more than ``left`` jobs are under way."""
        while len(self._jobs) > left:
            self._jobs.popleft().result()

    def _wait(self) -> KeyboardInterrupt | None:
        """Wait for the job in hand, which must not be left half done; return what came meanwhile.

        Not by joining the thread: Python takes one for ended whose join was interrupted.
        """
        interrupt = None
        while True:
            try:
                self._pool.submit(_nothing).result()  # comes after all others
            except KeyboardInterrupt as found:
                self._failed, interrupt = True, found
            else:
                return interrupt

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        if self._failed:
            return
        try:
            job(*arguments)
        except BaseException:
            self._failed = True
            raise


def _nothing() -> None:
    """Do nothing."""


#: Blocks that are being written or wait for it, at most. Two cover the time in which a shard is
#: synced.
_BLOCKS_WAITING = 2

#: Shards that wait for their hash, at most. They are complete: a kill costs none of them.
_SHARDS_WAITING = 4


class ShardThread:
    """Writes the blocks of one shard after the other; a context manager.

    The shards and their blocks come in order; there is one unfinished shard at a time, and none
    once an error has left the context. An error of the thread is raised by a later call.

    Hashing waits until some shards are complete, and the model waits for it: PyTorch computes in
    all cores, and an operation lasts as long as the core that has something else to do. Where that
    is not so, shards are hashed as they come.
    """

    #: What the manifest says of every shard that is complete, by its number.
    infos: dict[int, ShardInfo]

    def __init__(self, plan: CachePlan, folder: Path) -> None:
        self.infos = {}
        self._plan = plan
        self._folder = folder
        self._writing = Background(_blocks_waiting(plan))
        threads = min(torch.get_num_threads(), _SHARDS_WAITING)
        self._hashing = [Background(_SHARDS_WAITING) for _ in range(threads)]
        self._hashing_in_turn = cycle(self._hashing)
        self._hashes_at_once = _has_spare_cores(plan.device)
        self._unhashed: deque[ShardWriter] = deque()
        self._memory = BlockMemory(plan.layout, plan.batch_nodes)
        self._unfinished: ShardWriter | None = None
        self._contexts = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as contexts:
            for thread in self._hashing:
                contexts.enter_context(thread)
            contexts.callback(self._discard)
            contexts.enter_context(self._writing)
            self._contexts = contexts.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._contexts.__exit__(kind, error, traceback)
            return
        with self._contexts:
            self._start_hashing()  # while the last shard is written and synced
            self._writing.wait()
            self._start_hashing()

    def _discard(self) -> None:
        if self._unfinished is not None:
            self._unfinished.discard()

    def block(self, writer: ShardWriter, graphs: range) -> RowBlock:
        """Return a block for these graphs of a shard."""
        return writer.block(graphs, self._memory)

    def write(self, writer: ShardWriter, block: RowBlock, outputs: Tensor | None) -> None:
        """Hand over a block that is filled; its first opens a shard, its last closes it."""
        self._writing.run(self._write, writer, block, outputs)
        if self._hashes_at_once:
            self._start_hashing()
        elif len(self._unhashed) >= _SHARDS_WAITING:
            self._start_hashing()
            for thread in self._hashing:
                thread.wait()

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
            self._unhashed.append(writer)

    def _start_hashing(self) -> None:
        """Begin with the shards that are complete."""
        while self._unhashed:
            next(self._hashing_in_turn).run(self._hash, self._unhashed.popleft())

    def _hash(self, writer: ShardWriter) -> None:
        self.infos[writer.index] = writer.info

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


def _blocks_waiting(plan: CachePlan) -> int:
    """Return how many blocks may wait: all of them, which a kill costs, are less than a shard."""
    blocks_of_shard = plan.options.shard_bytes // (plan.batch_nodes * plan.layout.row_bytes)
    return _BLOCKS_WAITING if blocks_of_shard > _BLOCKS_WAITING else 1


def _has_spare_cores(device: torch.device) -> bool:
    """Say whether a thread of our own has a core that PyTorch does not compute in."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return device.type != "cpu" or cores > torch.get_num_threads()
