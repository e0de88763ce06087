"""The source files of code that is trusted, read once: what is hashed is what runs.

Such code is compiled from the very bytes whose hash was compared. A file that is exchanged or added
in the meantime, bytecode and compiled modules beside it are ignored. Nothing is imported to read
the sources.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from typing import Any, Final, Self

from ..errors import ConfigError
from .files import read_regular

#: Suffixes of code files, in the order in which Python looks for them.
_SUFFIXES: Final = (*EXTENSION_SUFFIXES, ".py")


class _ReadSource(SourceFileLoader):
    """Loads a module from given bytes, without bytecode from beside the file."""

    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self._data = data

    def get_data(self, path: str) -> bytes:
        """Return the given bytes."""
        return self._data

    def get_code(self, fullname: str) -> Any:
        """Compile the given bytes."""
        return self.source_to_code(self._data, self.path)


@dataclass(frozen=True)
class Sources(MetaPathFinder):
    """A file of code with what it imports from its folder, or with its whole package, read once.

    Inside :meth:`importable`, these modules are found before any others of their names.
    """

    file: Path
    #: The folder that module names are relative to.
    root: Path
    files: Mapping[Path, bytes]

    @classmethod
    def read(cls, file: Path, *, by_name: bool = False) -> Self:
        """Read a file and the code that belongs to it; nothing runs.

        Args:
            by_name: Whether it is named as a module, not by its path.
        """
        package = file.parent
        if not (package / "__init__.py").is_file():
            return cls(file, file.parent, _imported_by(file))
        while (package.parent / "__init__.py").is_file():
            package = package.parent
        found = (path for path in package.rglob("*") if path.name.endswith(_SUFFIXES))
        files = {path: read_regular(path) for path in sorted(found) if path.is_file()}
        return cls(file, package.parent if by_name else file.parent, files)

    @property
    def sha256(self) -> str:
        """The hash of all files and their relative paths."""
        digest = hashlib.sha256()
        for path, data in sorted(self.files.items()):
            digest.update(f"{os.path.relpath(path, self.file.parent)}\0".encode())
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    @property
    def are_current(self) -> bool:
        """Whether the files are unchanged."""
        try:
            return all(read_regular(path) == data for path, data in self.files.items())
        except (ConfigError, OSError):
            return False

    def spec(self, name: str, file: Path) -> ModuleSpec | None:
        """Return the import specification of a module in one of the files."""
        where, data = str(file), self.files[file]
        loader: Any = _ReadSource(name, where, data)
        if file.suffix != ".py":  # compiled code can only be loaded by its path
            if read_regular(file) != data:
                raise ImportError(f"{file} is not what you trusted")
            loader = ExtensionFileLoader(name, where)
        # No folder: other finders must not find anything else in it.
        inner: list[str] | None = [] if file.stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            name, where, loader=loader, submodule_search_locations=inner
        )

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module among the files; other modules are left to other finders."""
        stem = self.root.joinpath(*fullname.split("."))
        file = _existing(stem, self.files)
        if file is not None:
            return self.spec(fullname, file)
        if any(stem in each.parents for each in self.files):  # a folder without __init__.py
            found = ModuleSpec(fullname, None, is_package=True)
            found.submodule_search_locations = []
            return found
        return None

    @contextmanager
    def importable(self) -> Iterator[None]:
        """Make these modules importable, before any others of their names."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)


def code_text(source: str) -> str:
    """Return a source without its comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return ast.unparse(tree)


def code_sha256(kind: type) -> str:
    """Return a hash of the file of a class and of what it imports from its folder.

    Comments and docstrings do not count. Empty for a class that is in no source file.
    """
    try:
        found = Sources.read(Path(inspect.getsourcefile(kind) or ""))
        texts = {path: code_text(data.decode()) for path, data in found.files.items()}
    except (ConfigError, OSError, TypeError, ValueError, SyntaxError):
        return ""
    listed = sorted((os.path.relpath(path, found.root), text) for path, text in texts.items())
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def _existing(stem: Path, known: Mapping[Path, bytes] | None = None) -> Path | None:
    """Return the file of a module, among known files or on disk."""
    inside = (stem / f"__init__{suffix}" for suffix in _SUFFIXES)
    beside = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    there = Path.is_file if known is None else known.__contains__
    return next((path for path in (*inside, *beside) if there(path)), None)


def _imported_by(file: Path) -> dict[Path, bytes]:
    """Return the bytes of a file and of what its syntax tree imports from its folder."""
    root, found, ahead = file.parent, dict[Path, bytes](), [file]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found[path] = read_regular(path)
        if path.suffix != ".py":
            continue
        inside = path.relative_to(root).parent.parts
        for name in _imports(path, found[path], inside):
            # A package runs before its modules.
            parts = name.split(".")
            stems = (root.joinpath(*parts[: count + 1]) for count in range(len(parts)))
            ahead += [each for stem in stems if (each := _existing(stem)) is not None]
    return found


def _imports(path: Path, data: bytes, inside: Sequence[str]) -> Iterator[str]:
    """Yield the modules that a source imports; some names may be values of a module instead."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path}: found no Python source ({error}), expected some") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = inside[: len(inside) + 1 - node.level] if node.level else ()
            start = ".".join([*above, *([node.module] if node.module else [])])
            yield from filter(None, [start])
            yield from (f"{start}.{each.name}".lstrip(".") for each in node.names)


def find_source(place: str, folders: Sequence[Path]) -> Path | None:
    """Return the source file of a file or module, without importing it.

    Args:
        place: ``file.py`` or ``package.module``.
        folders: What relative names may be relative to.
    """
    if place.endswith(".py"):
        files = (folder / Path(place).expanduser() for folder in folders)
        return next((file.resolve() for file in files if file.is_file()), None)
    search: list[str] | None = [*map(str, folders), *sys.path]
    origin = None
    for part in place.split("."):
        found = None if search is None else PathFinder.find_spec(part, search)
        if found is None:
            return None
        origin, locations = found.origin, found.submodule_search_locations
        search = None if locations is None else list(locations)
    return None if origin is None or not origin.endswith(".py") else Path(origin).resolve()
