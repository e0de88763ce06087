"""Molecules: found by their SMILES, drawn as chemists draw them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..caches import Cache, CachedGraph
from ..data.molecule_features import import_rdkit
from ..errors import HistographError
from .attention_scale import attention_opacity
from .figures import INK, RIVAL, Chart, Format
from .vector import draw_svg

_SIZE = (300, 210)

#: Of a molecule that fits: a small one must not fill the frame.
_BOND_LENGTH = 26


@dataclass(frozen=True)
class Molecule:
    """A molecule of a cached graph."""

    #: Of RDKit.
    rdkit: Any
    smiles: str
    #: What it is called where it comes from; may be empty.
    name: str = ""


def find_molecules(cache: Cache, graphs: Sequence[int]) -> dict[int, Molecule]:
    """Return the molecules of some graphs, as far as the cache knows their SMILES.

    A molecule counts only if it has the atoms and bonds of the cached graph.

    Args:
        cache: Any cache.
        graphs: Numbers of graphs in the cache.
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
        shares: Where each atom is on the scale of attention, ``[num_atoms]``; None for no colour.
    """

    molecule: Any
    shares: np.ndarray | None

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
        shares = np.zeros(0) if self.shares is None else self.shares
        colours = {
            atom: (red, green, blue, attention_opacity(float(share)))
            for atom, share in enumerate(shares)
        }
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
    """Write an SVG of RDKit's as the other figures are: our ink, opacity apart from colour."""
    svg = svg.replace("'", '"').replace("iso-8859-1", "utf-8").replace("#000000", INK)

    def opacity(match: re.Match[str]) -> str:
        what, colour, alpha = match.groups()
        return f"{what}:{colour};{what}-opacity:{int(alpha, 16) / 255:.3f}"

    svg = re.sub(r"\b(fill|stroke):(#[0-9A-Fa-f]{6})([0-9A-Fa-f]{2})\b", opacity, svg)
    return svg.replace("stroke-opacity:1", "")
