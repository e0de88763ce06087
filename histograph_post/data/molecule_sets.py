"""Published sets of molecules: ``ogbg:molhiv`` and ``moleculenet:BBBP``.

OGB's own files are read; the ``ogb`` package is needed only to find the address of a set that is
not on disk. Of MoleculeNet, the csv file is read, not what PyG made of it: so rows keep their
columns, and molecules take any encoding.
"""

from __future__ import annotations

import gzip
import http.client
import importlib.util
import re
import shutil
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.datasets import MoleculeNet

from ..errors import DataError, MissingExtraError
from ..splits import Split, Splits
from ..splits.split import read_folder
from ..utils.files import write_bytes
from .benchmarks import partial_folder, user_cache
from .dataset import GraphDataset, as_links
from .labels import attach_labels, label_tensor
from .molecules import MOLECULE_ENCODINGS, encode, read_molecules
from .spec import (
    LEVEL_ARGS,
    MOLECULE_SOURCES,
    STREAM_ARGS,
    Reading,
    as_choice,
    check_names,
    level_options,
)
from .tables import read_table, row_ids

_FIRST_FILE = Path("raw", "edge.csv.gz")


def load_ogbg(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load ``ogbg-NAME`` as OGB's own loader does: features, edge order, scaffold split.

    It is read from ``root``; without one from the user's cache folder, to which it is downloaded
    once. ``args``: ``mol_features`` other than ``ogb`` encodes the molecules again, from their
    SMILES.
    """
    spec = f"ogbg:{name}"
    check_names(args, ("mol_features", *LEVEL_ARGS), spec=spec)
    features = as_choice(args, "mol_features", MOLECULE_ENCODINGS, default="ogb", spec=spec)
    wanted = level_options(args, own="graph", spec=spec)
    if not re.fullmatch(r"mol[a-z0-9]+", name):
        raise DataError(f"{spec}: expected one of OGB's molecule sets, such as ogbg:molhiv")
    folder = _find_ogb(f"ogbg_{name}", root, spec)
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
    attach_labels(graphs, label_tensor(labels))
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


def load_moleculenet(
    name: str, root: Path | None, args: Mapping[str, Any], reading: Reading | None = None
) -> GraphDataset:
    """Load a set of MoleculeNet with the targets that PyG gives it.

    It is read from ``root``; without one from the user's cache folder, to which it is downloaded
    once. ``args``: ``mol_features`` and ``stream``, see :func:`.molecules.load_smiles`.
    """
    spec = f"moleculenet:{name}"
    check_names(args, ("mol_features", *STREAM_ARGS, *LEVEL_ARGS), spec=spec)
    if name.lower() not in MoleculeNet.names:
        known = ", ".join(entry[0] for entry in MoleculeNet.names.values())
        raise DataError(f"{spec}: no set of MoleculeNet, expected one of {known}")
    _, archive, file, smiles, targets = MoleculeNet.names[name.lower()]
    table = read_table(_find_moleculenet(name.lower(), f"{file}.csv", archive, root, spec))
    columns = table.header[targets] if isinstance(targets, slice) else (table.header[targets],)
    return read_molecules(
        table,
        {"mol_features": MOLECULE_SOURCES["moleculenet"], **args},
        spec=spec,
        smiles_column=table.header[smiles],
        targets=columns,
        reading=reading,
    )


def _encoded_again(smiles: list[str], features: str, spec: str) -> list[Data]:
    """Return the molecules in another encoding than that of OGB's files."""
    graphs, _, problems = encode(smiles, features)
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
        labels = np.array(rows, dtype=np.float64)
    except ValueError as error:
        raise DataError(f"{path}: not a table of numbers ({error})") from None
    if np.isinf(labels).any():
        raise DataError(f"{path}: found an infinite label, expected finite ones, blank for none")
    return labels


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


def _find_ogb(folder_name: str, root: Path | None, spec: str) -> Path:
    if root is None:
        cached = user_cache() / "ogb" / folder_name
        if not (cached / _FIRST_FILE).is_file():
            url, inner = _ogb_source(folder_name, spec)
            with _downloaded(url, cached, spec) as archive:
                with zipfile.ZipFile(archive) as opened:
                    opened.extractall(archive.parent)
                # Another process may have been faster; what it made is the same.
                if not cached.is_dir():
                    (archive.parent / inner).rename(cached)
        return cached
    places = [root / folder_name, root / "ogb" / folder_name]
    if root.name == folder_name or not root.name.startswith("ogbg_"):  # else it is another set
        places.append(root)
    files = [place / _FIRST_FILE for place in places]
    return _first(files, f"{spec}: {folder_name}/{_FIRST_FILE} not found in {root}").parents[1]


def _find_moleculenet(name: str, file: str, archive: str, root: Path | None, spec: str) -> Path:
    if root is None:
        cached = user_cache() / "moleculenet" / name / "raw" / file
        if not cached.is_file():
            url = MoleculeNet.url.format(archive)
            with _downloaded(url, cached, spec) as found:
                contents = found.read_bytes()
                write_bytes(cached, gzip.decompress(contents) if url.endswith(".gz") else contents)
        return cached
    folders = (f"{name}/raw", f"moleculenet/{name}/raw", f"MoleculeNet/{name}/raw", "raw", ".")
    places = [root / folder / each for folder in folders for each in (file, f"{file}.gz")]
    return _first(places, f"{spec}: {name}/raw/{file} not found in {root}")


def _first(places: Sequence[Path], missing: str) -> Path:
    """Return the first of these files that is there."""
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        looked_for = "\n".join(f"  {place}" for place in places)
        raise DataError(missing, details=f"looked for:\n{looked_for}")
    return found


@contextmanager
def _downloaded(url: str, target: Path, spec: str) -> Iterator[Path]:
    """Download a file to a temporary folder beside ``target``."""
    try:
        with partial_folder(target) as folder:
            file = folder / "download"
            with urllib.request.urlopen(url, timeout=60) as response, file.open("wb") as copy:
                shutil.copyfileobj(response, copy)
            yield file
    except (OSError, EOFError, http.client.HTTPException, zipfile.BadZipFile) as error:
        raise DataError(
            f"{spec}: cannot be downloaded from {url} ({error}); give a local copy with --data-root"
        ) from error


def _ogb_source(folder_name: str, spec: str) -> tuple[str, str]:
    """Return a set's URL and the folder in its archive, from the table in the ogb package.

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
