"""``ogbg:molhiv``: the molecule sets of the Open Graph Benchmark, read from OGB's own files.

The files are read directly. The ``ogb`` package is needed only to learn where a set that is not on
disk can be downloaded from.
"""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import re
import shutil
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from ..errors import DataError, MissingExtraError
from ..splits import Split, Splits
from ..splits.resolving import read_folder
from ..utils.files import PARTIAL_SUFFIX
from .benchmarks import user_cache
from .dataset import GraphDataset, as_links
from .molecule_features import MOLECULE_ENCODINGS, molecule_encoding
from .molecules import attach_labels, encode, read_table, row_ids
from .spec import LEVEL_ARGS, as_choice, check_names, level_options

_FIRST_FILE = Path("raw", "edge.csv.gz")


def load_ogbg(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load ``ogbg-NAME`` as OGB's own loader gives it: features, edge order, scaffold split.

    It is looked for in ``root``; without a root in the user's cache folder, into which it is
    downloaded where it is missing. ``args``: ``mol_features`` other than ``ogb`` encodes the
    molecules again, from their SMILES.
    """
    spec = f"ogbg:{name}"
    check_names(args, ("mol_features", *LEVEL_ARGS), spec=spec)
    features = as_choice(args, "mol_features", MOLECULE_ENCODINGS, default="ogb", spec=spec)
    wanted = level_options(args, own="graph", spec=spec)
    if not re.fullmatch(r"mol[a-z0-9]+", name):
        raise DataError(f"{spec}: expected one of OGB's molecule sets, such as ogbg:molhiv")
    folder = _find(f"ogbg_{name}", root, spec)
    graphs = _read_graphs(folder / "raw")
    labels = _read_labels(folder / "raw" / "graph-label.csv.gz")  # [num_graphs, num_targets]
    table = read_table(folder / "mapping" / "mol.csv.gz")
    targets = [column for column in table.header if column not in ("smiles", "mol_id")]
    if (len(labels), table.num_rows, len(targets)) != (len(graphs), len(graphs), labels.shape[1]):
        raise DataError(
            f"{folder}: found {len(graphs)} graphs, labels {list(labels.shape)} and "
            f"{table.num_rows} molecules with {len(targets)} targets, expected them to agree"
        )
    if features != "ogb":
        graphs = _encoded_again(list(table.column("smiles")), features, spec)
    attach_labels(graphs, labels)
    official = _official(folder / "split" / "scaffold", len(graphs))
    dataset = GraphDataset(
        spec=spec,
        graphs=graphs,
        ids=row_ids(table, np.arange(len(graphs))),
        level="graph",
        target_names=targets,
        official=official,
        smiles=list(table.column("smiles")),
        notes=[] if official else [f"{spec}: comes without its scaffold split"],
    )
    return as_links(dataset, wanted["links"]) if wanted["level"] == "link" else dataset


def _encoded_again(smiles: list[str], features: str, spec: str) -> list[Data]:
    """Return the molecules in another encoding than OGB's, which is all that its files have."""
    graphs, _, problems = encode(smiles, molecule_encoding(features))
    if problems:
        row, problem = next(iter(problems.items()))
        raise DataError(f"{spec}: {smiles[row]}: {problem} ({len(problems)} of {len(smiles)} rows)")
    return graphs


def _official(folder: Path, total: int) -> Splits | None:
    if not folder.is_dir():
        return None
    folds = tuple(Split(*parts) for parts in read_folder(folder))
    splits = Splits(kind="official", unit="graph", total=total, seed=None, folds=folds)
    splits.validate(where=str(folder))
    return splits


# --- OGB's files


def _read_graphs(raw: Path) -> list[Data]:
    num_nodes = _read_integers(raw / "num-node-list.csv.gz", 1)[:, 0]  # [num_graphs]
    num_edges = _read_integers(raw / "num-edge-list.csv.gz", 1)[:, 0]  # [num_graphs]
    x = _read_integers(raw / "node-feat.csv.gz")  # [total_nodes, 9]
    edges = _read_integers(raw / "edge.csv.gz", 2)  # [total_edges, 2]
    edge_attr = _read_integers(raw / "edge-feat.csv.gz")  # [total_edges, 3]
    if len(num_nodes) != len(num_edges) or len(x) != num_nodes.sum():
        raise DataError(
            f"{raw}: found {len(num_nodes)} node counts, {len(num_edges)} edge counts and {len(x)} "
            f"rows of node features, expected {num_nodes.sum()} rows and as many counts of each"
        )
    if not len(edges) == len(edge_attr) == num_edges.sum():
        raise DataError(
            f"{raw}: found {len(edges)} edges and {len(edge_attr)} rows of edge features, "
            f"expected {num_edges.sum()} of each"
        )
    if ((edges < 0) | (edges >= np.repeat(num_nodes, num_edges)[:, None])).any():
        raise DataError(f"{raw / 'edge.csv.gz'}: found an edge to a node its graph does not have")
    # Each bond is stored once; OGB's loader puts the reverse edge right behind it.
    both = np.stack([edges, edges[:, ::-1]], axis=1).reshape(-1, 2)  # [2 * total_edges, 2]
    both_attr = np.repeat(edge_attr, 2, axis=0)  # [2 * total_edges, 3]
    node_ends, edge_ends = np.cumsum(num_nodes)[:-1], 2 * np.cumsum(num_edges)[:-1]
    parts = zip(
        np.split(x, node_ends),
        np.split(both, edge_ends),
        np.split(both_attr, edge_ends),
        strict=True,
    )
    # Copies: a view would keep, and save, the arrays of the whole set with every single graph.
    return [
        Data(
            x=torch.tensor(nodes),  # [num_nodes, 9]
            edge_index=torch.tensor(pairs.T.copy()),  # [2, num_edges]
            edge_attr=torch.tensor(bonds),  # [num_edges, 3]
        )
        for nodes, pairs, bonds in parts
    ]


def _read_integers(path: Path, width: int | None = None) -> np.ndarray:
    """Read a gzipped csv file of whole numbers without a header as int64 ``[rows, columns]``."""
    lines = _read_lines(path)
    try:
        values = np.loadtxt(lines, delimiter=",", dtype=np.int64, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}: not a table of whole numbers ({error})") from None
    if width is not None and values.shape[1] != width:
        raise DataError(f"{path}: found {values.shape[1]} columns, expected {width}")
    return values


def _read_labels(path: Path) -> np.ndarray:
    """Read a gzipped csv file of numbers without a header as float64, a blank being NaN."""
    try:
        # A single blank target is an empty line: it must stay.
        rows = [
            [float(cell) if cell.strip() else np.nan for cell in line.split(",")]
            for line in _read_lines(path)
        ]
        return np.array(rows, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: not a table of numbers ({error})") from None


def _read_lines(path: Path) -> list[str]:
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: no such file, expected OGB's files as they are shipped") from None
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not a gzipped csv file ({error})") from None
    if not lines:
        raise DataError(f"{path}: found no rows")
    return lines


# --- finding and downloading


def _find(folder_name: str, root: Path | None, spec: str) -> Path:
    if root is None:
        cached = user_cache() / "ogb" / folder_name
        if not (cached / _FIRST_FILE).is_file():
            _download(folder_name, cached, spec)
        return cached
    places = [root / folder_name, root / "ogb" / folder_name]
    if root.name == folder_name or not root.name.startswith("ogbg_"):  # else it is another set
        places.append(root)
    for place in places:
        if (place / _FIRST_FILE).is_file():
            return place
    raise DataError(
        f"{spec}: {folder_name}/{_FIRST_FILE} not found in {root}",
        details="looked in:\n" + "\n".join(f"  {place}" for place in places),
    )


def _download(folder_name: str, folder: Path, spec: str) -> None:
    """Download a set and move it to ``folder`` once it is complete."""
    url, inner = _source(folder_name, spec)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f"{folder_name}.", suffix=PARTIAL_SUFFIX, dir=folder.parent
        ) as partial:
            archive = Path(partial, "archive.zip")
            with urllib.request.urlopen(url, timeout=60) as response, archive.open("wb") as file:
                shutil.copyfileobj(response, file)
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(partial)
            # Another process may have been faster; what it made is the same.
            if not folder.is_dir():
                Path(partial, inner).rename(folder)
    except (OSError, http.client.HTTPException, zipfile.BadZipFile) as error:
        raise DataError(
            f"{spec}: cannot be downloaded from {url} ({error}); give a local copy with --data-root"
        ) from error


def _source(folder_name: str, spec: str) -> tuple[str, str]:
    """Return a set's address and the folder in its archive, from the table in the ogb package.

    The package is not imported: on import it asks the network for its latest version.
    """
    package = importlib.util.find_spec("ogb")
    if package is None or package.origin is None:
        raise MissingExtraError(f"{spec} (not on disk: --data-root)", extra="ogb")
    table = read_table(Path(package.origin).parent / "graphproppred" / "master.csv")
    name = folder_name.replace("_", "-")
    if name not in table.header:
        known = ", ".join(
            column.removeprefix("ogbg-") for column in table.header if "-mol" in column
        )
        raise DataError(f"{spec}: OGB has no such set, expected one of {known}")
    entry = dict(zip(table.columns[0], table.column(name), strict=True))
    return entry["url"], entry["download_name"]
