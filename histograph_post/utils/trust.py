"""What this user has trusted: checkpoints by their hash, code by its specification and its source.

One file in the user's state folder, never in a cache or a run: whoever wrote those must not decide
what runs on this machine. Code is trusted while the sources that were approved are where they were,
as they were; :mod:`.specifications` asks here before it follows what a file names.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, NotFoundError
from .decoding import Sha256, decode, read_json_file
from .files import write_json
from .outputs import OutputLock

#: The list of earlier versions: hashes of checkpoints, one per line.
_FORMER = "trusted-checkpoints"


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

    @property
    def is_unchanged(self) -> bool:
        """Whether the sources of code still are what was approved."""
        try:
            return _sources_sha256(Path(self.file)) == self.sha256
        except (ConfigError, OSError):
            return False

    def names(self, what: str, spec: str, args: Mapping[str, Any]) -> bool:
        """Whether this is the code that a file names."""
        return (self.what, self.spec, _plain(self.args)) == (what, spec, _plain(args))


@dataclass(frozen=True)
class _Store:
    """The contents of the file."""

    trusted: tuple[Trusted, ...]


def trust_file() -> Path:
    """Return the file with what this user trusts."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "histograph-post" / "trusted.json"


def all_trusted() -> list[Trusted]:
    """Return what this user trusts; a list that others may have written is refused."""
    path, found = trust_file(), []
    with suppress(OSError, UnicodeDecodeError):
        hashes = path.with_name(_FORMER).read_text(encoding="ascii").split()
        found = [Trusted("checkpoint", sha256) for sha256 in hashes]
    try:
        owner, mode = path.stat().st_uid, path.stat().st_mode
    except OSError:
        return found  # none yet, or none that can be read
    if os.name == "posix" and (owner != os.getuid() or mode & stat.S_IWOTH):
        raise ConfigError(f"{path}: found a file that others can write, expected one of your own")
    stored = decode(_Store, read_json_file(path), str(path), error=ConfigError, defaults=True)
    return [*found, *stored.trusted]


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
    with OutputLock(path, wait=True):
        kept = change(all_trusted())
        write_json(path, {"trusted": [asdict(entry) for entry in kept]})
        path.with_name(_FORMER).unlink(missing_ok=True)  # it stands in the new list


def is_trusted_checkpoint(sha256: str) -> bool:
    """Whether the user has trusted a file with these bytes."""
    return any(each.what == "checkpoint" and each.sha256 == sha256 for each in all_trusted())


# --- code


def trusted_code(what: str, spec: str, args: Mapping[str, Any]) -> tuple[str | None, str]:
    """Return how to name trusted code now, or None, and why if it was trusted before.

    Args:
        what: ``model``, ``data`` or ``head``.
        spec: How a file names it.
        args: What it would be called with.
    """
    for entry in all_trusted():
        if not entry.names(what, spec, args):
            continue
        if not entry.is_unchanged:
            return None, f"{entry.file} is not what you trusted; "
        place, _, name = spec.rpartition(":")
        if _find_source(place, [Path.cwd()]) == Path(entry.file):
            return spec, ""
        # A module by name could now be another one; a file is known by its path.
        if place.endswith(".py"):
            return f"{entry.file}:{name}", ""
        return None, f"{place} does not lead to {entry.file} from here; "
    return None, ""


def code_to_trust(
    what: Literal["model", "data", "head"],
    spec: str,
    args: Mapping[str, Any],
    folders: Sequence[Path],
) -> Trusted:
    """Return what trusting a recorded specification would mean; nothing of it is imported.

    Args:
        what: What is specified.
        spec: ``file.py:Name`` or ``package.module:Name``.
        args: What it is called with.
        folders: Where relative names may start from.
    """
    place = spec.rpartition(":")[0] or spec
    file = _find_source(place, folders)
    if file is None:
        looked = ", ".join(map(str, folders))
        raise NotFoundError(f"{spec}: found no source of this {what} in {looked}, expected one")
    return Trusted(what, _sources_sha256(file), str(file), spec, dict(args))


def _find_source(place: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of what stands before a specification's colon, without importing it."""
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


def _sources_sha256(file: Path) -> str:
    """Return a hash of a source and of those that it imports from beside it.

    Of a package, all sources count. Imports are read off the code, which does not run.
    """
    package = file.parent
    if (package / "__init__.py").is_file():
        while (package.parent / "__init__.py").is_file():
            package = package.parent
        files = set(package.rglob("*.py"))
    else:
        finder = ModuleFinder(path=[str(file.parent)])
        try:
            finder.run_script(str(file))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ConfigError(f"{file}: found no Python source ({error}), expected some") from None
        found = (getattr(each, "__file__", None) for each in finder.modules.values())
        files = {Path(source).resolve() for source in found if source}
    digest = hashlib.sha256()
    for each in sorted(files):
        digest.update(f"{os.path.relpath(each, file.parent)}\0".encode())
        digest.update(hashlib.sha256(each.read_bytes()).digest())
    return digest.hexdigest()


def _plain(args: Mapping[str, Any]) -> str:
    """Return arguments as a text, whether they were read from JSON or from TOML."""
    return json.dumps(args, sort_keys=True, default=repr)
