"""Memory that is kept comes back without page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Faults of a block that was there before, in pages, after keeping memory and after not doing so.
FAULTS = """
import resource
import numpy as np
from histograph_post.utils.memory import give_memory_back, keep_memory

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
