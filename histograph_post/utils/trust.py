"""What this user has trusted: checkpoints by their hash, code by its specification and its source.

The list is one file in the user's state folder, never in a cache or a run: their authors must not
decide what runs on this machine. Code stays trusted while the approved sources are unchanged and
where they were; ``specifications.py`` asks here before it follows a specification from a file.

What is hashed is what runs: trusted code is compiled from the very bytes whose hash was compared. A
file that is exchanged or added in the meantime, bytecode and compiled modules beside it are
ignored. Nothing is imported to read the sources.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    ExtensionFileLoader,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from typing import Any, Final, Literal, Self

from ..errors import ConfigError, NotFoundError
from .decoding import Sha256, decode, read_json_file
from .files import write_json
from .outputs import OutputLock

#: The list of earlier versions: hashes of checkpoints, one per line.
_FORMER = "trusted-checkpoints"

#: Approved code that only a file names: its path or module name -> its sources.
_approved: dict[str, Sources] = {}


def approved_sources(place: str) -> Sources | None:
    """Return the sources that a file or module must be imported from, if it was approved."""
    return _approved.get(_key(place))


def _key(place: str) -> str:
    return str(Path(place).expanduser().resolve()) if place.endswith(".py") else place


# --- the list


@dataclass(frozen=True)
class Trusted:
    """A checkpoint or code that the user trusts."""

    what: Literal["checkpoint", "model", "data", "head"]
    #: Of a checkpoint's bytes, or of all sources of code.
    sha256: Sha256
    #: Where it was; for a checkpoint only a reminder.
    file: str = ""
    #: The specification of code in files, and its arguments.
    spec: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)

    def sources(self) -> Sources | None:
        """Return the sources of code, if they are unchanged."""
        try:
            found = Sources.read(Path(self.file), by_name=not _place(self.spec).endswith(".py"))
        except (ConfigError, OSError):
            return None
        return found if found.sha256 == self.sha256 else None

    def names(self, what: str, spec: str, args: Mapping[str, Any]) -> bool:
        """Whether this is the code that a file names."""
        return (self.what, self.spec, _plain(self.args)) == (what, spec, _plain(args))

    def replaces(self, known: Trusted) -> bool:
        """Whether ``known`` is the same checkpoint, or code of the same name."""
        same_name = known.names(self.what, self.spec, self.args)
        return same_name and (self.what != "checkpoint" or self.sha256 == known.sha256)


@dataclass(frozen=True)
class _Store:
    """The file of the list."""

    trusted: tuple[Trusted, ...]


def trust_file() -> Path:
    """Return the file of the list."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # the standard says to ignore a relative one
        state = Path("~/.local/state").expanduser()
    return state / "histograph-post" / "trusted.json"


def all_trusted() -> list[Trusted]:
    """Return what this user trusts; a list that other users can write is refused."""
    path = trust_file()
    former = path.with_name(_FORMER)
    found: list[Trusted] = []
    for place in (path.parent, former, path):
        _refuse_of_others(place)
    with suppress(OSError, UnicodeDecodeError):
        hashes = former.read_text(encoding="ascii").split()
        found = [Trusted("checkpoint", sha256) for sha256 in hashes]
    if not path.is_file():
        return found
    stored = decode(_Store, read_json_file(path), str(path), error=ConfigError, defaults=True)
    return [*found, *stored.trusted]


def _refuse_of_others(place: Path) -> None:
    """Refuse a file or folder that other users can write or replace."""
    real = place.resolve()
    for each in (real.parent, real) if place.is_symlink() else (real,):
        try:
            found = each.stat()
        except OSError:
            return  # missing or unreadable
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if os.name == "posix" and (found.st_uid != os.getuid() or others):
            kind = "folder" if each.is_dir() else "file"
            raise ConfigError(
                f"{each}: found a {kind} that others can write, expected one of your own "
                f"(chmod go-w {each})"
            )


def trust(entries: Iterable[Trusted]) -> None:
    """Add entries to the list; code replaces earlier code of the same name."""
    with _changed_list() as trusted:
        for entry in entries:
            trusted[:] = [*(known for known in trusted if not entry.replaces(known)), entry]


def revoke(text: str) -> list[Trusted]:
    """Remove and return the entries of a specification, a file or the beginning of a hash."""

    def meant(entry: Trusted) -> bool:
        named = text and text in (entry.spec, entry.file, os.path.abspath(entry.file))
        return bool(named) or (len(text) >= 6 and entry.sha256.startswith(text))

    gone = [entry for entry in all_trusted() if meant(entry)]
    if gone:
        with _changed_list() as trusted:
            trusted[:] = [entry for entry in trusted if not meant(entry)]
    return gone


@contextmanager
def _changed_list() -> Iterator[list[Trusted]]:
    """Yield the list under a lock, and write it back."""
    path = trust_file()
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with OutputLock(path, wait=True):
        trusted = all_trusted()
        yield trusted
        write_json(path, {"trusted": [asdict(entry) for entry in trusted]})
        path.chmod(0o600)
        path.with_name(_FORMER).unlink(missing_ok=True)  # it is part of the new list


def is_trusted_checkpoint(sha256: str) -> bool:
    """Whether the user trusts a checkpoint with this hash."""
    return any(each.what == "checkpoint" and each.sha256 == sha256 for each in all_trusted())


# --- code


def trusted_code(what: str, spec: str, args: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return a specification of trusted code from here, or None, and why if it was trusted once."""
    for entry in all_trusted():
        if not entry.names(what, spec, args):
            continue
        sources = entry.sources()
        if sources is None:
            return None, f"{entry.file} is not what you trusted; "
        place = _place(entry.spec)
        if find_source(place, [Path.cwd()]) != Path(entry.file):
            # A module name may now lead to another module; a file is found by its path.
            if not place.endswith(".py"):
                return None, f"{place} does not lead to {entry.file} from here; "
            place = entry.file
        _approved[_key(place)] = sources
        return f"{place}:{spec.rpartition(':')[2]}", ""
    return None, ""


def code_to_trust(
    what: Literal["model", "data", "head"],
    spec: str,
    args: Mapping[str, Any],
    folders: Sequence[Path],
) -> Trusted:
    """Return the entry that would trust a recorded specification, without importing it.

    Args:
        spec: ``file.py:Name`` or ``package.module:Name``.
        folders: What relative names may be relative to.
    """
    place = _place(spec)
    file = find_source(place, folders)
    if file is None:
        looked = ", ".join(map(str, folders))
        raise NotFoundError(f"{spec}: found no source of this {what} in {looked}, expected one")
    sources = Sources.read(file, by_name=not place.endswith(".py"))
    return Trusted(what, sources.sha256, str(file), spec, dict(args))


def _place(spec: str) -> str:
    """Return the file or module of a specification, before its colon."""
    return spec.rpartition(":")[0] or spec


def _plain(args: Mapping[str, Any]) -> str:
    """Return arguments as text, which does not depend on whether they come from JSON or TOML."""
    return json.dumps(args, sort_keys=True, default=repr)


# --- the sources of code, read once

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
        files = {path: path.read_bytes() for path in sorted(found) if path.is_file()}
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
            return all(path.read_bytes() == data for path, data in self.files.items())
        except OSError:
            return False

    def spec(self, name: str, file: Path) -> ModuleSpec | None:
        """Return the import specification of a module in one of the files."""
        where, data = str(file), self.files[file]
        loader: Any = _ReadSource(name, where, data)
        if file.suffix != ".py":  # compiled code can only be loaded by its path
            if file.read_bytes() != data:
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
        found[path] = path.read_bytes()
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
