"""Figures: one style for all, inline in the page or as files."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from ..errors import ConfigError, MissingExtraError, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# --- one look for all figures: colours that colour-blind readers can tell apart, in both themes

INK = "#1b2530"
MUTED = "#5b6875"
GRID = "#dde2e8"
PAPER = "#fffffe"

#: Okabe and Ito's colours, darkened until each has contrast enough for a thin line on white.
SERIES = ("#0062a3", "#c24e00", "#007a5a", "#9c4a86", "#8a6a00", "#4d5bc9", "#a11f3f", "#3f6f78")

#: The readout the report is about is drawn in the first colour, the one to beat in the second.
CHOSEN, RIVAL = SERIES[:2]

#: Colour in the figure -> CSS variable in the page.
VARIABLES: Mapping[str, str] = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    PAPER: "--paper",
    **{colour: f"--series-{number}" for number, colour in enumerate(SERIES)},
}

#: Lines differ by more than their colour.
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (7, 2)), (0, (3, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<")

#: Settings of matplotlib while a figure is drawn.
SETTINGS: dict[str, Any] = {
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
    "pdf.fonttype": 42,  # text that can be searched and edited, as journals ask for
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "none",  # text stays text: it can be read aloud, searched and copied
    "svg.hashsalt": "histograph-post",  # the same figure, the same bytes
    "text.color": INK,
    "text.parse_math": False,  # names may hold a dollar sign
    "xtick.color": MUTED,
    "xtick.labelsize": 8,
    "ytick.color": MUTED,
    "ytick.labelsize": 8,
}


def series_colour(number: int) -> str:
    """Return the colour of a series; they repeat where there are many."""
    return SERIES[number % len(SERIES)]


Format = Literal["png", "svg", "pdf"]

#: Dots per inch of png files: enough for print.
_RESOLUTION = 300

#: Width and height in inches: two fit side by side on a desktop screen, one on a phone.
STANDARD_SIZE = (4.2, 2.9)


class Picture(Protocol):
    """Anything that can be drawn."""

    def render(self, form: Format) -> bytes:
        """Return the picture as a file."""
        ...


@dataclass(frozen=True)
class Chart:
    """A picture made with matplotlib.

    Args:
        draw: Called with empty axes.
        size: Width and height in inches.
    """

    draw: Callable[[Axes], None]
    size: tuple[float, float] = STANDARD_SIZE

    def render(self, form: Format) -> bytes:
        """Return the picture as a file."""
        matplotlib = require_matplotlib()
        from matplotlib.figure import Figure as Canvas

        stream = io.BytesIO()
        # Without a date the same figure has the same bytes.
        dated = {"svg": "Date", "pdf": "CreationDate"}.get(form)
        metadata = {dated: None} if dated else {"Software": "histograph-post"}
        with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph")  # a box is shown in its place
            canvas = Canvas(figsize=self.size, layout="constrained")
            self.draw(canvas.subplots())
            facecolor = PAPER if form == "png" else "none"
            canvas.savefig(
                stream, format=form, dpi=_RESOLUTION, metadata=metadata, facecolor=facecolor
            )
        data = stream.getvalue()
        return printable(data.decode()).encode() if form == "svg" else data


@dataclass(frozen=True)
class Figure:
    """A picture with its title, caption and description.

    Args:
        name: Name of its file, without a suffix; unique in a report.
        title: A short heading above it.
        caption: What is drawn, and how it was measured.
        alternative: A description for readers who cannot see it.
        picture: What draws it.
    """

    name: str
    title: str
    caption: str
    alternative: str
    picture: Picture

    def inline(self) -> str:
        """Return the picture as SVG for the page, in the colours of the reader's theme."""
        svg = self.picture.render("svg").decode()
        svg = svg[svg.index("<svg") :]
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        # Ids must be unique in the page, not only in the figure.
        svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)
        for colour, variable in VARIABLES.items():
            svg = re.sub(colour, f"var({variable})", svg, flags=re.IGNORECASE)
        # CSS variables work in styles, not in attributes.
        svg = re.sub(r'\b(fill|stroke)="(var\([^)]*\))"', r'style="\1:\2"', svg)
        box = re.search(r'viewBox=["\']([^"\']*)["\']', svg)
        assert box is not None  # both libraries write one
        body = svg[svg.index(">") + 1 :]
        text = f"<title>{escape(self.title)}</title><desc>{escape(self.alternative)}</desc>"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{box[1]}" role="img" aria-label="{escape(self.alternative)}">{text}{body}'
        )


def require_matplotlib() -> Any:
    """Return matplotlib, which is an optional dependency."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("a report", extra="report") from None
    except ValueError:  # it reads the variable when it is imported
        found = os.environ.get("MPLBACKEND")
        raise ConfigError(f"MPLBACKEND: found {found!r}, expected a backend or nothing") from None
    return matplotlib


# --- a matrix of shaded cells, by opacity, so that it is readable in both themes

#: Opacity of the cells: text on the darkest must stay readable, in both themes.
_LIGHTEST, _DARKEST = 0.04, 0.5


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
        texts: The text of each cell.
        colour: Colour of the cells.
        negative: Colour of cells whose share is below zero.
    """
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    rows, columns = shares.shape
    style: dict[str, Any] = {"ha": "center", "va": "center", "color": INK}
    style["fontsize"] = 8.0 if columns <= 7 else 6.0
    for (row, column), share in np.ndenumerate(shares):
        base = negative if negative is not None and share < 0 else colour
        cell = to_rgba(base, _LIGHTEST + (_DARKEST - _LIGHTEST) * abs(share))
        corner = (column - 0.48, row - 0.48)
        axes.add_patch(Rectangle(corner, 0.96, 0.96, facecolor=cell, linewidth=0))
        axes.text(column, row, texts[row][column], **style)
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
