"""`train-head` on a cache of three times the memory that training may take."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.training.memory import row_bytes

from .head_trainings import HeadTraining
from .measuring import Ratio, cost, race
from .workloads import Workloads

TIME_CEILING = 2.0
#: Times the limit that all activations would take.
SHARE = 3
#: Graphs on which a process warms up.
WARM_UP_GRAPHS = 20

LIMITED, FREE = "within the limit", "in memory"
PEAK, LIMIT = "peak over the start", "the limit"

_STATUS = Path("/proc/self/status")


def limited_epochs(work: Workloads) -> list[Ratio]:
    """Compare an epoch within the limit with one without it, and its memory with the limit."""
    stored, subject = work.cache(work.deep_gin), work.deep_gin
    needed = row_bytes(stored)
    limit = needed // SHARE
    trainings = {
        LIMITED: HeadTraining.of(work, stored, memory_limit=limit),
        FREE: HeadTraining.of(work, stored),
    }
    medians = race(
        {name: training.run for name, training in trainings.items()}, rounds=work.sizes.rounds
    )
    name = f"train-head on {SHARE} x --memory-limit"
    note = f"activations of {needed / 1e6:.0f} MB; {subject.about}"
    found = [cost(f"{name}, time", medians, LIMITED, FREE, TIME_CEILING, note=note)]
    if _STATUS.exists():  # Linux keeps account of a process's memory
        taken = {PEAK: float(_peak(work, stored, limit)), LIMIT: float(limit)}
        found.append(cost(f"{name}, memory", taken, PEAK, LIMIT, 1.0, note=note))
    return found


def _peak(work: Workloads, stored: Cache, limit: int) -> int:
    """Return the bytes that a process takes for an epoch, over those of its libraries."""
    subject, small = work.deep_gin, work.folder / "small.cache"
    cache(subject.model, subject.dataset.graphs[:WARM_UP_GRAPHS], small, device="cpu")
    words = [small, stored.path, limit, work.sizes.batch_size, work.sizes.width]
    done = subprocess.run(
        [sys.executable, "-m", __name__, *map(str, words)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _peak_memory() -> int:
    """Return the most bytes that were ever resident of this process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def _main(small: str, stored: str, limit: str, batch_size: str, dim: str) -> None:
    """Print how many bytes more an epoch on one cache takes than one on a small cache before it."""
    HeadTraining(Cache.open(small), batch_size=1, dim=int(dim)).run()
    before = _peak_memory()
    HeadTraining(
        Cache.open(stored), batch_size=int(batch_size), dim=int(dim), memory_limit=int(limit)
    ).run()
    print(_peak_memory() - before)


if __name__ == "__main__":
    _main(*sys.argv[1:])
