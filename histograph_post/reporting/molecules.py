"""Molecules: found by their SMILES, drawn as chemists draw them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..caches import Cache, CachedGraph
from ..caches.folder import CONFIG_NAME
from ..data.molecule_features import import_rdkit
from ..data.molecules import CsvTable, read_table
from ..errors import HistographError
from .figures import INK, RIVAL, Format

_SIZE = (300, 210)

#: Of a molecule that fits: a small one must not fill the frame.
_BOND_LENGTH = 26

#: Opacity of the most attended atom: letters on top of it must stay readable.
_DARKEST = 0.6


def find_molecules(cache: Cache, graphs: Sequence[int]) -> dict[int, Any]:
    """Return the RDKit molecules of some graphs, as far as the table they came from is there.

    A molecule counts only if it has the atoms and bonds of the cached graph.

    Args:
        cache: Any cache; only ``smiles:`` and ``ogbg:`` data have a table.
        graphs: Numbers of graphs in the cache.
    """
    try:
        chem, rd_base = import_rdkit()
        table = _table(cache)
    except HistographError:  # no RDKit, or a table that cannot be read any more
        return {}
    column = None if table is None else _smiles_column(cache, table)
    if table is None or column is None:
        return {}
    smiles, found = table.column(column), {}
    with rd_base.BlockLogs():
        for number in graphs:
            graph = cache[number]
            for row in _rows(table, graph.id):
                molecule = chem.MolFromSmiles(smiles[row])
                if molecule is not None and _is_same(molecule, graph):
                    found[number] = molecule
                    break
    return found


def _table(cache: Cache) -> CsvTable | None:
    """Return the table of molecules that a cache was made from."""
    kind, _, name = cache.manifest.data.spec.partition(":")
    places = [Path(), *_roots(cache), *cache.path.parents]
    if kind == "smiles":
        files = [place / Path(name).expanduser() for place in places]
    elif kind == "ogbg":
        inside = Path(f"ogbg_{name}", "mapping", "mol.csv.gz")
        files = [place / more / inside for place in places for more in ("", "ogb")]
    else:
        return None
    path = next((path for path in files if path.is_file()), None)
    return None if path is None else read_table(path)


def _roots(cache: Cache) -> list[Path]:
    """Return the folder of offline data that the cache's own command was given."""
    try:
        options = tomllib.loads((cache.path / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return []
    return [Path(options["data_root"])] if "data_root" in options else []


def _smiles_column(cache: Cache, table: CsvTable) -> str | None:
    wanted = str(cache.manifest.data.args.get("smiles", "smiles"))
    return next((name for name in table.header if name.lower() == wanted.lower()), None)


def _rows(table: CsvTable, name: str) -> Iterator[int]:
    """Yield the rows that a graph's id may mean: a cell of a naming column, or a row number."""
    for cells in table.columns:
        if cells.count(name) == 1:
            yield cells.index(name)
    if name.isdigit() and int(name) < table.num_rows:
        yield int(name)


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
        shares: How dark each atom is, 0 to 1, ``[num_atoms]``; None for no colour.
    """

    molecule: Any
    shares: np.ndarray | None

    def render(self, form: Format) -> bytes:
        """Return the drawing as a file."""
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
        red, green, blue = (int(RIVAL[at : at + 2], 16) / 255 for at in (1, 3, 5))
        shares = np.zeros(0) if self.shares is None else self.shares
        colours = {
            atom: (red, green, blue, _DARKEST * float(share)) for atom, share in enumerate(shares)
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
