"""Careful file operations, and where a command may write."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from histograph_post.errors import ConfigError, NotFoundError, OutputExistsError
from histograph_post.utils.files import (
    atomic_path,
    remove_leftovers,
    require_folder,
    require_free,
    sha256_file,
    to_json,
    write_json,
    write_text,
)


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail() -> None:
        with atomic_path(path) as partial:
            partial.write_text("new")
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the mask is told by Linux")
def test_the_mask_is_the_one_of_the_moment_and_is_not_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touch(mask: int) -> int:
        raise AssertionError("another thread's files would have any mask meanwhile")

    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", touch)
            write_text(tmp_path / "a.txt", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "a.txt").stat().st_mode & 0o777 == 0o640


def test_json_is_stable_and_refuses_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, 2.5], "ä": None})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == to_json({"b": [1, 2.5], "ä": None})
    with pytest.raises(ValueError, match="Out of range"):
        to_json({"x": float("nan")})


def test_checksum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc").hexdigest()
    with pytest.raises(NotFoundError, match="no such file"):
        sha256_file(tmp_path / "b")


def test_leftovers_of_dead_processes_go_and_those_of_live_ones_stay(tmp_path: Path) -> None:
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    with atomic_path(tmp_path / "a.h5") as partial:
        partial.write_text("being written")
        left = partial.with_name(
            partial.name.replace(str(os.getpid()), dead.stdout.decode().strip())
        )
        left.write_text("half")
        elsewhere = tmp_path / "a.h5.otherhost-1.partial"
        elsewhere.write_text("half")
        remove_leftovers(tmp_path)
        assert partial.exists()
        assert elsewhere.exists()
        assert not left.exists()


FILE, FOLDER = partial(require_free, overwrite=False), require_folder


@pytest.mark.parametrize("check", [FILE, FOLDER])
def test_folders_on_the_way_need_not_be_there_and_are_not_made(
    check: Callable[[Path], None], tmp_path: Path
) -> None:
    check(tmp_path / "new" / "folder" / "output")
    check(tmp_path / "output")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("check", [FILE, FOLDER])
def test_a_file_on_the_way_is_named(check: Callable[[Path], None], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(ConfigError, match=r"taken: Not a directory.*expected a folder that can be"):
        check(tmp_path / "taken" / "folder" / "output")
    assert (tmp_path / "taken").read_text() == "mine"


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputExistsError, match="folder: found a folder, expected a file"):
        require_free(tmp_path / "folder", overwrite=True)
    os.mkfifo(tmp_path / "pipe")  # as a device: overwriting is for files
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("pipe", "link"):
        with pytest.raises(OutputExistsError, match=f"{name}: found a device, pipe or broken link"):
            require_free(tmp_path / name, overwrite=True)
    with pytest.raises(OutputExistsError, match="file: found a file; choose another -o"):
        require_free(tmp_path / "file", overwrite=False)
    with pytest.raises(OutputExistsError, match="file: found a file, expected a folder"):
        require_folder(tmp_path / "file")
    require_free(tmp_path / "file", overwrite=True)
    require_folder(tmp_path / "folder")
