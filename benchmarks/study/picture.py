"""The critical-difference picture: mean ranks on a line, bars where chance may explain them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from histograph_post.reporting.figures import (
    CHOSEN,
    INK,
    MUTED,
    PAPER,
    SETTINGS,
    require_matplotlib,
)
from histograph_post.utils.files import atomic_path

from .ranking import RankTest

_WIDTH, _LINE = 8.4, 0.24


def draw_ranks(test: RankTest, chosen: str, path: Path) -> None:
    """Draw the mean ranks as an SVG file; the chosen readout stands out."""
    matplotlib = require_matplotlib()
    from matplotlib.figure import Figure

    ordered = sorted(test.ranks, key=lambda name: (test.ranks[name], name))
    groups = test.groups()
    half = (len(ordered) + 1) // 2
    low = np.floor(min(test.ranks.values()))
    high = np.ceil(max(max(test.ranks.values()), low + test.critical_difference))
    margin = 0.28 * (high - low)
    # From top to bottom: the critical difference, the axis, bars, names.
    first_bar, first_name = 0.6, 0.6 + 0.5 * len(groups) + 0.7
    bottom = first_name + half
    with matplotlib.rc_context({**SETTINGS, "axes.grid": False}):
        figure = Figure(figsize=(_WIDTH, _LINE * (bottom + 2.6)), layout="constrained")
        axes = figure.subplots()
        axes.set_xlim(low - margin, high + margin)
        axes.set_ylim(bottom, -2.4)
        axes.axis("off")
        axes.plot([low, high], [0, 0], color=INK, linewidth=1)
        for rank in range(int(low), int(high) + 1):
            axes.plot([rank, rank], [0, -0.25], color=INK, linewidth=1)
            axes.text(rank, -0.4, str(rank), ha="center", va="bottom", color=MUTED)
        ends = [low, low + test.critical_difference]
        axes.plot(ends, [-1.6, -1.6], color=MUTED, linewidth=1, marker="|")
        said = f"critical difference {test.critical_difference:.2f}"
        axes.text(ends[1] + 0.02 * (high - low), -1.6, said, va="center", color=MUTED)
        for number, group in enumerate(groups):
            ranks = [test.ranks[name] for name in group]
            height, reach = first_bar + 0.5 * number, 0.008 * (high - low)
            axes.plot(
                [min(ranks) - reach, max(ranks) + reach],
                [height, height],
                color=MUTED,
                linewidth=3,
                solid_capstyle="butt",
            )
        for place, name in enumerate(ordered):
            left = place < half
            # The best and the worst stand highest, so that no line crosses another.
            height = first_name + (place if left else len(ordered) - 1 - place)
            edge = low - 0.04 * margin if left else high + 0.04 * margin
            mean, colour = test.ranks[name], CHOSEN if name == chosen else INK
            width = 1.8 if name == chosen else 0.8
            axes.plot([mean, mean, edge], [0, height, height], color=colour, linewidth=width)
            text = f"{name}  {mean:.2f}" if left else f"{mean:.2f}  {name}"
            axes.text(
                edge - 0.03 * margin if left else edge + 0.03 * margin,
                height,
                text,
                ha="right" if left else "left",
                va="center",
                color=colour,
                weight="bold" if name == chosen else "normal",
            )
        with atomic_path(path) as partial:
            # Without a date and a version the same figure has the same bytes.
            metadata = {"Date": None, "Creator": None}
            figure.savefig(partial, format="svg", metadata=metadata, facecolor=PAPER)
