"""Importing a user's code, a file by its path or a package by its name, without leaving traces."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from ..errors import HistographError, NotFoundError
from .sources import Sources

#: Code that a file names and the user approved, by its path or name: what is imported for it.
_approved: dict[str, Sources] = {}


def import_from(place: str, sources: Sources) -> None:
    """Let a place be imported from what was read, and from nothing else that is there."""
    _approved[_key(place)] = sources


def _key(place: str) -> str:
    return str(Path(place).expanduser().resolve()) if place.endswith(".py") else place


# --- what a name stands for


def without_partial(target: Any) -> Any:
    """Return what a ``functools.partial`` calls; anything else as it is."""
    while isinstance(target, functools.partial):
        target = target.func
    return target


def home_of(target: Any) -> str:
    """Return the name of the module that defines a function or class, for C code of its type."""
    called = without_partial(target)
    return getattr(called, "__module__", None) or type(called).__module__


def is_defined_in(target: Any, module: ModuleType) -> bool:
    """Whether a module, or a submodule of this package, defines a function or class.

    What it only imported from elsewhere, such as ``system`` after ``from os import system``, is
    not its own.
    """
    return f"{home_of(target)}.".startswith(f"{module.__name__}.")


# --- importing a user's file or package


@dataclass
class _Folder:
    """What was imported from a folder: code that registers itself somewhere must not run twice."""

    #: The files that were named, and the modules that they import from beside them, by name.
    files: dict[Path, ModuleType] = field(default_factory=dict)
    siblings: dict[str, ModuleType] = field(default_factory=dict)
    #: The hash of each source when it was imported.
    sources: dict[Path, str] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether every source still is what was imported."""
        return all(_source_hash(file) == known for file, known in self.sources.items())

    def keep(self, siblings: Mapping[str, ModuleType]) -> None:
        """Remember modules from beside the files, and what all sources are now."""
        self.siblings.update(siblings)
        for module in (*self.files.values(), *siblings.values()):
            if (file := _file_of(module)) is not None:
                self.sources.setdefault(file, _source_hash(file))


_folders: dict[Path, _Folder] = {}

#: What the modules of files that were named are called.
_OWN_NAME: Final = "histograph_user_"


def _source_hash(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


@contextmanager
def imported_place(place: str, kind: type[HistographError]) -> Iterator[ModuleType]:
    """Import what stands before the colon of a specification: a file, or a dotted module name.

    A source is imported once per process, by whatever name it is given, until it changes. The
    folder of the file, or the current one, is importable inside the block.

    Args:
        place: ``file.py`` or ``package.module``.
        kind: The error for what cannot be imported, and for a module of Python itself.
    """
    sources = _approved.get(_key(place))
    if sources is not None and not sources.are_current:
        raise kind(f"{place}: found other code than you approved; start Python again to name it")
    if not place.endswith(".py"):
        _refuse_standard_library(place, kind)
        with _current_folder(place) if sources is None else sources.importable():
            with _one_line_errors(place, kind):
                file = _imported_by_path(place)
                module = None if file is not None else importlib.import_module(place)
            if module is not None:
                yield module
                return
        place = str(file)
        sources = None
    with _imported_file(Path(place), kind, sources) as module:
        yield module


def _current_folder(place: str) -> AbstractContextManager[None]:
    """Make the current folder importable if the package that was named is there.

    Otherwise what an installed package imports could be found there.
    """
    here = Path.cwd()
    found = PathFinder.find_spec(place.partition(".")[0], [str(here)])
    return nullcontext() if found is None else _first_on_path(here)


def _imported_by_path(place: str) -> Path | None:
    """Return the file of a dotted name, if that was imported by its path."""
    found = None if place in sys.modules else importlib.util.find_spec(place)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).resolve()
    return file if file in _folders.get(file.parent, _Folder()).files else None


def _refuse_standard_library(place: str, kind: type[HistographError]) -> None:
    """Refuse a module of Python itself before it is imported: it has none of these."""
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise kind(
            f"{place}: found a module of Python's standard library, expected code of yours or of "
            f"an installed package (a file of that name is given as {place}.py:Name)"
        )


@contextmanager
def _imported_file(
    path: Path, kind: type[HistographError], sources: Sources | None = None
) -> Iterator[ModuleType]:
    """Import a Python file under a name of its own.

    What the file imports from its folder is out of sight afterwards, so that the ``layers.py`` of
    one project never stands in for that of another.
    """
    file = path.expanduser().resolve()
    if not file.is_file():
        raise NotFoundError(f"{path} does not exist" + ("" if file == path else f" ({file})"))
    folder = _folders.get(file.parent)
    if folder is None or not folder.is_current:
        for module in folder.files.values() if folder is not None else ():
            if module.__name__.startswith(_OWN_NAME):
                sys.modules.pop(module.__name__, None)
        folder = _folders[file.parent] = _Folder()
    known = set(sys.modules)
    # A file of the folder that was named before is also what others import by its name.
    beside = {**{named.stem: module for named, module in folder.files.items()}, **folder.siblings}
    sys.modules.update({name: module for name, module in beside.items() if name not in known})
    with _first_on_path(file.parent) if sources is None else sources.importable():
        try:
            if file not in folder.files:
                with _one_line_errors(str(path), kind):
                    folder.files[file] = _already_imported(file) or _execute(file, sources)
            if folder.files[file].__name__.startswith(_OWN_NAME):
                known.add(folder.files[file].__name__)
            yield folder.files[file]
        finally:
            folder.keep(_hide_siblings(file.parent, known))


def _already_imported(file: Path) -> ModuleType | None:
    """Return the module that a file is under another name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(file) and module.__name__ != "__main__":
            return module
    return None


def _execute(file: Path, sources: Sources | None) -> ModuleType:
    """Run a file as a module."""
    # The name must be an identifier: PyG writes import statements with it.
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:12]
    name = f"{_OWN_NAME}{digest}_{re.sub(r'[^0-9A-Za-z_]', '_', file.stem)}"
    spec = (
        importlib.util.spec_from_file_location(name, file)
        if sources is None
        else sources.spec(name, file)
    )
    assert spec is not None
    assert spec.loader is not None  # for any name that ends in .py
    module = importlib.util.module_from_spec(spec)
    # Annotations and PyG's code generation look the module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


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


def _hide_siblings(folder: Path, known: set[str]) -> dict[str, ModuleType]:
    """Drop the modules imported since ``known`` whose top level lies in ``folder``; return them."""
    new = [name for name in sys.modules if name.partition(".")[0] not in known]
    siblings = {name for name in new if "." not in name and _lies_in(sys.modules[name], folder)}
    return {name: sys.modules.pop(name) for name in new if name.partition(".")[0] in siblings}


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module is a file or a package right in ``folder``."""
    paths = list(getattr(module, "__path__", []))  # folders of a package
    file = getattr(module, "__file__", None)
    if not paths and file is not None:
        paths = [file]
    return any(Path(path).resolve().parent == folder for path in paths)
