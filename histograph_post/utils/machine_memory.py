"""The memory there is for this process: the machine's, or less in a container or a job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

#: The control groups this process is in, and where their files are (Linux).
GROUPS = Path("/proc/self/cgroup")
MOUNTS = Path("/sys/fs/cgroup")


def machine_memory(groups: Path = GROUPS, mounts: Path = MOUNTS) -> int:
    """Return the bytes of memory that this process may take at most.

    Args:
        groups: Names the control groups of the process; there need not be any.
        mounts: Where their limits are.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(groups, mounts)])


def _limits(groups: Path, mounts: Path) -> Iterator[int]:
    """Yield the limits of all control groups that the process is in, and of those above them."""
    for path in _limit_files(groups, mounts):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:  # a container does not see the groups above its own
            continue
        if text.isdecimal():  # "max" is no limit
            yield int(text)


def _limit_files(groups: Path, mounts: Path) -> Iterator[Path]:
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        group = PurePosixPath(name).relative_to("/")
        for place in (group, *group.parents):
            if not controllers:  # version 2, alone or beside version 1
                yield mounts / place / "memory.max"
                yield mounts / "unified" / place / "memory.max"
            elif "memory" in controllers.split(","):
                yield mounts / "memory" / place / "memory.limit_in_bytes"
