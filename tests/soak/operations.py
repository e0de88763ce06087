"""What a process does to the files below a folder: watched, copied at every moment, made to fail.

Opening for writing, each write, truncating, syncing, moving, removing and making folders are
operations. Libraries are seen as far as they go through Python's own calls, as all writers here do.
"""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from histograph_cli.app import app

#: What goes wrong: an error, or 0 for a write that takes only a part.
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "EACCES": errno.EACCES, "short": 0}

_PATHS = ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "truncate", "chmod")
_FILES = ("fsync", "ftruncate", "write", "pwrite")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Counts operations below a folder; what is made of it looks at them or lets them fail."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        self.calls: list[str] = []

    def before(self, call: str, place: Any) -> None:
        """Do something before an operation; whatever it raises, the operation does."""

    def after(self) -> None:
        """Do something after an operation, and in the middle of a write."""

    def part(self, size: int) -> int:
        """Return how many bytes of a write are taken."""
        return size

    def _is_below(self, place: Any) -> bool:
        with suppress(TypeError, ValueError, OSError):
            if isinstance(place, int):
                place = os.readlink(f"/proc/self/fd/{place}")
            return Path(os.path.abspath(os.fsdecode(place))).is_relative_to(self.folder)
        return False

    def _begin(self, call: str, place: Any) -> None:
        self.calls.append(call)
        self.before(call, place)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the operations of this process."""
        watch, real_open = self, io.open

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                if not watch._is_below(self.name):  # moved meanwhile
                    return super().write(data)
                watch._begin("write", self.name)
                view = memoryview(data).cast("B")[: watch.part(len(data))]
                half = super().write(view[: len(view) // 2]) if len(view) > 1 else 0
                watch.after()
                done = half + super().write(view[half:])
                watch.after()
                return done

            def truncate(self, size: int | None = None) -> int:
                watch._begin("write", self.name)
                return super().truncate(size)

        def open_file(file: Any, mode: str = "r", buffering: int = -1, *rest: Any, **more: Any):
            unseen = isinstance(file, int) or more.get("opener") or not set(mode) & set("wax+")
            if unseen or not watch._is_below(file):
                return real_open(file, mode, buffering, *rest, **more)
            watch._begin("open", file)
            raw = File(file, mode.replace("b", "").replace("t", ""))
            watch.after()
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *rest, **more)

        def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(place: Any, *rest: Any, **more: Any) -> Any:
                opened = place if more.get("dir_fd") is None else more["dir_fd"]
                both = (opened, *rest[:1]) if name in ("replace", "rename") else (opened,)
                reads = name == "open" and not rest[0] & _WRITING
                if reads or not any(map(watch._is_below, both)):
                    return call(place, *rest, **more)
                watch._begin(name, place)
                result = call(place, *rest, **more)
                watch.after()
                return result

            return wrapped

        saved = {name: getattr(os, name) for name in ("open", *_PATHS, *_FILES)}
        io.open = builtins.open = open_file
        for name, call in saved.items():
            setattr(os, name, watched(name, call))
        try:
            yield
        finally:
            io.open = builtins.open = real_open
            for name, call in saved.items():
                setattr(os, name, call)


class Faults(Watch):
    """Lets one operation fail, once.

    Args:
        folder: Where operations are counted, from 1.
        at: The one that fails; none for 0.
        error: Its number, or 0 for a write that takes only half of its bytes.
    """

    def __init__(self, folder: Path, at: int = 0, error: int = 0) -> None:
        super().__init__(folder)
        self._at, self._error = at, error

    def before(self, call: str, place: Any) -> None:
        """Raise the error when it is time; a write does not say where."""
        if len(self.calls) == self._at and self._error:
            named = () if isinstance(place, int) or call == "write" else (os.fspath(place),)
            raise OSError(self._error, os.strerror(self._error), *named)

    def part(self, size: int) -> int:
        """Return half of the size when it is time."""
        return max(1, size // 2) if len(self.calls) == self._at and size else size


class Snapshots(Watch):
    """Copies the folder before and after every operation, which is what a kill would leave there.

    Only states that differ are kept: a kill before and after a sync leaves the same.

    Args:
        folder: What is copied.
        copies: Where to.
    """

    def __init__(self, folder: Path, copies: Path) -> None:
        super().__init__(folder)
        self._copies, self._known = copies, set[str]()
        self.moments = 0

    def before(self, call: str, place: Any) -> None:
        """Copy what is there."""
        self.after()

    def after(self) -> None:
        """Copy what is there, unless that is known."""
        self.moments += 1
        digest = hashlib.sha256()
        for path in sorted(self.folder.rglob("*")):
            digest.update(f"{path}\0{path.is_dir()}\0".encode())
            if path.is_file():
                with _real_open(path, "rb") as file:
                    digest.update(hashlib.sha256(file.read()).digest())
        state = digest.hexdigest()
        if state not in self._known:
            self._known.add(state)
            _copy(self.folder, self._copies / f"{len(self._known):05d}")


_real_open, _mkdir = io.open, os.mkdir


def _copy(source: Path, target: Path) -> None:
    """Copy a folder by calls that are not watched."""
    _mkdir(target)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            _mkdir(place)
        else:
            with _real_open(path, "rb") as file, _real_open(place, "wb") as copied:
                shutil.copyfileobj(file, copied)


# --- processes


def in_child(function: Callable[[], Any], said: Path | None = None) -> int:
    """Call a function in a process of its own; return its process number.

    A copy of this process, which has loaded PyTorch and computed nothing. It ends with 0, with 1 if
    the function raises, or as the function ends it; what it prints goes to a file.
    """
    number = os.fork()
    if number:
        return number
    code = 1
    try:
        out = os.open(os.devnull if said is None else said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        function()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(number: int) -> int:
    """Return how a child has ended: its exit code, or minus the number of a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def call_in_child(function: Callable[[], Any], said: Path | None = None) -> int:
    """Call a function in a process of its own; return how that has ended."""
    return wait_for(in_child(function, said))


#: Seconds and bytes that a refusal may take; the commands themselves are done in a second.
_SECONDS, _MEMORY = 240, 2**31


def attempt(words: Sequence[object], work: Path, *, endless: bool = False) -> str | None:
    """Give a command in a process of its own; say what is wrong with how it ended."""
    said = work / "said"
    before = time.monotonic()
    child = in_child(lambda: app([str(word) for word in words], "histograph"), said)
    status = usage = None
    while status is None:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            break
        status = None
        if time.monotonic() - before > (_SECONDS / 4 if endless else _SECONDS):
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return None if endless else f"still running after {_SECONDS} s"
        time.sleep(0.01)
    assert usage is not None
    code, text = os.waitstatus_to_exitcode(status), said.read_bytes().decode(errors="replace")
    if usage.ru_maxrss * 1024 > _MEMORY:
        return f"took {usage.ru_maxrss / 2**20:.1f} GB"
    if code == 0:
        return None
    last = (text.strip().splitlines() or [""])[-1]
    if code not in (1, 2) or "Traceback" in text:
        return f"exit code {code}: {text.strip()[-700:]}"
    if code == 1 and not last.startswith("error: "):
        return f"no line that says why: {text.strip()[-300:]}"
    odd = {sign for sign in text if not sign.isprintable()} - {"\n"}
    return f"steers the terminal: {text[-700:]!r}" if odd else None
