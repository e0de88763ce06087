"""Molecules: found by their SMILES, drawn as chemists draw them."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
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
from .attention_scale import attention_opacity
from .figures import INK, RIVAL, Chart, Format
from .vector import draw_svg

_SIZE = (300, 210)

#: Of a molecule that fits: a small one must not fill the frame.
_BOND_LENGTH = 26


#: Columns that hold what chemists call a molecule, compared in lower case, letters only.
_NAME_COLUMNS = ("name", "compoundname", "compoundid", "moleculename", "drugname", "drug", "title")


@dataclass(frozen=True)
class Molecule:
    """A molecule of a cached graph."""

    #: Of RDKit.
    rdkit: Any
    smiles: str
    #: What it is called in the table; empty if nothing there is a name.
    name: str = ""


def find_molecules(cache: Cache, graphs: Sequence[int]) -> dict[int, Molecule]:
    """Return the molecules of some graphs, as far as the table they came from is there.

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
    smiles, names, found = table.column(column), _names(table), {}
    rows = _RowsById(table)
    with rd_base.BlockLogs():
        for number in graphs:
            graph = cache[number]
            for row in rows.of(graph.id):
                molecule = chem.MolFromSmiles(smiles[row])
                if molecule is not None and _is_same(molecule, graph):
                    name = names[row].strip() if names else ""
                    found[number] = Molecule(molecule, smiles[row], name)
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


def _names(table: CsvTable) -> Sequence[str] | None:
    """Return the column of names, if the table has one."""
    plain = {re.sub(r"[^a-z]", "", name.lower()): name for name in reversed(table.header)}
    found = next((plain[name] for name in _NAME_COLUMNS if name in plain), None)
    return None if found is None else table.column(found)


class _RowsById:
    """Finds the rows that a graph's id may mean: a cell of a naming column, or a row number."""

    def __init__(self, table: CsvTable) -> None:
        self._num_rows = table.num_rows
        self._columns = []
        for cells in table.columns:
            counts = Counter(cells)
            places = {cell: row for row, cell in enumerate(cells) if counts[cell] == 1}
            self._columns.append(places)

    def of(self, name: str) -> Iterator[int]:
        """Yield the rows, the likeliest first."""
        yield from (places[name] for places in self._columns if name in places)
        if name.isdigit() and int(name) < self._num_rows:
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
