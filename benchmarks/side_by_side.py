"""Fits side by side: `compare --jobs 2` against `--jobs 1`."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from histograph_post.caches import Cache
from histograph_post.experiments.head_training import compare

from .measuring import Ratio, race, speedup
from .workloads import Sizes, Workloads

FLOOR = 1.6

#: What is compared: readouts that look at means, at all nodes, and at all layers.
READOUTS = ("mean", "concat", "jk-max", "attention", "gmt", "histograph")
SEEDS = range(5)

#: What a run gives; times are in none of these.
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
