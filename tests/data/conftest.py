"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def processed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processed")


@pytest.fixture
def processed_once(processed_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmark sets are processed into a folder of the session: once, whoever reads them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(processed_folder))


def listing(root: Path) -> list[tuple[str, int, int]]:
    """What is below a folder, and how large and how old it is."""
    found = ((path, path.lstat()) for path in [root, *root.rglob("*")])
    return sorted((str(path), stat.st_size, stat.st_mtime_ns) for path, stat in found)
