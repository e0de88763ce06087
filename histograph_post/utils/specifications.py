"""Which specifications may run code, and importing that code.

Only built-in code runs, and code that the user names, on the command line or as an argument in
Python. A specification in a file (``head.json``, a cache's manifest, a fold's ``config.toml``) is
data: the file's author must not choose what runs on this machine, unless the user has approved
that very code before (``trust.py``). A user's file is imported by its path, a package by its name,
without leaving traces.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, Self

from ..errors import DataError, HistographError, ModelError, NotFoundError, one_line, raised_at
from .sources import Sources
from .trust import approved_sources, trusted_code

#: The models of this package.
BUILT_IN_MODELS: Final = ("gcn", "gin", "gat", "sage", "gps")

#: Networks of public checkpoints, which this package implements.
PUBLIC_MODELS: Final = (
    *("pretrain-gnns:gcn", "pretrain-gnns:gin", "pretrain-gnns:gat", "pretrain-gnns:sage"),
    *("molclr:gcn", "molclr:gin"),
    *("ogb:gcn", "ogb:gin", "ogb:gcn-virtual", "ogb:gin-virtual"),
)

#: What comes before the colon of the data that this package reads itself -> the module in ``data/``
#: whose ``load_...`` reads it.
BUILT_IN_DATA: Final = {
    **dict.fromkeys(("tu", "planetoid", "actor", "wiki"), "benchmarks"),
    **dict.fromkeys(("ogbg", "moleculenet"), "molecule_sets"),
    "smiles": "molecules",
    "demo": "synthetic",
}

#: Suffixes of files of graphs, which are read without running code from them.
GRAPH_FILES: Final = (".pt", ".pth")

#: The specification of a model or data that was passed in memory.
IN_MEMORY: Final = "memory"


def is_built_in(what: Literal["model", "data"], spec: Any) -> bool:
    """Whether a specification runs no code but that of this package."""
    if not isinstance(spec, str):
        return False
    if what == "model":
        return spec in BUILT_IN_MODELS or spec in PUBLIC_MODELS
    kind, colon, _ = spec.partition(":")
    return (bool(colon) and kind in BUILT_IN_DATA) or spec.endswith(GRAPH_FILES)


@dataclass(frozen=True)
class Specification:
    """A model or data by name, as the user gave it or as a file recorded it.

    Anything that turns a specification into code calls :meth:`to_follow` first, which refuses one
    that a file recorded, unless it is built in or the user has trusted it.
    """

    #: What is specified, and the name of its flag.
    WHAT: ClassVar[Literal["model", "data"]]

    spec: str
    #: Arguments of the constructor, or of the data.
    args: Mapping[str, Any] = field(default_factory=dict)
    #: The file that this was read from; None if the user named it.
    recorded_in: str | None = field(default=None, compare=False, kw_only=True)

    @property
    def is_built_in(self) -> bool:
        """Whether it runs no code but that of this package."""
        return is_built_in(self.WHAT, self.spec)

    def to_follow(self, given: str | None = None) -> Self:
        """Return a specification that may run: given, named or trusted by the user, or built in.

        An address is fetched only if the user names it.

        Args:
            given: A specification that the user names now; the recorded arguments stay.

        Raises:
            ModelError: for recorded code of a model that the user has neither named nor trusted.
            DataError: for such code of data, and for a recorded address.
        """
        if given is not None:
            return replace(self, spec=given, recorded_in=None)
        remote = "://" in str(self.spec)
        if self.recorded_in is None or (self.is_built_in and not remote):
            return self
        what, where = self.WHAT, self.recorded_in
        model = what == "model"
        kind = ModelError if model else DataError
        example = "my_model.py:Net" if model else "my_data.py:graphs"
        if self.spec == IN_MEMORY:
            raise kind(
                f"{where}: found a {what} that was handed over in memory, expected it again with "
                f"{what}= in Python, or by name, as in --{what} {example}"
            )
        if remote:
            raise kind(
                f"{where}: found the {what} {self.spec!r}, an address that a file names, so it was "
                f"not fetched; expected you to name it: --{what} {self.spec} ({what}= in Python)"
            )
        named, problem = trusted_code(what, str(self.spec), self.args)
        if named is not None:
            return replace(self, spec=named, recorded_in=None)
        raise kind(
            f"{where}: found the {what} {self.spec!r}, which is code that a file names, so it was "
            f"not run; {problem}expected you to name it, as in --{what} {example} ({what}= in "
            f"Python), or to approve it: histograph trust {Path(where).parent}"
        )


# --- where functions and classes are defined


def without_partial(target: Any) -> Any:
    """Return the function that a ``functools.partial`` calls; anything else as it is."""
    while isinstance(target, functools.partial):
        target = target.func
    return target


def home_of(target: Any) -> str:
    """Return the name of the module that defines a function or class; for C code, of its type."""
    called = without_partial(target)
    return getattr(called, "__module__", None) or type(called).__module__


def is_defined_in(target: Any, module: ModuleType) -> bool:
    """Whether a module, or a submodule of this package, defines a function or class.

    It does not define names that it only imports, such as ``system`` in ``from os import system``.
    """
    return f"{home_of(target)}.".startswith(f"{module.__name__}.")


# --- importing a user's file or package


@dataclass
class _Folder:
    """The modules imported from a folder: code that registers itself must not run twice."""

    #: The files that were named, and the modules that they import from the folder, by name.
    files: dict[Path, ModuleType] = field(default_factory=dict)
    siblings: dict[str, ModuleType] = field(default_factory=dict)
    #: The hash of each source when it was imported.
    sources: dict[Path, str] = field(default_factory=dict)

    @property
    def is_current(self) -> bool:
        """Whether no source has changed since it was imported."""
        return all(_source_hash(file) == known for file, known in self.sources.items())

    def keep(self, siblings: Mapping[str, ModuleType]) -> None:
        """Remember siblings, and the hashes of new sources."""
        self.siblings.update(siblings)
        for module in (*self.files.values(), *siblings.values()):
            if (file := _file_of(module)) is not None:
                self.sources.setdefault(file, _source_hash(file))


_folders: dict[Path, _Folder] = {}

#: Prefix of the module names of files that were named.
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
    """Import the file or module of a specification, before its colon.

    A source is imported once per process, whether by path or by name, until it changes. The folder
    of the file, or the current one, is importable inside the block.

    Args:
        place: ``file.py`` or ``package.module``.
        kind: The error to raise if the import fails, and for a module of the standard library.
    """
    sources = approved_sources(place)
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
    """Make the current folder importable, but only if the named package is there.

    Otherwise it could shadow what an installed package imports.
    """
    here = Path.cwd()
    found = PathFinder.find_spec(place.partition(".")[0], [str(here)])
    return nullcontext() if found is None else _first_on_path(here)


def _imported_by_path(place: str) -> Path | None:
    """Return the file of a dotted name, if it was imported by its path before."""
    found = None if place in sys.modules else importlib.util.find_spec(place)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).resolve()
    return file if file in _folders.get(file.parent, _Folder()).files else None


def _refuse_standard_library(place: str, kind: type[HistographError]) -> None:
    """Refuse a module of the standard library before it is imported: it has no models or data."""
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise kind(
            f"{place}: found a module of Python's standard library, expected code of yours or of "
            f"an installed package (a file of that name is given as {place}.py:Name)"
        )


@contextmanager
def _imported_file(
    path: Path, kind: type[HistographError], sources: Sources | None = None
) -> Iterator[ModuleType]:
    """Import a Python file under a unique module name.

    Modules that it imports from its folder are removed from ``sys.modules`` afterwards, so that the
    ``layers.py`` of one project is never used for another.
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
    # A file that was named before is also importable by its siblings.
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
    """Return the module of a file that was imported under another name."""
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
    """Turn anything that a user's code raises on import into an error of one line."""
    try:
        yield
    except HistographError as error:
        where = raised_at(error)
        if not where or where in str(error):
            raise
        raise kind(f"{where}: {error}", details=error.details) from error
    except (Exception, SystemExit) as error:
        where = raised_at(error)
        at = f" at {where}" if where else ""
        raise kind(f"importing {place} failed{at}: {one_line(error)}") from error


def _hide_siblings(folder: Path, known: set[str]) -> dict[str, ModuleType]:
    """Remove and return modules that are not ``known`` and whose top level is in ``folder``."""
    new = [name for name in sys.modules if name.partition(".")[0] not in known]
    siblings = {name for name in new if "." not in name and _lies_in(sys.modules[name], folder)}
    return {name: sys.modules.pop(name) for name in new if name.partition(".")[0] in siblings}


def _lies_in(module: ModuleType, folder: Path) -> bool:
    """Whether a top-level module is a file or a package directly in ``folder``."""
    paths = list(getattr(module, "__path__", []))  # folders of a package
    file = getattr(module, "__file__", None)
    if not paths and file is not None:
        paths = [file]
    return any(Path(path).resolve().parent == folder for path in paths)
