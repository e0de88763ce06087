"""Opening a cache: its manifest and its splits, without its activations and without torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import CacheError, NotFoundError, SplitError
from ..splits import Splits
from ..utils.decoding import parse_json
from ..utils.text import plural
from .format import MANIFEST_LIMIT, MANIFEST_NAME, SPLITS_LIMIT, SPLITS_NAME, Manifest
from .regular_file import read_limited


def read_manifest(path: str | Path) -> tuple[Path, Manifest]:
    """Return the folder of a cache and its manifest, read and checked."""
    folder = Path(path).absolute()
    if not folder.is_dir():
        raise NotFoundError(f"{path}: found no folder, expected a cache")
    manifest = folder / MANIFEST_NAME
    if not manifest.exists() and not manifest.is_symlink():
        shards = len(list(folder.glob("shard-*.h5")))
        if not is_begun(folder):
            raise CacheError(f"{path}: found {_describe(folder)}, expected a cache")
        raise CacheError(
            f"{path}: found {plural(shards, 'shard')} but no {MANIFEST_NAME}, expected a complete "
            "cache; run the same `histograph cache` command again to resume it"
        )
    text = read_limited(manifest, MANIFEST_LIMIT)
    return folder, Manifest.from_text(text, str(manifest))


def is_begun(folder: Path) -> bool:
    """Say whether a folder holds a cache, finished or not, damaged or not."""
    manifest = folder / MANIFEST_NAME
    return manifest.exists() or manifest.is_symlink() or any(folder.glob("shard-*.h5"))


def _describe(folder: Path) -> str:
    """Say what a folder without a manifest and shards is."""
    if (folder / "run.json").is_file():
        return "a run"
    if (folder / "head.json").is_file():
        return "an exported model"
    if any(folder.glob("*.cache")):
        return "a folder of caches"
    return f"no {MANIFEST_NAME}"


def read_splits(folder: Path, manifest: Manifest) -> Splits:
    """Read the splits of a cache, refusing any but the ones the manifest names."""
    path = folder / SPLITS_NAME
    text = read_limited(path, SPLITS_LIMIT)
    found = hashlib.sha256(text).hexdigest()
    if found != manifest.splits_sha256:
        raise CacheError(f"{path}: found checksum {found}, expected {manifest.splits_sha256}")
    value = parse_json(text, str(path))
    total = value.get("total") if isinstance(value, dict) else None
    # Before anything is allocated by that number.
    if total != manifest.num_labels:
        raise CacheError(f"{path}: found splits of {total}, expected {manifest.num_labels} rows")
    try:
        return Splits.from_json(value, where=str(path))
    except SplitError as error:
        raise CacheError(str(error)) from None
