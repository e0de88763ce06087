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
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from histograph_post.errors import HistographError
from histograph_post.heads.histograph.node_attention import NodeAttention
from histograph_post.heads.ragged import Graphs
from histograph_post.reporting.figures import (
    DASHES,
    MARKERS,
    MUTED,
    PAPER,
    SETTINGS,
    require_matplotlib,
    series_colour,
)
from histograph_post.utils.files import atomic_path, write_json, write_text
from histograph_post.utils.text import MISSING

from .head_steps import FORWARDS, HEAD, make_head, train_step
from .measuring import race
from .study.page import markdown
from .workloads import GraphRows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Quantity = Literal["seconds", "peak_bytes"]

#: An exponent is fitted to this many points, the largest.
FITTED = 3


@dataclass(frozen=True)
class Point:
    """One measurement."""

    size: int
    #: Of one run; the median of several.
    seconds: float
    #: Most memory held at a time.
    peak_bytes: int
    runs: int


@dataclass(frozen=True)
class Curve:
    """What was measured as one thing grew, smallest first."""

    name: str
    points: Sequence[Point]

    def values(self, quantity: Quantity) -> list[float]:
        """Return one quantity of every point."""
        return [getattr(point, quantity) for point in self.points]

    def exponent(self, quantity: Quantity) -> float | None:
        """Return ``p`` if the quantity grows as ``size ** p`` at the large end."""
        if len(self.points) < 2:
            return None
        sizes = np.log([point.size for point in self.points])[-FITTED:]
        values = np.log(self.values(quantity))[-FITTED:]
        return float(np.polyfit(sizes, values, 1)[0])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "name": self.name,
            "points": [asdict(point) for point in self.points],
            "seconds_exponent": self.exponent("seconds"),
            "peak_bytes_exponent": self.exponent("peak_bytes"),
        }


def doubling_table(curves: Sequence[Curve]) -> str:
    """Return two rows per curve, time and memory, with a column per doubling."""
    steps = max(len(curve.points) for curve in curves)
    rows = [["what grows", "", *(f"x {2**step}" for step in range(steps)), "grows as"]]
    for curve in curves:
        grown = f"{curve.name}: {curve.points[0].size:,} to {curve.points[-1].size:,}"
        blank = [""] * (steps - len(curve.points))
        times = [_figure(seconds * 1e3) for seconds in curve.values("seconds")]
        memory = [_figure(peak / 1e6) for peak in curve.values("peak_bytes")]
        rows.append([grown, "ms", *times, *blank, _power(curve, "seconds")])
        rows.append(["", "MB", *memory, *blank, _power(curve, "peak_bytes")])
    return markdown(rows)


def size_table(curves: Sequence[Curve], what: str) -> str:
    """Return a row per size, with time, memory and memory per ``what`` of every curve."""
    units = ("s", "MB", f"bytes per {what}")
    rows = [[f"{what}s", *(f"{curve.name}, {unit}" for curve in curves for unit in units)]]
    found = [{point.size: point for point in curve.points} for curve in curves]
    for size in sorted({size for points in found for size in points}):
        row = [f"{size:,}"]
        for points in found:
            if size in points:
                peak = points[size].peak_bytes
                row += map(_figure, (points[size].seconds, peak / 1e6, peak / size))
            else:
                row += [MISSING] * len(units)
        rows.append(row)
    last = ["grows as"]
    for curve in curves:
        last += [_power(curve, "seconds"), _power(curve, "peak_bytes"), ""]
    return markdown([*rows, last])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _power(curve: Curve, quantity: Quantity) -> str:
    exponent = curve.exponent(quantity)
    return MISSING if exponent is None else f"size^{exponent:.2f}"


def draw(groups: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw time and memory of each group of curves, on logarithmic scales, as an SVG file."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(8.4, 3.2 * len(groups)), layout="constrained")
        rows = figure.subplots(len(groups), 2, squeeze=False)
        for panels, (name, curves) in zip(rows, groups.items(), strict=True):
            _draw(panels[0], curves, "seconds", 1.0)
            panels[0].set_ylabel(f"{name}, seconds")
            _draw(panels[1], curves, "peak_bytes", 1e-6)
            panels[1].set_ylabel(f"{name}, MB")
            panels[0].legend(loc="upper left", frameon=True, facecolor=PAPER, edgecolor="none")
        with atomic_path(path) as partial:
            # Without a date the same figure has the same bytes.
            figure.savefig(partial, format="svg", metadata={"Date": None}, facecolor=PAPER)


def _draw(axes: Axes, curves: Sequence[Curve], quantity: Quantity, scale: float) -> None:
    """Draw the curves over size, or over how many times the smallest size where these differ."""
    relative = len({curve.points[0].size for curve in curves}) > 1
    lines = []
    for at, curve in enumerate(curves):
        sizes = np.array([point.size for point in curve.points])
        sizes = sizes / sizes[0] if relative else sizes
        values = np.array(curve.values(quantity)) * scale
        style: dict[str, Any] = {"color": series_colour(at), "linestyle": DASHES[at]}
        axes.plot(sizes, values, **style, marker=MARKERS[at], label=curve.name)
        lines.append((sizes, values))
    axes.set_xscale("log", base=2 if relative else 10)
    axes.set_yscale("log")
    axes.set_xlabel("times the smallest size" if relative else "nodes")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.tick_params(which="minor", labelbottom=False, labelleft=False)
    limits = axes.get_ylim()
    ends = np.array([lines[0][0][0], max(sizes[-1] for sizes, _ in lines)])
    lowest = min(values[0] for _, values in lines)
    for power, name, dashes in ((1, "linear", (0, (5, 3))), (2, "quadratic", (0, (1, 2)))):
        style = {"color": MUTED, "linestyle": dashes, "linewidth": 0.9}
        axes.plot(ends, lowest * (ends / ends[0]) ** power, **style, label=name)
    axes.set_ylim(limits)


# --- measuring

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

#: Turns of a step, whose median counts; a quick step runs several times in each.
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
    _ = rows.statistics  # computed once for all epochs
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
    head_step(**BATCH)()  # compiles the kernels before anything is timed
    for axis, sizes in HEAD_SIZES.items():
        points = []
        for size in sizes:
            points.append(measure(head_step(**{**BATCH, axis: size}), size, seconds=seconds))
            _print_point(f"head step, {NAMES[axis]}", points[-1])
        yield Curve(NAMES[axis], points)


def attention_curves(largest: int, *, seconds: float, limit: float) -> Iterator[Curve]:
    """Measure node attention as one graph grows, backward while a step keeps within ``limit``."""
    for name, backward, longest in ((FORWARD, False, math.inf), (BOTH, True, limit)):
        points: list[Point] = []
        for size in doublings(min(SMALLEST_GRAPH, largest // 2), largest):
            # Every node attends to every other one: the time of the next size is known beforehand.
            if points and points[-1].seconds * (size / points[-1].size) ** 2 > longest:
                break
            step = attention_step(size, backward=backward)
            points.append(measure(step, size, seconds=seconds))
            _print_point(f"node attention, {name}", points[-1])
        yield Curve(name, points)


def _print_point(what: str, point: Point) -> None:
    measured = f"{point.size:,}, {point.seconds:.3g} s, {point.peak_bytes / 1e6:.3g} MB"
    print(f"{what}: {measured}", file=sys.stderr, flush=True)


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and write ``growth.json``, ``growth.md`` and ``growth.svg``."""
    parser = argparse.ArgumentParser("python -m histograph_benchmarks.growth", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="Folder to write.")
    parser.add_argument("--largest", type=int, default=LARGEST_GRAPH, help="Nodes of one graph.")
    parser.add_argument("--seconds", type=float, default=2.0, help="How long to repeat a step.")
    parser.add_argument("--limit", type=float, default=180.0, help="Of one step with backward.")
    chosen = parser.parse_args(words)
    try:
        require_matplotlib()  # before minutes of measuring
        chosen.out.mkdir(parents=True, exist_ok=True)
        # Silences the profiler's own log, which would come with every measurement.
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
