"""What was measured as something grew: exponents, tables, and a picture of the curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from histograph_post.reporting.figures import (
    DASHES,
    MARKERS,
    MUTED,
    PAPER,
    SETTINGS,
    require_matplotlib,
    series_colour,
)
from histograph_post.utils.files import atomic_path
from histograph_post.utils.text import MISSING

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
    return _markdown(rows)


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
    return _markdown([*rows, last])


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _power(curve: Curve, quantity: Quantity) -> str:
    exponent = curve.exponent(quantity)
    return MISSING if exponent is None else f"size^{exponent:.2f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def draw(groups: Mapping[str, Sequence[Curve]], path: Path) -> None:
    """Draw time and memory of each group of curves, on logarithmic scales, as an SVG file."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    with matplotlib.rc_context(dict(SETTINGS)):
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
