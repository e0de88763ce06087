"""A cache in half precision against one in single precision."""

from __future__ import annotations

from .head_trainings import HeadTraining
from .measuring import Ratio, cost, race
from .workloads import Workloads

#: Of bytes: the edges take what they take.
SIZE_CEILING = 0.55
#: Of time: not slower, but for the noise of the clock.
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
