"""Processes that die at a chosen moment: before, in the middle of or after a chosen file operation.

Operations on files below one folder are counted: opening for writing, each write, truncating,
syncing, moving, removing and making folders. What the HDF5 library does by itself is not seen.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How a process ends that dies as it was told.
DIED = 77

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class CrashPoints:
    """Counts the file operations below a folder, and ends the process at one of them.

    Args:
        folder: Where they are counted.
        moment: Which of them; each is two moments, before and after it (for a write of more than a
            byte, after half of it). None to count only.
    """

    def __init__(self, folder: Path, moment: int | None) -> None:
        self._folder, self._moment = os.path.realpath(folder), moment
        self.count = 0
        self._paths: dict[int, bool] = {}

    def pass_one(self) -> None:
        """Count a moment; it may be the last."""
        if self.count == self._moment:
            os._exit(DIED)
        self.count += 1

    def _is_ours(self, path: Any) -> bool:
        if isinstance(path, int):
            return self._paths.get(path, False)
        try:
            found = os.path.realpath(os.fsdecode(path))
        except TypeError:
            return False
        return found.startswith(self._folder + os.sep)

    def install(self) -> None:
        """Watch the operations of this process from here on."""
        for name in ("replace", "rename", "unlink", "remove", "rmdir", "mkdir", "fsync"):
            setattr(os, name, self._watched(getattr(os, name)))
        for name in ("write", "pwrite", "ftruncate"):
            setattr(os, name, self._watched(getattr(os, name)))
        os.open, os.close = self._opening(os.open), self._closing(os.close)  # type: ignore[assignment]
        self._open = io.open
        io.open = builtins.open = self._open_file  # type: ignore[assignment]

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            # Relative to an open folder, as shutil removes trees.
            if not any(map(self._is_ours, [*arguments[:2], named.get("dir_fd")])):
                return function(*arguments, **named)
            self.pass_one()
            result = function(*arguments, **named)
            self.pass_one()
            return result

        return call

    def _opening(self, function: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
            ours = self._is_ours(path) or self._is_ours(named.get("dir_fd"))
            if ours and flags & _WRITING:
                self.pass_one()
            file = function(path, flags, *arguments, **named)
            self._paths[file] = ours
            if ours and flags & _WRITING:
                self.pass_one()
            return file

        return call

    def _closing(self, function: Callable[[int], None]) -> Callable[[int], None]:
        def call(file: int) -> None:
            self._paths.pop(file, None)
            function(file)

        return call

    def _open_file(self, file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        unseen = isinstance(file, int) or named.get("opener") is not None
        if unseen or not self._is_ours(file) or not set(mode) & set("wax+"):
            return self._open(file, mode, *arguments, **named)
        self.pass_one()
        raw = _File(file, mode.replace("b", "").replace("t", ""), self)
        self.pass_one()
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, named.get("encoding", "utf-8"), newline="\n")


class _File(io.FileIO):
    """A file whose writes are counted, and can be cut in half."""

    def __init__(self, path: Any, mode: str, points: CrashPoints) -> None:
        super().__init__(path, mode)
        self._points = points

    def write(self, data: Any) -> int:
        """Write, unless the process is to die before, in the middle or after."""
        self._points.pass_one()
        view = memoryview(data).cast("B")
        half = len(view) // 2
        if half:
            super().write(view[:half])
            self._points.pass_one()
        super().write(view[half:])
        self._points.pass_one()
        return len(view)


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
