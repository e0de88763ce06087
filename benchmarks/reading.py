"""Batches in random order: from the mapped file of a warm cache, and from memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from histograph_post.heads.ragged import ranges
from histograph_post.training.history_rows import history_rows
from histograph_post.training.memory import MemoryBudget

from .measuring import Ratio, race, speedup
from .workloads import Workloads

FLOOR = 0.8
FILE, MEMORY, PLAIN = "mapped file", "rows in memory", "gather from a tensor"


def reading(work: Workloads) -> list[Ratio]:
    """Compare the batches of an epoch with the same gather from a plain tensor."""
    cache, size = work.cache(work.deep_gin), work.sizes.batch_size
    order = np.random.default_rng(0).permutation(len(cache))
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    stored = cache.gather(np.arange(len(cache))).history  # [num_nodes, L, D]
    assert isinstance(stored, Tensor)  # all layers of this backbone have one width
    ptr = cache.node_ptr  # [num_graphs + 1]

    def plain(graphs: np.ndarray) -> Tensor:
        nodes = torch.from_numpy(ranges(ptr[graphs], ptr[graphs + 1]))  # [num_nodes]
        return stored.index_select(0, nodes)

    def epoch(select: Callable[[np.ndarray], object]) -> None:
        for graphs in batches:
            select(graphs)

    medians = race(
        {
            FILE: partial(epoch, cache.gather),
            MEMORY: partial(epoch, history_rows(MemoryBudget(cache), None).select),
            PLAIN: partial(epoch, plain),
        },
        rounds=work.sizes.rounds,
        steps=work.sizes.steps,
    )
    note = f"{len(batches)} batches of {size}; {work.deep_gin.about}"
    return [
        speedup(f"batches in random order, {ours}", medians, ours, PLAIN, FLOOR, note=note)
        for ours in (FILE, MEMORY)
    ]
