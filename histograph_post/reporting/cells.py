"""A table of shaded cells: shares by opacity, so that it reads in both themes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .style import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: The darkest cell: text on it must stay readable, in both themes.
_DARKEST = 0.5


def draw_cells(
    axes: Axes,
    shares: np.ndarray,
    texts: Sequence[Sequence[str]],
    *,
    colour: str,
    negative: str | None = None,
) -> None:
    """Draw a matrix of cells.

    Args:
        axes: Where to draw; rows go down.
        shares: How dark each cell is, -1 to 1, ``[rows, columns]``.
        texts: What stands in each cell.
        colour: Colour of the cells.
        negative: Colour of cells whose share is below zero.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    rows, columns = shares.shape
    size = 8.0 if columns <= 7 else 6.0
    for row in range(rows):
        for column in range(columns):
            share = float(shares[row, column])
            base = negative if negative is not None and share < 0 else colour
            opacity = 0.04 + (_DARKEST - 0.04) * abs(share)
            axes.add_patch(
                Rectangle(
                    (column - 0.48, row - 0.48),
                    0.96,
                    0.96,
                    facecolor=to_rgba(base, opacity),
                    linewidth=0,
                )
            )
            axes.text(
                column,
                row,
                texts[row][column],
                ha="center",
                va="center",
                fontsize=size,
                color=INK,
            )
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
