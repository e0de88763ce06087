"""How attention is coloured: one scale for every drawing of every report, and its legend."""

from __future__ import annotations

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
    """Draw the scale: a node at every doubling, as it looks in the drawings."""
    ticks = {LOWEST: "¼ or less", 0.5: "½", 1.0: "1", 2.0: "2", 4.0: "4", HIGHEST: "8 or more"}

    def draw(axes: Axes) -> None:
        from matplotlib.colors import to_rgba

        places = np.arange(len(ticks))
        shares = places / places[-1]  # doublings are equal steps
        axes.scatter(
            places,
            np.zeros(len(ticks)),
            s=90,
            facecolors=[to_rgba(RIVAL, attention_opacity(float(share))) for share in shares],
            edgecolors=INK,
            linewidths=0.7,
        )
        for place, text in zip(places, ticks.values(), strict=True):
            axes.text(float(place), -0.9, text, ha="center", va="top", color=INK)
        axes.set_xlim(-0.6, len(ticks) - 0.4)
        axes.set_ylim(-2.2, 0.8)
        axes.set_axis_off()

    return Figure(
        name="attention-scale",
        title="Attention, times the mean of the graph",
        caption="",
        alternative="Scale of colours from a quarter of the mean attention or less, hardly "
        "coloured, to eight times the mean or more, full orange; each doubling is an equal step.",
        picture=Chart(draw, size=(4.2, 0.55)),
    )
