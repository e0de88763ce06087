"""Outputs of commands: one writer at a time, and the old output stays until the new is complete.

While an output ``x`` is written, there are beside it the lock ``x.writing``, which names the writer
and is released with its process, and ``x.partial``, a folder that will replace ``x``. Both are
removed at the end; what a killed command leaves, the next one resumes or removes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from ..errors import OutputExistsError, OutputInUseError
from .files import (
    HOST,
    PARTIAL_SUFFIX,
    config_text,
    remove_leftovers,
    require_folder,
    require_free,
    write_bytes,
    write_text,
)

try:
    import fcntl
except ImportError:  # not on Windows, where outputs are not locked
    fcntl = None  # type: ignore[assignment]

LOCK_SUFFIX = ".writing"

#: The old output, inside the new one that has just replaced it.
_REPLACED = ".histograph-replaced"

#: How often a shared lock is tried.
_ATTEMPTS = 20

#: Bytes of a lock file at most.
_LONGEST_HOLDER = 1000


class OutputLock:
    """A lock on an output, released when the process ends, however it ends.

    Without file system locks, or if nothing can be written beside the output, it has no effect.

    Args:
        shared: Whether other shared locks are allowed at the same time.
        wait: Whether to wait for the lock; otherwise an error names its holder.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = False) -> None:
        real = Path(os.path.realpath(path))
        self._output, self._path = path, real.with_name(real.name + LOCK_SUFFIX)
        self._shared, self._wait = shared, wait
        self._file: int | None = None

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while fcntl is not None and self._file is None:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                    break  # the folder itself may still take files
                raise
            try:
                self._take(file)
            except BaseException:
                os.close(file)
                raise
        return self

    def _take(self, file: int) -> None:
        """Lock an open lock file, unless it has been removed."""
        kind = fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX
        holder = _read_holder(file)
        if holder is None:
            raise OutputExistsError(f"{self._path}: found a file, expected none: it is the lock's")
        try:
            # A process that releases a shared lock holds it exclusively for a moment.
            for _ in range(_ATTEMPTS if self._shared else 0):
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    break
                time.sleep(0.01)
            fcntl.flock(file, kind if self._wait else kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputInUseError(
                f"{self._output}: found another writer ({holder or 'not known yet'}), expected "
                "none; wait until it is done, or choose another -o"
            ) from None
        except OSError:
            pass  # no locks on this file system
        if not _is_at(file, self._path):  # removed by its last holder
            os.close(file)
            return
        self._file = file
        with contextlib.suppress(OSError):  # a full disk is for the output itself to report
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(_this_process()).encode(), 0)

    def alone(self) -> None:
        """Wait until no other process shares it."""
        if self._shared and self._file is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._file, fcntl.LOCK_EX)
        self._shared = False

    def __exit__(self, *error: object) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # others share it; the last of them removes the file
            if self._shared:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(self._file, self._path):
                self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None


def _is_at(file: int, path: Path) -> bool:
    """Whether an open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _this_process() -> dict[str, Any]:
    words = [os.path.basename(sys.argv[0] or "python"), *sys.argv[1:2]]
    if words[0] == "__main__.py":
        words[0] = "histograph"
    return {
        "command": " ".join(word for word in words if not word.startswith("-")),
        "process": os.getpid(),
        "host": HOST,
        "since": datetime.now().strftime("%Y-%m-%d %H:%M:%S"),
    }


def _read_holder(file: int) -> str | None:
    """Return who holds a lock, "" if that is not known yet, None if the file is not a lock."""
    text = os.pread(file, _LONGEST_HOLDER, 0)
    try:
        found = json.loads(text or b"{}")
        if not isinstance(found, dict):
            return None
        if not found:
            return ""
        return "{command}, process {process} on {host}, since {since}".format(**found)
    except (ValueError, RecursionError):
        # Of a process that was killed while it wrote this.
        return "" if text.startswith(b'{"command"') else None
    except KeyError:
        return None


@contextmanager
def output_file(
    path: Path,
    *,
    overwrite: bool,
    config: Mapping[str, Any] | None = None,
    clean: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[bytes | Iterable[bytes]], None]]:
    """Lock a file and yield the function that writes it, whole or in parts.

    The file and the options beside it always match, whenever the process is killed.

    Args:
        config: The options that the file comes from.
        clean: Removes what is kept beside the file until it is written.
    """
    beside = path.with_name(f"{path.name}.config.toml")
    text = None if config is None else config_text(config)

    def refuse() -> None:
        require_free(path, overwrite=overwrite)
        if text is not None and not os.path.exists(path) and _holds(beside, text):
            return  # left by a process that was killed before it wrote the file
        if text is not None:
            require_free(beside, overwrite=overwrite)

    def write(data: bytes | Iterable[bytes]) -> None:
        if os.path.exists(path):
            beside.unlink(missing_ok=True)
        elif text is not None:
            write_text(beside, text)
        write_bytes(path, data)
        if text is not None and not os.path.exists(beside):
            write_text(beside, text)

    require_free(path, overwrite=True)  # before the lock is written there
    with OutputLock(path):
        if os.path.exists(path) and not overwrite:
            clean()  # left by a process that was killed just after it wrote the file
        refuse()
        remove_leftovers(path.parent, alone=True, of=(path.name, beside.name))
        yield write
        clean()


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()


#: The outputs that this process is writing, by their real paths.
_open: dict[str, OutputFolder] = {}


class OutputFolder:
    """A folder that a command writes; a context manager.

    Args:
        ours: Whether a command writes files of this name; other files survive a replacement.
        shared: Whether other processes may write their part of it at the same time.
    """

    def __init__(
        self, target: str | Path, ours: Callable[[str], bool], *, shared: bool = False
    ) -> None:
        self.target = Path(target)
        #: Where to write now.
        self.folder = self.target
        self._real = Path(os.path.realpath(target))
        self._beside = self._real.with_name(self._real.name + PARTIAL_SUFFIX)
        self._lock = OutputLock(self.target, shared=shared)
        self._ours, self._shared = ours, shared

    def __enter__(self) -> Self:
        require_folder(self.target)
        self._lock.__enter__()
        try:
            self._complete()
        except BaseException:
            self._lock.__exit__()
            raise
        _open[str(self._real)] = self
        return self

    def __exit__(self, *error: object) -> None:
        _open.pop(str(self._real), None)
        self._lock.__exit__()

    def clean(self) -> None:
        """Remove what killed processes left; only for a folder that is known to be ours."""
        if not self.folder.is_dir():
            return
        remove_leftovers(self.folder, alone=not self._shared)
        locks = [] if self._shared else list(self.folder.rglob(f"*{LOCK_SUFFIX}"))
        for path in locks:  # of parts that no process is writing
            if self._ours(path.relative_to(self.folder).parts[0].removesuffix(LOCK_SUFFIX)):
                path.unlink(missing_ok=True)

    def replace(self) -> Path:
        """Write beside the old folder, which stays until :meth:`finish`; return where.

        Files that a killed process has written there are still there.
        """
        require_folder(self._beside)
        self.folder = self._beside
        return self.folder

    def alone(self) -> None:
        """Wait until no other process writes a part of it."""
        self._lock.alone()
        self._shared = False
        self.clean()

    def finish(self) -> None:
        """Replace the old folder by the new one."""
        if self.folder == self.target or not self._beside.is_dir():
            return  # or another job that shares it has done so
        with contextlib.suppress(FileNotFoundError):
            for path in list(self._real.iterdir()):
                if not self._ours(path.name) and not os.path.lexists(self._beside / path.name):
                    os.rename(path, self._beside / path.name)
            os.rename(self._real, self._beside / _REPLACED)
        os.rename(self._beside, self._real)
        self.folder = self.target
        self._complete()

    def _complete(self) -> None:
        """Complete a replacement, also one that a killed process has begun."""
        with contextlib.suppress(FileNotFoundError):  # others that share it may do the same
            if (self._beside / _REPLACED).is_dir() and not os.path.lexists(self._real):
                os.rename(self._beside, self._real)
        shutil.rmtree(self._real / _REPLACED, ignore_errors=True)


def folder_in_use(target: Path) -> Path:
    """Return where this process is writing an output; the output itself if it is not."""
    found = _open.get(os.path.realpath(target))
    return target if found is None else found.folder
