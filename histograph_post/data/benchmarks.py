"""Benchmark sets through PyG's own classes: ``tu:``, ``planetoid:``, ``actor:``, ``wiki:``."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_geometric.datasets import Actor, Planetoid, TUDataset, WikipediaNetwork
from torch_geometric.transforms import NormalizeFeatures

from ..errors import DataError
from .arguments import (
    FEATURE_ARGS,
    LEVEL_ARGS,
    as_bool,
    as_choice,
    check_names,
    feature_options,
    level_options,
)
from .dataset import GraphDataset, from_graphs
from .raw_files import RawFiles, processed

_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_PLANETOID_FILES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_GEOM_GCN_FILES = ("out1_node_feature_label.txt", "out1_graph_edges.txt")
_WIKIPEDIA = ("chameleon", "squirrel")

#: All that the published Planetoid files are made of.
_PLANETOID_GLOBALS = {
    ("builtins", "list"),
    ("__builtin__", "list"),
    ("collections", "defaultdict"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("scipy.sparse.csr", "csr_matrix"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("_codecs", "encode"),
}


def load_tu(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load a graph-classification or regression set of the TU collection.

    ``node_attr=true`` keeps the continuous node attributes in front of the one-hot node labels.
    """
    spec = f"tu:{name}"
    check_names(args, ("node_attr", *FEATURE_ARGS, *LEVEL_ARGS), spec=spec)
    if not re.fullmatch(r"[\w.+-]+", name) or name.startswith("."):
        raise DataError(
            f"{spec}: not a name of the TU collection, expected one such as tu:PROTEINS"
        )
    node_attr = as_bool(args, "node_attr", default=False, spec=spec)
    raw = RawFiles(
        spec=spec,
        places=(f"{name}/raw", f"tu/{name}/raw", "raw", name, f"tu/{name}", "."),
        required=(f"{name}_A.txt", f"{name}_graph_indicator.txt"),
        optional=f"{name}_*.txt",
        folder=name,
    )
    graphs = processed(raw, root, lambda folder: TUDataset(folder, name, use_node_attr=node_attr))
    return from_graphs(
        graphs,
        spec=spec,
        **level_options(args, own="graph", spec=spec),
        **feature_options(args, spec=spec),
    )


def load_planetoid(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load Cora, CiteSeer or PubMed with the public split or the ten of Geom-GCN.

    ``normalize_features=true`` makes the features of each node sum to one.
    """
    spec = f"planetoid:{name}"
    check_names(args, ("split", "normalize_features", *LEVEL_ARGS), spec=spec)
    title = _PLANETOID.get(name.lower())
    if title is None:
        raise DataError(f"{spec}: unknown, expected one of {', '.join(_PLANETOID.values())}")
    split = as_choice(args, "split", ("public", "geom-gcn"), default="public", spec=spec)
    normalize = as_bool(args, "normalize_features", default=False, spec=spec)
    required = tuple(f"ind.{title.lower()}.{part}" for part in _PLANETOID_FILES)
    folder = title
    if split == "geom-gcn":
        required += _fold_files(title.lower())
        folder = f"{title}/geom-gcn"
    raw = RawFiles(
        spec=f"planetoid:{title}",
        places=(f"{folder}/raw", f"planetoid/{folder}/raw", "raw"),
        required=required,
        optional="",
        folder=folder,
    )
    transform = NormalizeFeatures() if normalize else None
    graphs = processed(
        raw,
        root,
        lambda place: Planetoid(place, title, split=split, transform=transform),
        check=_check_pickles,
    )
    notes = ["node features divided by their sum (normalize_features=true)"] if normalize else []
    return from_graphs(graphs, spec=spec, notes=notes, **level_options(args, own="node", spec=spec))


def load_actor(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load the actor co-occurrence network with its ten Geom-GCN splits."""
    spec = f"actor:{name}"
    check_names(args, LEVEL_ARGS, spec=spec)
    if name:
        raise DataError(f"{spec}: there is only one, expected actor:")
    raw = RawFiles(
        spec=spec,
        places=("raw", "Actor/raw", "actor/raw"),
        required=(*_GEOM_GCN_FILES, *_fold_files("film")),
        optional="",
        folder=".",
    )
    graphs = processed(raw, root, Actor)
    return from_graphs(graphs, spec=spec, **level_options(args, own="node", spec=spec))


def load_wiki(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load a Wikipedia network as Geom-GCN prepared it, with its ten splits."""
    spec = f"wiki:{name}"
    check_names(args, LEVEL_ARGS, spec=spec)
    title = name.lower()
    if title not in _WIKIPEDIA:
        raise DataError(f"{spec}: unknown, expected one of {', '.join(_WIKIPEDIA)}")
    folder = f"{title}/geom_gcn"
    raw = RawFiles(
        spec=spec,
        places=(f"{folder}/raw", f"wikipedia/{folder}/raw", f"wiki/{folder}/raw", "raw"),
        required=(*_GEOM_GCN_FILES, *_fold_files(title)),
        optional="",
        folder=folder,
    )
    graphs = processed(raw, root, lambda place: WikipediaNetwork(place, title))
    return from_graphs(graphs, spec=spec, **level_options(args, own="node", spec=spec))


def _fold_files(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_split_0.6_0.2_{fold}.npz" for fold in range(10))


class _PlanetoidUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLANETOID_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def _check_pickles(files: Sequence[Path]) -> None:
    """Refuse Planetoid files that would run code: they are pickles, and PyG reads any pickle."""
    for path in files:
        if path.suffix in (".index", ".npz"):
            continue
        with path.open("rb") as file, warnings.catch_warnings():
            # The published files name modules that numpy and scipy have moved since.
            warnings.simplefilter("ignore")
            try:
                _PlanetoidUnpickler(file, encoding="latin1").load()
            except Exception as error:
                raise DataError(
                    f"{path}: not a Planetoid file ({type(error).__name__}: {error}), "
                    "expected numpy arrays; nothing in it has been executed"
                ) from error
