"""Importing a user's file or package without leaving traces in the running process."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from ..errors import HistographError, NotFoundError
from .specifications import refuse_standard_library


@contextmanager
def imported_place(place: str, kind: type[HistographError]) -> Iterator[ModuleType]:
    """Import what stands before the colon of a specification: a file, or a dotted module name.

    The folder of the file, or the current one, is importable inside the block.

    Args:
        place: ``file.py`` or ``package.module``.
        kind: The error for what cannot be imported, and for a module of Python itself.
    """
    if place.endswith(".py"):
        with _imported_file(Path(place), kind) as module:
            yield module
        return
    refuse_standard_library(place, kind)
    with _first_on_path(Path.cwd()):
        with _one_line_errors(place, kind):
            module = importlib.import_module(place)
        yield module


@contextmanager
def _imported_file(path: Path, kind: type[HistographError]) -> Iterator[ModuleType]:
    """Import a Python file under a name of its own.

    What the file imports from its folder is forgotten afterwards, so that the ``layers.py`` of one
    project never stands in for that of another.
    """
    file = path.expanduser().resolve()
    if not file.is_file():
        raise NotFoundError(f"{path} does not exist")
    # The name must be an identifier: PyG writes import statements with it.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = f"histograph_user_{digest}_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # for any name that ends in .py
    module = importlib.util.module_from_spec(spec)
    known = set(sys.modules)
    with _first_on_path(file.parent):
        # Annotations and PyG's code generation look the module up by its name.
        sys.modules[name] = module
        try:
            with _one_line_errors(str(path), kind):
                spec.loader.exec_module(module)
            yield module
        except BaseException:
            sys.modules.pop(name, None)
            raise
        finally:
            _forget_siblings(file.parent, known | {name})


@contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


@contextmanager
def _one_line_errors(place: str, kind: type[HistographError]) -> Iterator[None]:
    """Turn whatever a user's code raises while it is imported into one line."""
    try:
        yield
    except HistographError:
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise kind(f"importing {place} failed: {type(error).__name__}: {reason}") from error


def _forget_siblings(folder: Path, known: set[str]) -> None:
    """Drop the modules imported since ``known`` whose top level lies in ``folder``."""
    new = [name for name in sys.modules if name.partition(".")[0] not in known]
    siblings = {name for name in new if "." not in name and _lies_in(sys.modules[name], folder)}
    for name in new:
        if name.partition(".")[0] in siblings:
            del sys.modules[name]


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module is a file or a package right in ``folder``."""
    paths = list(getattr(module, "__path__", []))  # folders of a package
    file = getattr(module, "__file__", None)
    if not paths and file is not None:
        paths = [file]
    return any(Path(path).resolve().parent == folder for path in paths)
