"""A cache: writing it against plain forward passes, reading it, and half precision."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Batch

from histograph_post.caches.caching import cache
from histograph_post.caches.planning import plan_cache
from histograph_post.heads.ragged import ranges
from histograph_post.models import call_model
from histograph_post.splits import resolve_splits
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.utils.machine import give_memory_back, keep_memory

from .epochs import HeadTraining
from .measuring import Ratio, cost, race, speedup
from .workloads import Subject, Workloads

GIN_CEILING, GCN_CEILING = 1.5, 1.2
#: The command keeps freed memory for reuse; a plain program does so only if it asks for it.
CACHE, FORWARD, KEPT = "cache", "forward passes", "forward passes, memory kept"


def caching(work: Workloads) -> list[Ratio]:
    """Compare making a cache, from the first probe to the last byte, with running the model."""
    return [
        *_caching(work, work.shallow_gin, "cache of NCI1", GIN_CEILING),
        *_caching(work, work.molecule_gcn, "cache of BBBP", GCN_CEILING),
    ]


def _caching(work: Workloads, subject: Subject, name: str, ceiling: float) -> list[Ratio]:
    place = work.folder / "written.cache"
    plan = plan_cache(
        subject.model, subject.dataset, resolve_splits(subject.dataset, None), device="cpu"
    )

    def write() -> None:
        keep_memory()
        # A new data set has not been hashed yet, as in the command.
        cache(subject.model, replace(subject.dataset), place, device="cpu")

    @torch.inference_mode()
    def forward(prepare: Callable[[], None]) -> None:
        prepare()
        for graphs in plan.batches(0, len(subject.dataset)):
            members = subject.dataset.graphs[graphs.start : graphs.stop]
            call_model(subject.model, Batch.from_data_list(members))

    medians = race(
        {
            CACHE: write,
            FORWARD: partial(forward, give_memory_back),
            KEPT: partial(forward, keep_memory),
        },
        rounds=work.sizes.rounds,
        after=partial(shutil.rmtree, place, ignore_errors=True),
    )
    give_memory_back()
    return [
        cost(name, medians, CACHE, other, ceiling, note=f"float32; {subject.about}")
        for other in (FORWARD, KEPT)
    ]


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
            MEMORY: partial(epoch, LoadedCache(cache).history(None).select),
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


#: Of bytes: half, and the edges, which stay as they are.
SIZE_CEILING = 0.55
#: Of time: not slower, up to timing noise.
TIME_CEILING = 1.1

HALF, SINGLE = "float16", "float32"


def half_precision(work: Workloads) -> list[Ratio]:
    """Compare bytes, and epochs from memory and from the file; the note has the metrics."""
    subject = work.deep_gin
    caches = {dtype: work.cache(subject, dtype) for dtype in (HALF, SINGLE)}
    num_bytes = {
        dtype: float(sum(shard.num_bytes for shard in stored.manifest.shards))
        for dtype, stored in caches.items()
    }
    found = [
        cost("float16 cache, bytes", num_bytes, HALF, SINGLE, SIZE_CEILING, note=subject.about)
    ]
    for place, limit in (("in memory", None), ("from the file", 0)):
        trainings = {
            dtype: HeadTraining.of(work, stored, memory_limit=limit)
            for dtype, stored in caches.items()
        }
        medians = race(
            {dtype: training.run for dtype, training in trainings.items()},
            rounds=work.sizes.rounds,
        )
        metrics = (
            f"{dtype} {training.run(work.sizes.epochs).best_valid[training.task.metric]:.4f}"
            for dtype, training in trainings.items()
        )
        note = f"valid {trainings[HALF].task.metric}, {work.sizes.epochs} epochs: "
        note += f"{', '.join(metrics)}; {subject.about}"
        name = f"float16 cache, epoch {place}"
        found.append(cost(name, medians, HALF, SINGLE, TIME_CEILING, note=note))
    return found
