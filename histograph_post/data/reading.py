"""How data are read, whatever they are: where graphs are kept, and by how many processes.

None of this decides what the graphs are, so no file records it. Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError

#: Data of this many rows stay on disk; smaller data are read into memory at once.
STREAM_ROWS = 50_000

#: The data argument that decides it whatever the number of rows.
STREAM_ARGS = ("stream",)


@dataclass(frozen=True)
class Reading:
    """How rows become graphs."""

    #: Where graphs that do not stay in memory are kept, for this command and for others like it;
    #: None for a folder that goes with the process.
    folder: Path | None = None
    #: Processes that read rows; 0 for this one alone, None for as many as there are cores.
    workers: int | None = None
    #: ``(i, n)``: job ``i`` of ``n`` that read the same rows into the same folder.
    part: tuple[int, int] = (0, 1)
    #: Called with the rows that are read and the rows in all.
    on_progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 0:
            raise ConfigError(f"workers: found {self.workers}, expected 0 or more")

    def processes(self, blocks: int) -> int:
        """Return how many processes read this many blocks; 0 where this one does."""
        if blocks < 2:
            return 0
        return min(blocks, usable_cores() if self.workers is None else self.workers)


#: The files of rows, finished or not, and of what is predicted of them.
ROW_FILES = re.compile(r"rows-[0-9a-f]+\.(safetensors|outputs)(\..*\.partial)?")


def rows_beside(out: str | Path) -> Path:
    """Return where the rows of a command are kept: beside its output, wherever a link leads."""
    return Path(os.path.realpath(out) + ".rows")


def remove_rows(folder: Path) -> None:
    """Remove the rows in a folder, and the folder if nothing else is in it."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if ROW_FILES.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1


def is_streamed(rows: int, args: Mapping[str, Any], *, spec: str) -> bool:
    """Whether so many rows stay on disk: as asked for with ``stream=``, else by their number."""
    asked = args.get("stream")
    if asked is None:
        return rows >= STREAM_ROWS
    answer = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if str(asked).lower() not in answer:
        raise DataError(f"{spec}: stream={asked}, expected true or false")
    return answer[str(asked).lower()]
