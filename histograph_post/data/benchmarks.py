"""Benchmark sets through PyG's own classes: ``tu:``, ``planetoid:``, ``actor:``, ``wiki:``.

PyG writes ``processed/`` beside ``raw/``, but the root of the raw files may be read-only. So PyG
gets a folder of the user's cache instead, in which ``raw/`` holds links to the real files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch_geometric
from torch_geometric.datasets import Actor, Planetoid, TUDataset, WikipediaNetwork
from torch_geometric.transforms import NormalizeFeatures

from ..errors import DataError
from ..utils.files import PARTIAL_SUFFIX
from ..utils.text import first_line
from .dataset import GraphDataset, from_graphs
from .spec import (
    FEATURE_ARGS,
    LEVEL_ARGS,
    as_bool,
    as_choice,
    check_names,
    feature_options,
    level_options,
)

_PLANETOID = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}
_PLANETOID_FILES = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_GEOM_GCN_FILES = ("out1_node_feature_label.txt", "out1_graph_edges.txt")
_WIKIPEDIA = ("chameleon", "squirrel")

#: Everything that the published Planetoid files are made of.
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
    )
    graphs = processed(raw, root, Actor)
    return from_graphs(graphs, spec=spec, **level_options(args, own="node", spec=spec))


def load_wiki(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load a Wikipedia network as prepared by Geom-GCN, with its ten splits."""
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
    """Refuse Planetoid files that would run code: they are pickles, and PyG loads any pickle."""
    for path in files:
        if path.suffix in (".index", ".npz"):
            continue
        with path.open("rb") as file, warnings.catch_warnings():
            # The published files name modules that numpy and scipy have since moved.
            warnings.simplefilter("ignore")
            try:
                _PlanetoidUnpickler(file, encoding="latin1").load()
            except Exception as error:
                raise DataError(
                    f"{path}: not a Planetoid file ({type(error).__name__}: {error}), "
                    "expected numpy arrays; nothing in it has been executed"
                ) from error


# --- raw files

#: PyG's record of transforms, which are not used here; it reads them back unsafely.
_TRANSFORM_FILES = ("pre_transform.pt", "pre_filter.pt")


@dataclass(frozen=True)
class RawFiles:
    """What one benchmark set needs on disk, and where PyG expects it."""

    #: The data specification, for messages and for the name of the cache folder.
    spec: str
    #: Folders under a root in which the files may be, likeliest first.
    places: tuple[str, ...]
    #: Files that must be there.
    required: tuple[str, ...]
    #: PyG's folder of the set, below the root it is given; holds ``raw`` and ``processed``.
    folder: str = "."
    #: Pattern of further files, used if present.
    optional: str = ""

    def find(self, root: Path) -> Path:
        """Return the folder under ``root`` that holds all required files."""
        if not root.is_dir():
            raise DataError(f"{root}: no such folder, expected the root of the data sets")
        folders = [root / place for place in self.places]
        for folder in folders:
            if all((folder / name).is_file() for name in self.required):
                return folder.resolve()
        kind, _, name = self.spec.partition(":")
        near = [
            path.name
            for place in {root / place.partition(name)[0] for place in self.places if name in place}
            for path in (place.iterdir() if name and place.is_dir() else ())
            if path.is_dir() and path.name.lower() == name.lower() and path.name != name
        ]
        if near:
            raise DataError(f"{self.spec}: found no such data set, expected {kind}:{near[0]}")
        closest = max(folders, key=lambda f: sum((f / name).is_file() for name in self.required))
        missing = [name for name in self.required if not (closest / name).is_file()]
        raise DataError(
            f"{self.spec}: {', '.join(missing[:3])}{', ...' * (len(missing) > 3)} not found in "
            f"{closest}",
            details="looked in:\n" + "\n".join(f"  {folder}" for folder in folders),
        )

    def present(self, folder: Path) -> list[Path]:
        """Return the files of this set in ``folder``, by name."""
        return sorted(
            path
            for path in folder.iterdir()
            if path.is_file() and (path.name in self.required or fnmatch(path.name, self.optional))
        )


def processed(
    raw: RawFiles,
    root: Path | None,
    build: Callable[[str], Any],
    *,
    check: Callable[[Sequence[Path]], None] | None = None,
) -> Any:
    """Return the PyG data set that ``build(folder)`` makes of the raw files; it is processed once.

    With a root its files are used, after ``check`` has accepted them; without one PyG downloads.
    Several processes may do this at once: each works in a folder of its own, and the result of the
    first one to finish is used.
    """
    if root is None:
        source, files = "download", []
    else:
        found = raw.find(root)
        source, files = str(found), raw.present(found)
    folder = user_cache() / "datasets" / f"{_safe(raw.spec)}-{_key(source, files)}"
    if not folder.is_dir():
        _process(raw, files, folder, build, check)
    return _quietly(build, folder, f"{folder}: damaged, delete this folder to process it again")


def user_cache() -> Path:
    """Return this program's folder in the user's cache (``XDG_CACHE_HOME`` or ``~/.cache``)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "histograph-post"


@contextlib.contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside ``target``; afterwards it is removed, unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        prefix=f"{target.name}.",
        suffix=PARTIAL_SUFFIX,
        dir=target.parent,
        ignore_cleanup_errors=True,
    ) as name:
        yield Path(name)


def _process(
    raw: RawFiles,
    files: Sequence[Path],
    folder: Path,
    build: Callable[[str], Any],
    check: Callable[[Sequence[Path]], None] | None,
) -> None:
    trouble = f"{raw.spec}: cannot be downloaded, give a local copy with --data-root"
    if files:
        trouble = f"{files[0].parent}: cannot be read as {raw.spec}"
        if check is not None:
            check(files)
    try:
        with partial_folder(folder) as partial:
            links = partial / raw.folder / "raw"
            links.mkdir(parents=True)
            for path in files:
                (links / path.name).symlink_to(path)
            _quietly(build, partial, trouble)
            for name in _TRANSFORM_FILES:
                (partial / raw.folder / "processed" / name).unlink(missing_ok=True)
            if not folder.is_dir():  # another process may have been faster
                partial.rename(folder)
    except OSError as error:
        if folder.is_dir():  # made by another process
            return
        raise DataError(
            f"{folder.parent}: cannot be written ({error.strerror}); "
            "set XDG_CACHE_HOME to a folder that can"
        ) from error


def _quietly(build: Callable[[str], Any], folder: Path, trouble: str) -> Any:
    """Run PyG without its output; anything it raises becomes a :class:`DataError`."""
    silence = io.StringIO()
    with (
        contextlib.redirect_stdout(silence),
        contextlib.redirect_stderr(silence),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        # PyG warns before it falls back to unsafe unpickling: stop it there.
        warnings.filterwarnings("error", message="Weights only load failed")
        try:
            return build(str(folder))
        except Exception as error:
            raise DataError(f"{trouble} ({type(error).__name__}: {first_line(error)})") from error


def _key(source: str, files: Sequence[Path]) -> str:
    """Return a short hash that changes with the files and with PyG."""
    digest = hashlib.sha256(f"{torch_geometric.__version__}\n{source}\n".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _safe(spec: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in spec).strip("-")
