"""One look for all figures: colours that colour-blind readers can tell apart, in both themes.

Figures are drawn in the light theme's colours. Inside the page every one of them is replaced by the
CSS variable of its role, so that the same figure follows the reader's theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

INK = "#1b2530"
MUTED = "#5b6875"
GRID = "#dde2e8"
PAPER = "#fffffe"

#: Okabe and Ito's colours, darkened until each has contrast enough for a thin line on white.
SERIES = ("#0062a3", "#c24e00", "#007a5a", "#9c4a86", "#8a6a00", "#4d5bc9", "#a11f3f", "#3f6f78")

#: The readout the report is about is drawn in the first colour, the one to beat in the second.
CHOSEN, RIVAL = SERIES[:2]

#: Colour in the figure -> CSS variable in the page.
VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        INK: "--ink",
        MUTED: "--muted",
        GRID: "--grid",
        PAPER: "--paper",
        **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
    }
)

#: Lines differ in more than their colour.
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

#: Settings of matplotlib while a figure is drawn.
SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": INK,
        "axes.labelsize": 8.5,
        "axes.linewidth": 0.7,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.axisbelow": True,
        "figure.facecolor": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 8.5,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "legend.fontsize": 8,
        "legend.frameon": False,
        "legend.labelcolor": INK,
        "lines.linewidth": 1.6,
        "lines.markersize": 4,
        "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
        "svg.hashsalt": "histograph-post",  # the same figure, the same bytes
        "text.color": INK,
        "xtick.color": MUTED,
        "xtick.labelsize": 8,
        "ytick.color": MUTED,
        "ytick.labelsize": 8,
    }
)


def series_colour(number: int) -> str:
    """Return the colour of a series; they repeat where there are many."""
    return SERIES[number % len(SERIES)]
