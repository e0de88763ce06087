"""Opening a cache: its manifest and its splits, without its activations and without torch.

A cache may come from anybody, so its files are opened with care: no links, no pipes, and no more
bytes than a file of its kind can have.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from ..errors import CacheError, NotFoundError, SplitError
from ..splits import Splits
from ..utils.decoding import parse_json
from ..utils.text import plural
from .format import MANIFEST_LIMIT, MANIFEST_NAME, SPLITS_LIMIT, SPLITS_NAME, Manifest

# Not every system has these flags; where they are missing, the check below still refuses links.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    # Opening a pipe must not wait for somebody to write into it.
    | getattr(os, "O_NONBLOCK", 0)
)


@contextmanager
def open_regular(path: Path) -> Iterator[FileIO]:
    """Open ``path`` for reading, refusing anything but a regular file that is no link."""
    try:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "a symbolic link")
        descriptor = os.open(path, _FLAGS)
    except OSError as error:
        found = {errno.ELOOP: "a symbolic link", errno.ENOENT: "nothing"}
        raise CacheError(
            f"{path}: found {found.get(error.errno or 0, error.strerror)}, expected a regular file"
        ) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CacheError(f"{path}: found a folder, pipe or device, expected a regular file")
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def _read_limited(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most ``limit`` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CacheError(f"{path}: found {size} bytes, expected at most {limit}")
        return file.read(size)


def sha256_prefix(file: FileIO, num_bytes: int) -> str:
    """Return the SHA-256 of the first ``num_bytes`` of an open file."""
    return sha256_prefixes(file, (num_bytes,))[0]


def sha256_prefixes(file: FileIO, sizes: Sequence[int]) -> list[str]:
    """Return the SHA-256 of each of these first bytes of an open file, which is read once.

    Args:
        file: A file that is open for reading.
        sizes: How many bytes, in rising order.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(max(sizes), 2**18)))
    file.seek(0)
    done, found = 0, []
    for size in sizes:
        while done < size and (count := file.readinto(buffer[: size - done])):
            digest.update(buffer[:count])
            done += count
        found.append(digest.hexdigest())
    return found


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
    text = _read_limited(manifest, MANIFEST_LIMIT)
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
    text = _read_limited(path, SPLITS_LIMIT)
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
