"""What this user has trusted: checkpoints by their hash, code by its specification and its source.

The list is one file in the user's state folder, never in a cache or a run: their authors must not
decide what runs on this machine. Code stays trusted while the approved sources are unchanged and
where they were; ``specifications.py`` asks here before it follows a specification from a file.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, NotFoundError
from .decoding import Sha256, decode, read_json_file
from .files import remove_leftovers, write_json
from .outputs import OutputLock
from .sources import Sources, find_source

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
        remove_leftovers(path.parent, alone=True, of=(path.name,))
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
