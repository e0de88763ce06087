"""``moleculenet:BBBP``: the sets of MoleculeNet, read from the folders that PyG keeps them in.

PyG's csv file is read, not what PyG made of it: so rows keep their columns, and molecules are
encoded in any way. By default that is PyG's own, atom for atom and bond for bond.
"""

from __future__ import annotations

import gzip
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_geometric.datasets import MoleculeNet

from ..errors import DataError
from ..utils.files import atomic_path
from .benchmarks import user_cache
from .dataset import GraphDataset
from .molecules import read_molecules, read_table
from .spec import LEVEL_ARGS, MOLECULE_SOURCES, check_names


def load_moleculenet(name: str, root: Path | None, args: Mapping[str, Any]) -> GraphDataset:
    """Load a set of MoleculeNet with the targets that PyG gives it.

    It is looked for in ``root``; without a root in the user's cache folder, into which it is
    downloaded where it is missing. ``args``: ``mol_features``, see :func:`.molecules.load_smiles`.
    """
    spec = f"moleculenet:{name}"
    check_names(args, ("mol_features", *LEVEL_ARGS), spec=spec)
    if name.lower() not in MoleculeNet.names:
        known = ", ".join(entry[0] for entry in MoleculeNet.names.values())
        raise DataError(f"{spec}: no set of MoleculeNet, expected one of {known}")
    _, archive, file, smiles, targets = MoleculeNet.names[name.lower()]
    table = read_table(_find(name.lower(), f"{file}.csv", archive, root, spec))
    columns = table.header[targets] if isinstance(targets, slice) else (table.header[targets],)
    return read_molecules(
        table,
        {"mol_features": MOLECULE_SOURCES["moleculenet"], **args},
        spec=spec,
        smiles_column=table.header[smiles],
        targets=columns,
    )


def _find(name: str, file: str, archive: str, root: Path | None, spec: str) -> Path:
    if root is None:
        cached = user_cache() / "moleculenet" / name / "raw" / file
        if not cached.is_file():
            _download(MoleculeNet.url.format(archive), cached, spec)
        return cached
    folders = (f"{name}/raw", f"moleculenet/{name}/raw", f"MoleculeNet/{name}/raw", "raw", ".")
    places = [root / folder / each for folder in folders for each in (file, f"{file}.gz")]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"{spec}: {name}/raw/{file} not found in {root}",
            details="looked for:\n" + "\n".join(f"  {place}" for place in places),
        )
    return found


def _download(url: str, path: Path, spec: str) -> None:
    """Download a csv file and move it to its place once it is complete."""
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            contents = response.read()
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial:
            partial.write_bytes(gzip.decompress(contents) if url.endswith(".gz") else contents)
    except (OSError, EOFError) as error:
        raise DataError(
            f"{spec}: cannot be downloaded from {url} ({error}); give a local copy with --data-root"
        ) from error
