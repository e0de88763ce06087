"""The memory a process may take, and memory that is freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from histograph_post.utils.machine import machine_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
UNLIMITED = "9223372036854771712"  # of version 1


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        # Version 2: a job, and a limit above it.
        ("0::/slurm/job_7\n", {"slurm/job_7/memory.max": "500000"}, 500_000),
        (
            "0::/slurm/job_7\n",
            {"slurm/job_7/memory.max": "max", "slurm/memory.max": "700000"},
            700_000,
        ),
        # A container: its own group is the root.
        ("0::/\n", {"memory.max": "600000"}, 600_000),
        # Version 1, also in a container that does not see the group it is named after.
        (
            "5:cpu,memory:/docker/abc\n3:cpuset:/\n",
            {"memory/docker/abc/memory.limit_in_bytes": "400000"},
            400_000,
        ),
        ("5:memory:/docker/abc\n", {"memory/memory.limit_in_bytes": "400000"}, 400_000),
        # Both versions at once.
        (
            "1:memory:/a\n0::/b\n",
            {"memory/a/memory.limit_in_bytes": UNLIMITED, "unified/b/memory.max": "300000"},
            300_000,
        ),
        # No limit, a limit of another resource, more than there is.
        ("0::/a\n", {"a/memory.max": "max"}, MACHINE),
        ("5:pids:/a\n", {"memory/a/memory.limit_in_bytes": "1000"}, MACHINE),
        ("5:memory:/a\n", {"memory/a/memory.limit_in_bytes": UNLIMITED}, MACHINE),
    ],
)
def test_limits_of_control_groups(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    for name, limit in limits.items():
        path = tmp_path / "mounts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    assert machine_memory(tmp_path / "cgroup", tmp_path / "mounts") == expected


def test_without_control_groups_it_is_the_machines(tmp_path: Path) -> None:
    assert machine_memory(tmp_path / "none", tmp_path / "none") == MACHINE
    assert 0 < machine_memory() <= MACHINE


#: Faults of a block that was there before, in pages, after keeping memory and after not doing so.
FAULTS = """
import resource
import numpy as np
from histograph_post.utils.machine import give_memory_back, keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(16 << 20, np.float32)  # 64 MB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for prepare in (keep_memory, give_memory_back):
    prepare()
    faults()
    print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's memory")
def test_a_block_that_was_freed_comes_back_without_page_faults() -> None:
    command = [sys.executable, "-c", FAULTS]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, given_back = map(int, result.stdout.split())
    assert kept < 20 < given_back  # huge pages have 32, small ones thousands
