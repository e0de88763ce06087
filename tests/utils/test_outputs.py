"""Where a command may write is found out before it computes anything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from histograph_post.errors import ConfigError, OutputExistsError
from histograph_post.utils.files import require_folder, require_free

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
    with pytest.raises(OutputExistsError, match="file: found a file; choose another -o"):
        require_free(tmp_path / "file", overwrite=False)
    with pytest.raises(OutputExistsError, match="file: found a file, expected a folder"):
        require_folder(tmp_path / "file")
    require_free(tmp_path / "file", overwrite=True)
    require_folder(tmp_path / "folder")
