"""RDKit's SVG drawings as matplotlib's, which can be written as PDF."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

#: Points that follow each letter of a path, and what they are to matplotlib.
_POINTS = {"M": 1, "L": 1, "Q": 2, "C": 3}

#: Points of a line on paper per unit of a drawing.
_LINE_SCALE = 0.72


def draw_svg(axes: Axes, svg: str) -> None:
    """Draw the paths and ellipses of an SVG of RDKit's."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Ellipse, PathPatch

    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    _, _, width, height = (float(value) for value in root.attrib["viewBox"].split())
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    axes.set_axis_off()
    axes.set_aspect("equal")

    for order, element in enumerate(root):
        tag, given = element.tag.rpartition("}")[2], dict(element.attrib)
        given |= dict(re.findall(r"([\w-]+):([^;]+)", given.get("style", "")))

        def colour(what: str, given: dict[str, str] = given) -> tuple[float, ...] | str:
            if given.get(what, "none") == "none":
                return "none"
            return to_rgba(given[what], float(given.get(f"{what}-opacity", 1)))

        style: dict[str, Any] = {
            "facecolor": colour("fill"),
            "edgecolor": colour("stroke"),
            "linewidth": float(given.get("stroke-width", "0").removesuffix("px")) * _LINE_SCALE,
            "zorder": order,
        }
        if tag == "path":
            axes.add_patch(PathPatch(_outline(given["d"]), capstyle="round", **style))
        elif tag == "ellipse":
            x, y, rx, ry = (float(given[name]) for name in ("cx", "cy", "rx", "ry"))
            style["edgecolor"] = "none"  # a ring of its own would be twice as strong
            axes.add_patch(Ellipse((x, y), 2 * rx, 2 * ry, **style))


def _outline(description: str) -> Outline:
    """Return the path that an SVG describes with absolute coordinates."""
    from matplotlib.path import Path as Outline

    codes = {
        "M": Outline.MOVETO,
        "L": Outline.LINETO,
        "Q": Outline.CURVE3,
        "C": Outline.CURVE4,
        "Z": Outline.CLOSEPOLY,
    }
    vertices: list[tuple[float, float]] = []
    kinds: list[int] = []
    for letter, numbers in re.findall(r"([MLQCZ])([^MLQCZ]*)", description):
        values = [float(value) for value in re.findall(r"-?[\d.]+", numbers)]
        points = list(zip(values[::2], values[1::2], strict=True))
        if letter == "Z":
            points = [(0.0, 0.0)]  # has no place of its own
        assert not len(points) % _POINTS.get(letter, 1)
        vertices += points
        kinds += [int(codes[letter])] * len(points)
    return Outline(vertices, kinds)
