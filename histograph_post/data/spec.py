"""From a data specification to a data set.

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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DataError
from ..utils.specifications import GRAPH_FILES, Specification, is_built_in

if TYPE_CHECKING:
    from .dataset import GraphDataset

#: Every form of a data specification, for messages.
FORMS = (
    "tu:NAME, planetoid:NAME, actor:, wiki:NAME, ogbg:NAME, smiles:FILE.csv, demo:, "
    "FILE.pt, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION"
)


@dataclass(frozen=True)
class DataSpec(Specification):
    """Data by name and arguments; a file that keeps it adds what the data turned out to be."""

    WHAT = "data"

    #: Offline copies of benchmark data; no file of a cache or a head names such a folder.
    root: Path | None = None
    #: Of the graphs and labels; empty for data that were not loaded yet, as the counts are 0.
    fingerprint: str = ""
    num_graphs: int = 0
    num_nodes: int = 0

    @classmethod
    def of(cls, dataset: GraphDataset, args: Mapping[str, Any]) -> DataSpec:
        """Return what a file keeps of data that are loaded."""
        return cls(
            dataset.spec,
            dict(args),
            fingerprint=dataset.fingerprint(),
            num_graphs=len(dataset),
            num_nodes=int(dataset.num_nodes.sum()),
        )

    def load(self) -> GraphDataset:
        """Load the data; code that only a file names is refused."""
        followed = self.to_follow()
        return load_data(followed.spec, root=followed.root, args=followed.args)


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
