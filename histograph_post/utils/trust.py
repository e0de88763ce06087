"""What this user has trusted: checkpoints by their hash, code by its specification and its source.

One file in the user's state folder, never in a cache or a run: whoever wrote those must not decide
what runs on this machine. Code is trusted while the sources that were approved are where they were,
as they were; ``specifications.py`` asks here before it follows what a file names.

What is hashed is what runs: code that only a file names is compiled from the very bytes whose hash
was compared. A file that is exchanged or added meanwhile, bytecode and compiled modules beside it
are not looked at. Nothing is imported to read it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

#: How files of code end, in the order in which Python looks for them.
_SUFFIXES: Final = (*EXTENSION_SUFFIXES, ".py")


class _ReadSource(SourceFileLoader):
    """Loads a module from bytes that were read before; no bytecode beside the file is used."""

    def __init__(self, name: str, path: str, data: bytes) -> None:
        super().__init__(name, path)
        self._data = data

    def get_data(self, path: str) -> bytes:
        """Return what was read."""
        return self._data

    def get_code(self, fullname: str) -> Any:
        """Compile what was read."""
        return self.source_to_code(self._data, self.path)


@dataclass(frozen=True)
class Sources(MetaPathFinder):
    """A file of code and what it imports from beside it, or all of its package, as read once.

    Only these modules are found below the folder while :meth:`importable` lasts.
    """

    file: Path
    #: The folder that names start from.
    root: Path
    files: Mapping[Path, bytes]

    @classmethod
    def read(cls, file: Path, *, by_name: bool = False) -> Self:
        """Read a file and the code that belongs to it; nothing runs.

        Args:
            by_name: Whether it is a module of a package, not a file by its path.
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
        """The hash of all files, with where they are."""
        digest = hashlib.sha256()
        for path, data in sorted(self.files.items()):
            digest.update(f"{os.path.relpath(path, self.file.parent)}\0".encode())
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    @property
    def are_current(self) -> bool:
        """Whether the files still are what was read."""
        try:
            return all(path.read_bytes() == data for path, data in self.files.items())
        except OSError:
            return False

    def spec(self, name: str, file: Path) -> ModuleSpec | None:
        """Return how a module is loaded from one of the files."""
        where, data = str(file), self.files[file]
        loader: Any = _ReadSource(name, where, data)
        if file.suffix != ".py":  # compiled code is loaded by its path alone
            if file.read_bytes() != data:
                raise ImportError(f"{file} is not what you trusted")
            loader = ExtensionFileLoader(name, where)
        # No folder: whatever else is there is not found by others.
        inner: list[str] | None = [] if file.stem == "__init__" else None
        return importlib.util.spec_from_file_location(
            name, where, loader=loader, submodule_search_locations=inner
        )

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Find a module among the files; what is not there, others may find elsewhere."""
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
        """Let these modules be imported, before any others of their names."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            sys.meta_path.remove(self)


def _existing(stem: Path, known: Mapping[Path, bytes] | None = None) -> Path | None:
    """Return the file of a module, among those that are known or on disk."""
    inside = (stem / f"__init__{suffix}" for suffix in _SUFFIXES)
    beside = (stem.with_name(stem.name + suffix) for suffix in _SUFFIXES)
    there = Path.is_file if known is None else known.__contains__
    return next((path for path in (*inside, *beside) if there(path)), None)


def _imported_by(file: Path) -> dict[Path, bytes]:
    """Return a file and what it imports from its folder, read off the code, with the bytes."""
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
            # A package runs before what is in it.
            parts = name.split(".")
            stems = (root.joinpath(*parts[: count + 1]) for count in range(len(parts)))
            ahead += [each for stem in stems if (each := _existing(stem)) is not None]
    return found


def _imports(path: Path, data: bytes, inside: Sequence[str]) -> Iterator[str]:
    """Yield the names that a source imports; those that may be values of a module among them."""
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
    """Return the file of what stands before a specification's colon, without importing it.

    Args:
        place: ``file.py`` or ``package.module``.
        folders: Where relative names may start from.
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


#: Code that a file names and the user approved, by its path or name: what is imported for it.
_approved: dict[str, Sources] = {}


def approved_sources(place: str) -> Sources | None:
    """Return what a place is imported from, and nothing else that is there, if it was approved."""
    return _approved.get(_key(place))


def _key(place: str) -> str:
    return str(Path(place).expanduser().resolve()) if place.endswith(".py") else place


# --- the list


@dataclass(frozen=True)
class Trusted:
    """A checkpoint or code that the user trusts."""

    what: Literal["checkpoint", "model", "data", "head"]
    #: Of a checkpoint's bytes; of all sources of code.
    sha256: Sha256
    #: Where it was then; of a checkpoint only a reminder.
    file: str = ""
    #: How files name code, and the arguments that they call it with.
    spec: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)

    def sources(self) -> Sources | None:
        """Return the sources of code, if they still are what was approved."""
        try:
            found = Sources.read(Path(self.file), by_name=not _place(self.spec).endswith(".py"))
        except (ConfigError, OSError):
            return None
        return found if found.sha256 == self.sha256 else None

    def names(self, what: str, spec: str, args: Mapping[str, Any]) -> bool:
        """Whether this is the code that a file names."""
        return (self.what, self.spec, _plain(self.args)) == (what, spec, _plain(args))


@dataclass(frozen=True)
class _Store:
    """The contents of the file."""

    trusted: tuple[Trusted, ...]


def trust_file() -> Path:
    """Return the file with what this user trusts."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():  # one that depends on the current folder is none, says its standard
        state = Path("~/.local/state").expanduser()
    return state / "histograph-post" / "trusted.json"


def all_trusted() -> list[Trusted]:
    """Return what this user trusts; a list that others may have written is refused."""
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
    """Refuse a file or folder that others can write, or exchange for one of theirs."""
    real = place.resolve()  # a link counts as what it leads to
    for each in (real.parent, real) if place.is_symlink() else (real,):
        try:
            found = each.stat()
        except OSError:
            return  # none yet, or none that can be read
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if os.name == "posix" and (found.st_uid != os.getuid() or others):
            kind = "folder" if each.is_dir() else "file"
            raise ConfigError(
                f"{each}: found a {kind} that others can write, expected one of your own "
                f"(chmod go-w {each})"
            )


def trust(entries: Iterable[Trusted]) -> None:
    """Remember what the user trusts from now on; code replaces what its name stood for before."""
    new = list(entries)

    def replaced(known: Trusted) -> bool:
        return any(
            known.names(entry.what, entry.spec, entry.args)
            and (entry.what != "checkpoint" or entry.sha256 == known.sha256)
            for entry in new
        )

    _rewrite(lambda found: [*(each for each in found if not replaced(each)), *new])


def revoke(text: str) -> list[Trusted]:
    """Forget what a specification, a file or the beginning of a hash stands for; return it."""

    def meant(entry: Trusted) -> bool:
        named = text and text in (entry.spec, entry.file, os.path.abspath(entry.file))
        return bool(named) or (len(text) >= 6 and entry.sha256.startswith(text))

    gone = [entry for entry in all_trusted() if meant(entry)]
    if gone:
        _rewrite(lambda found: [entry for entry in found if not meant(entry)])
    return gone


def _rewrite(change: Callable[[list[Trusted]], list[Trusted]]) -> None:
    path = trust_file()
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with OutputLock(path, wait=True):
        kept = change(all_trusted())
        write_json(path, {"trusted": [asdict(entry) for entry in kept]})
        path.chmod(0o600)
        path.with_name(_FORMER).unlink(missing_ok=True)  # it stands in the new list


def is_trusted_checkpoint(sha256: str) -> bool:
    """Whether the user has trusted a file with these bytes."""
    return any(each.what == "checkpoint" and each.sha256 == sha256 for each in all_trusted())


# --- code


def trusted_code(what: str, spec: str, args: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return how to name trusted code now, or None, and why if it was trusted before."""
    for entry in all_trusted():
        if not entry.names(what, spec, args):
            continue
        sources = entry.sources()
        if sources is None:
            return None, f"{entry.file} is not what you trusted; "
        place = _place(entry.spec)
        if find_source(place, [Path.cwd()]) != Path(entry.file):
            # A module by name could now be another one; a file is known by its path.
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
    """Return what trusting a recorded specification would mean; nothing of it is imported.

    Args:
        spec: ``file.py:Name`` or ``package.module:Name``.
        folders: Where relative names may start from.
    """
    place = _place(spec)
    file = find_source(place, folders)
    if file is None:
        looked = ", ".join(map(str, folders))
        raise NotFoundError(f"{spec}: found no source of this {what} in {looked}, expected one")
    sources = Sources.read(file, by_name=not place.endswith(".py"))
    return Trusted(what, sources.sha256, str(file), spec, dict(args))


def _place(spec: str) -> str:
    """Return what stands before the colon of a specification."""
    return spec.rpartition(":")[0] or spec


def _plain(args: Mapping[str, Any]) -> str:
    """Return arguments as a text, whether they were read from JSON or from TOML."""
    return json.dumps(args, sort_keys=True, default=repr)
