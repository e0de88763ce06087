"""What this user has trusted: checkpoints by their hash, code by its specification and its source.

One file in the user's state folder, never in a cache or a run: whoever wrote those must not decide
what runs on this machine. Code is trusted while the sources that were approved are where they were,
as they were; :mod:`.specifications` asks here before it follows what a file names.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, NotFoundError
from .decoding import Sha256, decode, read_json_file
from .files import write_json
from .importing import import_from
from .outputs import OutputLock
from .sources import Sources, find_source

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

    def sources(self) -> Sources | None:
        """Return the sources of code, if they still are what was approved."""
        try:
            found = Sources.read(Path(self.file), by_name=not self.place.endswith(".py"))
        except (ConfigError, OSError):
            return None
        return found if found.sha256 == self.sha256 else None

    @property
    def place(self) -> str:
        """What stands before the colon of the specification."""
        return self.spec.rpartition(":")[0] or self.spec

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
    """Return how to name trusted code now, or None, and why if it was trusted before.

    Args:
        what: ``model``, ``data`` or ``head``.
        spec: How a file names it.
        args: What it would be called with.
    """
    for entry in all_trusted():
        if not entry.names(what, spec, args):
            continue
        sources = entry.sources()
        if sources is None:
            return None, f"{entry.file} is not what you trusted; "
        if find_source(entry.place, [Path.cwd()]) == Path(entry.file):
            place = entry.place
        # A module by name could now be another one; a file is known by its path.
        elif entry.place.endswith(".py"):
            place = entry.file
        else:
            return None, f"{entry.place} does not lead to {entry.file} from here; "
        import_from(place, sources)
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
        what: What is specified.
        spec: ``file.py:Name`` or ``package.module:Name``.
        args: What it is called with.
        folders: Where relative names may start from.
    """
    place = spec.rpartition(":")[0] or spec
    file = find_source(place, folders)
    if file is None:
        looked = ", ".join(map(str, folders))
        raise NotFoundError(f"{spec}: found no source of this {what} in {looked}, expected one")
    sources = Sources.read(file, by_name=not place.endswith(".py"))
    return Trusted(what, sources.sha256, str(file), spec, dict(args))


def _plain(args: Mapping[str, Any]) -> str:
    """Return arguments as a text, whether they were read from JSON or from TOML."""
    return json.dumps(args, sort_keys=True, default=repr)
