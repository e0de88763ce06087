"""Timing contenders side by side: in one process, in turns, as medians."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class Ratio:
    """One line of the table: how what is measured compares with something else."""

    #: What is measured.
    name: str
    #: What it is compared with.
    against: str
    #: Times as fast where the bound is a floor (``at least``), else times the cost.
    ratio: float
    bound: float
    bound_kind: Literal["at least", "at most"]
    #: Median seconds (or bytes) of what is compared, by name.
    medians: Mapping[str, float]
    #: What it was measured on, in a few words.
    note: str = ""
    #: Whether both sides gave the same results, where they should.
    same_results: bool = True

    @property
    def holds(self) -> bool:
        """Whether the ratio is on the right side of its bound."""
        floor = self.bound_kind == "at least"
        inside = self.ratio >= self.bound if floor else self.ratio <= self.bound
        return inside and self.same_results

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "holds": self.holds}


def speedup(
    name: str, medians: Mapping[str, float], ours: str, other: str, floor: float, **about: Any
) -> Ratio:
    """Return how many times as fast ``ours`` is as ``other``."""
    times = medians[other] / medians[ours]
    return Ratio(name, other, times, floor, "at least", _both(medians, ours, other), **about)


def cost(
    name: str, medians: Mapping[str, float], ours: str, other: str, ceiling: float, **about: Any
) -> Ratio:
    """Return how many times the time (or the bytes) of ``other`` it is that ``ours`` takes."""
    times = medians[ours] / medians[other]
    return Ratio(name, other, times, ceiling, "at most", _both(medians, ours, other), **about)


def _both(medians: Mapping[str, float], ours: str, other: str) -> dict[str, float]:
    return {name: medians[name] for name in (ours, other)}


def race(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    steps: int = 1,
    warm_up: int = 1,
    after: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Run all contenders in turns and return the median seconds of a step of each.

    They take turns because a machine is slower at one time than at another: whatever slows down one
    round slows down every contender, and a ratio of medians compares the same minutes.

    Args:
        contenders: What to run, by name.
        rounds: How often each has its turn.
        steps: How often each runs in a turn; if more than once, an untimed one comes first, because
            in training, too, a step follows one of its kind.
        warm_up: Steps that each runs before anything is timed.
        after: Called after every turn; its time does not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        _run(run, warm_up, after)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contenders.items():
                if steps > 1:
                    run()  # the first one of a turn finds cold caches
                seconds[name].append(_run(run, steps, after) / steps)
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return {name: float(np.median(own)) for name, own in seconds.items()}


def _run(run: Callable[[], object], times: int, after: Callable[[], object] | None) -> float:
    """Return the seconds that a number of runs in a row take."""
    started = time.perf_counter()
    for _ in range(times):
        run()
    seconds = time.perf_counter() - started
    if after is not None:
        after()
    return seconds
