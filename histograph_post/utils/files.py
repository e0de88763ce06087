"""Small, careful file operations: atomic writes, stable JSON, checksums.

Also whether a command can write where it was told to, and the options beside what it wrote.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import ConfigError, NotFoundError, OutputExistsError

#: Every unfinished file carries this suffix; a name without it is complete.
PARTIAL_SUFFIX = ".partial"

#: This machine, as it stands in the names of unfinished files.
_HOST = re.sub(r"[^A-Za-z0-9_.]", "_", platform.node()) or "host"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of ``path``; on success sync it and move it into place.

    The sibling ends in ``.partial`` and carries the names of the host and the process, so that two
    writers of the same file never share one. If the body raises, the sibling is removed and
    ``path`` is untouched.
    """
    partial = path.with_name(f"{path.name}.{_HOST}-{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        yield partial
        # Some writers make private files; an output is as readable as any file the user makes.
        partial.chmod(0o666 & ~_umask())
        _sync(partial)
        os.replace(partial, path)
        _sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove the unfinished files that killed processes of this machine left in a folder."""
    for path in folder.glob(f"*.{_HOST}-*{PARTIAL_SUFFIX}"):
        number = path.name.removesuffix(PARTIAL_SUFFIX).rpartition("-")[2]
        if number.isdigit() and not _is_running(int(number)):
            path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but running
    return True


def _umask() -> int:
    """Return the process's mask for new files."""
    mask = _read_umask()
    return _FIRST_UMASK if mask is None else mask


def _read_umask() -> int | None:
    """Return the mask where the system tells it (Linux)."""
    try:
        found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text("ascii"), re.M)
    except (OSError, UnicodeDecodeError):
        return None
    return None if found is None else int(found[1], 8)


def _first_umask() -> int:
    """Return the mask by setting it, which is no business of a process with several threads."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


#: The mask when this module was imported, where the system does not tell a later one.
_FIRST_UMASK = 0 if _read_umask() is not None else _first_umask()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically, as UTF-8."""
    with atomic_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def to_json(value: Any) -> str:
    """Return ``value`` as JSON with a stable layout; NaN and infinity are refused."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` atomically as JSON with a stable layout."""
    write_text(path, to_json(value))


def sha256_file(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    if not path.is_file():
        raise NotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the outputs of a command


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is, or nothing can be, before anything is computed."""
    # Unlike those of a Path, these never raise.
    if os.path.isdir(path):
        raise OutputExistsError(f"{path}: found a folder, expected a file or nothing")
    if os.path.exists(path) and not overwrite:
        raise OutputExistsError(f"{path}: found a file; choose another -o, or --overwrite")
    _require_place(path.parent)


def require_folder(folder: Path) -> None:
    """Refuse what is no folder, and no place for one, before anything is computed."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise OutputExistsError(f"{folder}: found a file, expected a folder or nothing")
    _require_place(folder)


def _require_place(folder: Path) -> None:
    """Refuse a folder that takes no files; it need not be there yet."""
    place = folder.absolute()
    there = next(parent for parent in (place, *place.parents) if os.path.exists(parent))
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(
            f"{folder}: found no place for files ({there}: {error.strerror}), "
            "expected a folder that can be written to"
        ) from None


def config_beside(path: Path) -> Path:
    """Return where the options stand that a file came from."""
    return path.with_name(f"{path.name}.config.toml")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write options as a file that ``--config`` takes."""
    write_text(path, tomli_w.dumps(dict(config)))
