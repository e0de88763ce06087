"""How attention is coloured: one scale for every drawing of every report, and its legend."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from .figures import INK, RIVAL, Chart, Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Ends of the scale, in times the mean attention of a graph; beyond them colours stay as they are.
#: Logarithmic: one node may have eleven times the mean, and most differ by less than two.
LOWEST, HIGHEST = 1 / 4, 8.0

#: Opacity at both ends. Letters of atoms stand on the colour and must stay readable.
_FAINT, _FULL = 0.04, 0.75

#: Steps in which the legend is drawn.
_STEPS = 60


def attention_shares(received: np.ndarray) -> np.ndarray:
    """Return where on the scale each node of a graph is, 0 to 1: ``[num_nodes]``.

    Args:
        received: What each node of the *whole* graph receives, ``[num_nodes]``.
    """
    times = received / max(float(received.mean()), 1e-12)
    within = np.log2(np.clip(times, LOWEST, HIGHEST) / LOWEST)
    return np.asarray(within / np.log2(HIGHEST / LOWEST))


def attention_opacity(share: float) -> float:
    """Return the opacity of a place on the scale."""
    return _FAINT + (_FULL - _FAINT) * share


def scale_figure() -> Figure:
    """Draw the scale."""
    ticks = {LOWEST: "¼ or less", 0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", HIGHEST: "8 or more"}

    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgba

        edges = np.linspace(np.log2(LOWEST), np.log2(HIGHEST), _STEPS + 1)
        for step, (start, stop) in enumerate(pairwise(edges.tolist())):
            colour = to_rgba(RIVAL, attention_opacity((step + 0.5) / _STEPS))
            axes.axvspan(start, stop, facecolor=colour, linewidth=0, antialiased=False)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_xticks([float(np.log2(times)) for times in ticks], list(ticks.values()))
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="x", colors=INK)

    return Figure(
        name="attention-scale",
        title="Attention, times the mean of the graph",
        caption="",
        alternative="Scale of colours from a quarter of the mean attention or less, nearly white, "
        "to eight times the mean or more, full orange; each doubling is as large a step.",
        picture=Chart(draw, size=(4.2, 0.55)),
    )
