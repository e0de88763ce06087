"""Files that a command leaves where it was told to, and the options they came from beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from .errors import OutputExistsError
from .files import write_text


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse to write where something is, before anything is computed."""
    if path.is_dir():
        raise OutputExistsError(f"{path}: found a folder, expected a file or nothing")
    if path.exists() and not overwrite:
        raise OutputExistsError(f"{path}: found a file; choose another -o, or --overwrite")


def config_beside(path: Path) -> Path:
    """Return where the options stand that a file came from."""
    return path.with_name(f"{path.name}.config.toml")


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write options as a file that ``--config`` takes."""
    write_text(path, tomli_w.dumps(dict(config)))
