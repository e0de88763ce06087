"""Files that a command leaves where it was told to, and the options they came from beside them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import ConfigError, OutputExistsError
from .files import write_text


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
