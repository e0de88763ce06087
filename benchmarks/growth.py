"""How time and memory of a head step and of node attention grow with what they work on.

``python -m histograph_benchmarks.growth --out DIR`` writes the numbers, a table and a picture.
Memory is what PyTorch holds at most during a step beyond inputs and weights, from its profiler's
record of every allocation: exact to the byte, and the same in every run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from histograph_post.errors import HistographError
from histograph_post.heads.histograph.node_attention import NodeAttention
from histograph_post.heads.ragged import Graphs
from histograph_post.reporting.figures import require_matplotlib
from histograph_post.utils.files import write_json, write_text

from .curves import Curve, Point, doubling_table, draw, size_table
from .head_steps import FORWARDS, HEAD, make_head, train_step
from .measuring import race
from .workloads import GraphRows

Step = Callable[[], object]


def doublings(first: int, last: int) -> list[int]:
    """Return ``first``, its doubles below ``last``, and ``last``."""
    sizes = [first]
    while 2 * sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return [*sizes, last]


#: What a head step is measured on while something else grows.
BATCH: Mapping[str, int] = {"nodes": 24, "layers": 6, "width": 64, "graphs": 64}
#: What grows, and from where to where.
HEAD_SIZES: Mapping[str, Sequence[int]] = {
    "nodes": doublings(8, 256),
    "layers": doublings(4, 128),
    "width": doublings(16, 512),
    "graphs": doublings(16, 1024),
}
NAMES: Mapping[str, str] = {
    "nodes": "nodes per graph, N",
    "layers": "layers, L",
    "width": "width, D",
    "graphs": "graphs",
}

#: Node attention of one graph.
WIDTH, HEADS = 64, 4
SMALLEST_GRAPH, LARGEST_GRAPH = 1_000, 200_000
FORWARD, BOTH = "forward", "forward + backward"

#: Turns of a step; the median counts. In each it runs several times, if it is quick.
ROUNDS, MOST_STEPS = 5, 20


def peak_bytes(step: Step) -> int:
    """Run a step and return the most memory it held at a time, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    record = profiler.profiler.kineto_results.events()
    changes = [event.nbytes() for event in record if event.name() == "[memory]"]
    return int(np.cumsum([0, *changes]).max())


def measure(step: Step, size: int, *, seconds: float) -> Point:
    """Measure a step.

    Args:
        step: What to run.
        size: Of what it works on.
        seconds: How long to repeat it. A step that takes longer runs once.
    """
    first = 0.0

    def timed() -> None:
        nonlocal first
        started = time.perf_counter()
        step()
        first = time.perf_counter() - started

    peak = peak_bytes(timed)
    if first >= seconds:
        return Point(size, first, peak, runs=1)
    steps = min(MOST_STEPS, max(1, int(seconds / first / ROUNDS)))
    medians = race({"step": step}, rounds=ROUNDS, steps=steps)
    return Point(size, medians["step"], peak, runs=ROUNDS * steps)


def head_step(*, nodes: int, layers: int, width: int, graphs: int) -> Step:
    """Return a step of the default head, as wide as the layers, on graphs of one size."""
    rows = GraphRows.random(np.full(graphs, nodes), layers, width)
    head = make_head(rows, width, {})
    _ = rows.statistics  # are taken once for all epochs
    return partial(train_step, head, partial(FORWARDS[HEAD], head, rows))


def attention_step(num_nodes: int, *, backward: bool) -> Step:
    """Return node attention inside one graph, as a node task runs it."""
    torch.manual_seed(0)
    attention = NodeAttention(WIDTH, HEADS)
    nodes = torch.randn(num_nodes, WIDTH)
    graphs = Graphs.from_batch(None, num_nodes, None, nodes.device)

    def forward() -> Tensor:
        attended: Tensor = attention(nodes.detach().requires_grad_(backward), graphs)
        return attended  # [num_nodes, WIDTH]

    return partial(train_step, attention, forward) if backward else torch.no_grad()(forward)


def head_curves(*, seconds: float) -> Iterator[Curve]:
    """Measure a head step as each size of its batch doubles."""
    head_step(**BATCH)()  # compiles the loops, which is no part of a step
    for axis, sizes in HEAD_SIZES.items():
        points = []
        for size in sizes:
            points.append(measure(head_step(**{**BATCH, axis: size}), size, seconds=seconds))
            _tell(f"head step, {NAMES[axis]}", points[-1])
        yield Curve(NAMES[axis], points)


def attention_curves(largest: int, *, seconds: float, limit: float) -> Iterator[Curve]:
    """Measure node attention as one graph grows, backward while a step keeps within ``limit``."""
    for name, backward, longest in ((FORWARD, False, math.inf), (BOTH, True, limit)):
        points: list[Point] = []
        for size in doublings(min(SMALLEST_GRAPH, largest // 2), largest):
            # Every node attends to every other one, so the time can be told before it is spent.
            if points and points[-1].seconds * (size / points[-1].size) ** 2 > longest:
                break
            step = attention_step(size, backward=backward)
            points.append(measure(step, size, seconds=seconds))
            _tell(f"node attention, {name}", points[-1])
        yield Curve(name, points)


def _tell(what: str, point: Point) -> None:
    said = f"{what}: {point.size:,}, {point.seconds:.3g} s, {point.peak_bytes / 1e6:.3g} MB"
    print(said, file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write ``growth.json``, ``growth.md`` and ``growth.svg``."""
    parser = argparse.ArgumentParser("python -m histograph_benchmarks.growth", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder to write.")
    parser.add_argument("--largest", type=int, default=LARGEST_GRAPH, help="Nodes of one graph.")
    parser.add_argument("--seconds", type=float, default=2.0, help="How long to repeat a step.")
    parser.add_argument("--limit", type=float, default=180.0, help="Of one step with backward.")
    chosen = parser.parse_args(words)
    try:
        require_matplotlib()  # not after all the measuring
        chosen.out.mkdir(parents=True, exist_ok=True)
        # The profiler's own log, which would come with every measurement.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        head = list(head_curves(seconds=chosen.seconds))
        attention = list(
            attention_curves(chosen.largest, seconds=chosen.seconds, limit=chosen.limit)
        )
        groups = {"head step": head, "node attention": attention}
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        found = {name: [curve.to_json() for curve in curves] for name, curves in groups.items()}
        write_json(chosen.out / "growth.json", {"machine": machine, "curves": found})
        write_text(
            chosen.out / "growth.md", f"{doubling_table(head)}\n{size_table(attention, 'node')}"
        )
        draw(groups, chosen.out / "growth.svg")
    except HistographError as error:
        parser.exit(1, f"error: {error}\n")


if __name__ == "__main__":
    main()
