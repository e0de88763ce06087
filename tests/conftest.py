"""Fixtures shared by the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# The suite runs in a process per core, and starts more: threads on top would only be in the way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data sets and checkpoints beside the project; the test skips where there are none."""
    if not SHARED_DATA.is_dir():
        pytest.skip("real data (../shared/data) is not on this machine")
    return SHARED_DATA
