"""What a machine has: memory that training may take, processes side by side, other devices."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.experiments.head_training import compare
from histograph_post.training.loaded_cache import row_bytes
from histograph_post.utils.machine import synchronize

from .epochs import HeadTraining
from .measuring import Ratio, cost, race, speedup
from .workloads import Sizes, Workloads

TIME_CEILING = 2.0
#: How many times the limit the activations would take.
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
    if _STATUS.exists():  # on Linux
        taken = {PEAK: float(_peak(work, stored, limit)), LIMIT: float(limit)}
        found.append(cost(f"{name}, memory", taken, PEAK, LIMIT, 1.0, note=note))
    return found


def _peak(work: Workloads, stored: Cache, limit: int) -> int:
    """Return the bytes that a process takes for an epoch, beyond those of its libraries."""
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
    """Return the peak resident memory of this process, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])


def _main(small: str, stored: str, limit: str, batch_size: str, dim: str) -> None:
    """Print by how much an epoch raises the peak memory that one on a small cache has left."""
    HeadTraining(Cache.open(small), batch_size=1, dim=int(dim)).run()
    before = _peak_memory()
    HeadTraining(
        Cache.open(stored), batch_size=int(batch_size), dim=int(dim), memory_limit=int(limit)
    ).run()
    print(_peak_memory() - before)


FLOOR = 1.6

#: What is compared: readouts that look at means, at all nodes, and at all layers.
READOUTS = ("mean", "concat", "jk-max", "attention", "gmt", "histograph")
SEEDS = range(5)

#: The files of a run that have its results, and no times.
RESULTS = ("results.json", "predictions.csv", "metrics.jsonl")

SIDE_BY_SIDE, ALONE = "--jobs 2", "--jobs 1"


def side_by_side(work: Workloads) -> list[Ratio]:
    """Compare runs of six readouts with five seeds on BBBP, the start of processes included."""
    subject = work.molecule_gcn
    cache = work.cache(subject)
    places = {name: work.folder / f"run {name}" for name in (SIDE_BY_SIDE, ALONE)}
    jobs = {SIDE_BY_SIDE: 2, ALONE: 1}
    medians = race(
        {name: partial(_compare, cache, places[name], work.sizes, jobs[name]) for name in jobs},
        rounds=1,  # of a minute or more
        warm_up=0,
    )
    first, second = ([(place / name).read_bytes() for name in RESULTS] for place in places.values())
    return [
        speedup(
            f"compare of {len(READOUTS)} readouts x {len(SEEDS)} seeds, BBBP",
            medians,
            SIDE_BY_SIDE,
            ALONE,
            FLOOR,
            note=f"{work.sizes.compared_epochs} epochs each; {subject.about}",
            same_results=first == second,
        )
    ]


def _compare(cache: Cache, out: Path, sizes: Sizes, jobs: int) -> None:
    shutil.rmtree(out, ignore_errors=True)
    compare(
        cache,
        out,
        heads=READOUTS,
        dim=sizes.width,
        seeds=SEEDS,
        training={"epochs": sizes.compared_epochs, "batch_size": sizes.batch_size, "patience": 0},
        device="cpu",
        jobs=jobs,
    )


@dataclass(frozen=True)
class Timing:
    """The median seconds of one step on both devices."""

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


if __name__ == "__main__":
    _main(*sys.argv[1:])
