"""Molecules: found by their SMILES, drawn as chemists draw them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import numpy as np

from ..caches import Cache, CachedGraph
from ..data.molecules import import_rdkit
from ..errors import HistographError
from .figures import INK, RIVAL, Chart, Format

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Outline

_SIZE = (300, 210)

#: Where a molecule fits: a small one must not fill the frame.
_BOND_LENGTH = 26


@dataclass(frozen=True)
class Molecule:
    """A molecule of a cached graph."""

    #: RDKit's object.
    rdkit: Any
    smiles: str
    #: Its name in the data; may be empty.
    name: str = ""


def find_molecules(cache: Cache, graphs: Sequence[int]) -> dict[int, Molecule]:
    """Return the molecules of those graphs whose SMILES is in the cache.

    A molecule counts only if it has the atoms and bonds of the cached graph.
    """
    known = cache.molecules()
    if known is None:
        return {}
    try:
        chem, rd_base = import_rdkit()
    except HistographError:  # no RDKit
        return {}
    found = {}
    with rd_base.BlockLogs():
        for number in graphs:
            smiles, name = known[number]
            molecule = chem.MolFromSmiles(smiles)
            if molecule is not None and _is_same(molecule, cache[number]):
                found[number] = Molecule(molecule, smiles, name)
    return found


def _is_same(molecule: Any, graph: CachedGraph) -> bool:
    """Whether a molecule has the atoms and bonds of a graph (held-out links may be missing)."""
    bonds = {
        frozenset((bond.GetBeginAtomIdx(), bond.GetEndAtomIdx())) for bond in molecule.GetBonds()
    }
    layer = graph.history if not isinstance(graph.history, list) else graph.history[0]
    if molecule.GetNumAtoms() != len(layer):
        return False
    if graph.edge_index is None:
        return True
    edges = {frozenset(pair) for pair in graph.edge_index.T.tolist() if pair[0] != pair[1]}
    return edges == bonds or (graph.edge_label_index is not None and edges <= bonds)


@dataclass(frozen=True)
class MoleculePicture:
    """A molecule with its atoms coloured.

    Args:
        molecule: From RDKit.
        opacities: Of the colour of each atom, ``[num_atoms]``; None for no colour.
    """

    molecule: Any
    opacities: np.ndarray | None

    def render(self, form: Format) -> bytes:
        """Return the drawing as a file."""
        if form == "pdf":  # which RDKit does not write
            svg = self.render("svg").decode()
            width, height = (length / 100 for length in _SIZE)
            return Chart(lambda axes: draw_svg(axes, svg), size=(width, height)).render(form)
        from rdkit.Chem.Draw import rdMolDraw2D

        scale = 1 if form == "svg" else 4
        width, height = (scale * length for length in _SIZE)
        canvas = rdMolDraw2D.MolDraw2DSVG if form == "svg" else rdMolDraw2D.MolDraw2DCairo
        drawer = canvas(width, height)
        options: Any = drawer.drawOptions()
        options.useBWAtomPalette()
        options.clearBackground = form == "png"
        options.padding = 0.08
        options.fixedBondLength = scale * _BOND_LENGTH
        options.bondLineWidth = 2 * scale
        red, green, blue = (int(RIVAL[at : at + 2], 16) / 255 for at in (1, 3, 5))
        opacities = [] if self.opacities is None else self.opacities.tolist()
        colours = {atom: (red, green, blue, opacity) for atom, opacity in enumerate(opacities)}
        rdMolDraw2D.PrepareAndDrawMolecule(
            drawer,
            self.molecule,
            highlightAtoms=list(colours),
            highlightAtomColors=colours,
            highlightAtomRadii=dict.fromkeys(colours, 0.38),
            highlightBonds=[],
        )
        drawer.FinishDrawing()
        found = drawer.GetDrawingText()
        return _themed(found).encode() if isinstance(found, str) else found


def _themed(svg: str) -> str:
    """Restyle an SVG of RDKit like the other figures: our ink, opacity apart from colour."""
    svg = svg.replace("'", '"').replace("iso-8859-1", "utf-8").replace("#000000", INK)

    def opacity(match: re.Match[str]) -> str:
        what, colour, alpha = match.groups()
        return f"{what}:{colour};{what}-opacity:{int(alpha, 16) / 255:.3f}"

    svg = re.sub(r"\b(fill|stroke):(#[0-9A-Fa-f]{6})([0-9A-Fa-f]{2})\b", opacity, svg)
    return svg.replace("stroke-opacity:1", "")


# --- RDKit's SVG redrawn with matplotlib, which can write PDF

#: Points of a line on paper per unit of a drawing.
_LINE_SCALE = 0.72


def draw_svg(axes: Axes, svg: str) -> None:
    """Draw the paths and ellipses of an SVG of RDKit."""
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
            style["edgecolor"] = "none"  # a ring over the fill would look twice as dark
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
            points = [(0.0, 0.0)]  # matplotlib ignores it
        vertices += points
        kinds += [int(codes[letter])] * len(points)
    return Outline(vertices, kinds)
