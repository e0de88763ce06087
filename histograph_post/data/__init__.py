"""Data specifications and what they load.

====================================  =============================================================
``tu:PROTEINS``                       a set of the TU collection
``planetoid:Cora``                    Cora, CiteSeer, PubMed
``actor:``, ``wiki:chameleon``        heterophilic node sets as Geom-GCN prepared them
``ogbg:molhiv``                       Open Graph Benchmark, graph level
``smiles:file.csv``                   molecules with targets
``graphs.pt``                         graphs saved with ``torch.save``
``file.py:function``                  a function of yours that returns graphs
``package.module:function``           the same, from an installed package
``demo:``                             small random graphs made in code
====================================  =============================================================

Any of them takes ``level=link``: some edges are held out, to be predicted (see :mod:`.links`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..utils.levels import Level as Level
from ..utils.specifications import GRAPH_FILES, is_built_in
from .dataset import GraphDataset as GraphDataset
from .dataset import from_graphs as from_graphs
from .links import LinkOptions as LinkOptions

__all__ = ["GraphDataset", "Level", "LinkOptions", "from_graphs", "load_data"]

#: Every form of a data specification, for messages.
FORMS = (
    "tu:NAME, planetoid:NAME, actor:, wiki:NAME, ogbg:NAME, smiles:FILE.csv, demo:, "
    "FILE.pt, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION"
)


def load_data(
    spec: str, *, root: Path | None = None, args: Mapping[str, Any] | None = None
) -> GraphDataset:
    """Load the data that ``spec`` names.

    ``root`` holds offline copies of the benchmark sets and is only read; relative files are also
    looked for there. ``args`` depend on the kind of data; an unknown one is refused.
    """
    args = args or {}
    root = None if root is None else Path(root)
    kind, colon, name = spec.partition(":")
    if colon and kind in ("tu", "planetoid", "actor", "wiki"):
        from . import benchmarks

        load = {
            "tu": benchmarks.load_tu,
            "planetoid": benchmarks.load_planetoid,
            "actor": benchmarks.load_actor,
            "wiki": benchmarks.load_wiki,
        }[kind]
        return load(name, root, args)
    if colon and kind == "ogbg":
        from .ogb import load_ogbg

        return load_ogbg(name, root, args)
    if colon and kind == "smiles":
        from .molecules import load_smiles

        dataset = load_smiles(_locate(name, root), args)
        dataset.spec = spec  # as the user named it, wherever the file was found
        return dataset
    if colon and kind == "demo":
        from .synthetic import load_demo

        return load_demo(name, args)
    if spec.endswith(GRAPH_FILES):
        from .files import load_graph_file

        return load_graph_file(_locate(spec, root), args, spec=spec)
    if kind and name and "/" not in name and not is_built_in("data", spec):
        from .files import load_function

        return load_function(spec, root, args)
    raise DataError(f"{spec}: not a data specification, expected one of {FORMS}{_hint(spec)}")


def _hint(spec: str) -> str:
    """Say what somebody who named a file may have meant."""
    if spec.endswith((".ckpt", ".safetensors", ".tar")):
        return "; this looks like a checkpoint, give it with --checkpoint"
    if spec.endswith((".csv", ".csv.gz")):
        return f"; molecules are named smiles:{spec}"
    return f"; name the function, as in {spec}:graphs" if spec.endswith(".py") else ""


def _locate(name: str, root: Path | None) -> Path:
    """Return a file as given, or under the root when it is only there."""
    path = Path(name).expanduser()
    if not path.exists() and root is not None and (root / path).exists():
        return root / path
    return path
