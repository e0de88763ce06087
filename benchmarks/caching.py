"""Writing a cache against the plain forward passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch_geometric.data import Batch

from histograph_post.caches.caching import cache
from histograph_post.caches.planning import plan_cache
from histograph_post.models import call_model
from histograph_post.splits import resolve_splits
from histograph_post.utils.machine import give_memory_back, keep_memory

from .measuring import Ratio, cost, race
from .workloads import Subject, Workloads

GIN_CEILING, GCN_CEILING = 1.5, 1.2
#: The command keeps memory that is freed; a plain program does not, unless it is told to.
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
