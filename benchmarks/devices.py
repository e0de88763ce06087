"""A device against the CPU of the same machine: what `histograph bench --device cuda` times."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from histograph_post.caches.caching import cache
from histograph_post.utils.machine import synchronize

from .head_trainings import HeadTraining
from .measuring import race
from .workloads import Sizes, Workloads


@dataclass(frozen=True)
class Timing:
    """The median seconds of one thing on both."""

    what: str
    cpu: float
    device: float


def time_device(device: torch.device, sizes: Sizes, data_root: Path | None = None) -> list[Timing]:
    """Time making a cache, and an epoch of the default head, on a device and on the CPU.

    Args:
        device: Any but the CPU.
        sizes: How much is run.
        data_root: Real data; generated graphs without it.
    """
    with tempfile.TemporaryDirectory(prefix="histograph-bench-") as folder:
        work = Workloads(Path(folder), sizes, data_root)
        subject, place = work.shallow_gin, Path(folder) / "written.cache"
        training = HeadTraining.of(work, work.cache(subject))

        def write(where: torch.device) -> None:
            cache(copy.deepcopy(subject.model), subject.dataset, place, device=str(where))

        def train(where: torch.device) -> None:
            training.run(device=where)
            synchronize(where)

        def timed(what: str, run: Callable[[torch.device], None]) -> Timing:
            both = {"cpu": partial(run, torch.device("cpu")), "device": partial(run, device)}
            remove = partial(shutil.rmtree, place, ignore_errors=True)
            return Timing(what, **race(both, rounds=sizes.rounds, after=remove))

        return [
            timed(f"cache of {subject.about}", write),
            timed("an epoch of the default head", train),
        ]
