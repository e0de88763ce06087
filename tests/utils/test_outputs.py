"""One writer per output, what is there kept until the new is done, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from histograph_post.errors import OutputExistsError, OutputInUseError
from histograph_post.utils.outputs import OutputFolder, OutputLock, folder_in_use, output_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ours(name: str) -> bool:
    return name.startswith("own")


def test_the_second_writer_is_told_who_the_first_one_is(tmp_path: Path) -> None:
    with OutputLock(tmp_path / "out"):
        with pytest.raises(OutputInUseError) as refused, OutputLock(tmp_path / "out"):
            pass
        said = str(refused.value)
        assert said.startswith(f"{tmp_path / 'out'}: found another writer (")
        assert f"process {os.getpid()} on " in said
        assert "since 20" in said
        assert "\n" not in said
    with OutputLock(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


HOLDER = """
import os, sys
from pathlib import Path
from histograph_post.utils.outputs import OutputLock
OutputLock(Path(sys.argv[1])).__enter__()
print("held", flush=True)
sys.stdin.readline()
os._exit(9)  # without a word
"""


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path / "out")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(OutputInUseError, match=f"process {holder.pid} on "):
            OutputLock(tmp_path / "out").__enter__()
        holder.stdin.write("\n")
    assert names(tmp_path) == ["out.writing"]
    with OutputLock(tmp_path / "out"):
        pass
    assert names(tmp_path) == []


def test_some_share_an_output_and_nobody_else_writes_it_meanwhile(tmp_path: Path) -> None:
    with OutputLock(tmp_path / "out", shared=True) as one:
        with OutputLock(tmp_path / "out", shared=True), pytest.raises(OutputInUseError):
            OutputLock(tmp_path / "out").__enter__()
        assert names(tmp_path) == ["out.writing"]
        one.alone()
        with pytest.raises(OutputInUseError):
            OutputLock(tmp_path / "out", shared=True).__enter__()
    assert names(tmp_path) == []


@pytest.mark.parametrize("text", ["poetry", "[1]", '{"name": "mine"}'])
def test_a_file_of_the_locks_name_is_left_alone(tmp_path: Path, text: str) -> None:
    (tmp_path / "out.writing").write_text(text)
    with pytest.raises(OutputExistsError, match="found a file, expected none"):
        OutputLock(tmp_path / "out").__enter__()
    assert (tmp_path / "out.writing").read_text() == text


@pytest.mark.skipif(os.geteuid() == 0, reason="everything can be written by root")
def test_where_nothing_can_be_written_beside_it_an_output_is_written_all_the_same(
    tmp_path: Path,
) -> None:
    (tmp_path / "out").mkdir()
    tmp_path.chmod(0o555)
    try:
        with OutputLock(tmp_path / "out"):
            (tmp_path / "out" / "file").touch()
    finally:
        tmp_path.chmod(0o755)


def test_what_is_replaced_is_there_until_the_end_and_files_of_others_stay(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "own").write_text("old")
    (out / "notes.txt").write_text("mine")
    with OutputFolder(out, ours) as output:
        output.replace().mkdir()
        assert folder_in_use(out) == output.folder != out
        (output.folder / "own.new").write_text("new")
        assert names(out) == ["notes.txt", "own"]
        output.finish()
        assert names(out) == ["notes.txt", "own.new"]
    assert folder_in_use(out) == out
    assert (out / "notes.txt").read_text() == "mine"
    assert names(tmp_path) == ["out"]


def test_what_was_killed_as_it_took_another_ones_place_takes_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with OutputFolder(out, ours) as output:
        output.replace().mkdir()
        (output.folder / "own").write_text("new")
        # As if the process had been killed between the two moves.
        (output.folder / ".histograph-replaced").mkdir()
    with OutputFolder(out, ours):
        assert (out / "own").read_text() == "new"
    assert names(out) == ["own"]
    assert names(tmp_path) == ["out"]


def test_a_file_and_its_options_belong_together(tmp_path: Path) -> None:
    path, beside = tmp_path / "a.csv", tmp_path / "a.csv.config.toml"

    def give(text: str, *, overwrite: bool = False) -> None:
        with output_file(path, overwrite=overwrite, config={"value": text}) as write:
            write(text.encode())

    give("1")
    path.unlink()
    give("1")  # the options of a process that was killed before it wrote the file
    assert beside.read_text() == 'value = "1"\n'
    (tmp_path / "a.csv.writing").touch()  # of a process that was killed at its very end
    with pytest.raises(OutputExistsError, match=r"a\.csv: found a file"):
        give("2")
    assert names(tmp_path) == ["a.csv", "a.csv.config.toml"]
    path.unlink()
    with pytest.raises(OutputExistsError, match=r"a\.csv\.config\.toml: found a file"):
        give("2")
    give("2", overwrite=True)
    with output_file(path, overwrite=True) as write:
        write(b"3")
    assert names(tmp_path) == ["a.csv"]  # the options of another file are gone with it


def test_a_lock_says_no_more_than_the_name_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["/bin/histograph", "tune", "--storage", "postgresql://me:secret@host/db"]
    monkeypatch.setattr(sys, "argv", words)
    with OutputLock(tmp_path / "out"):
        said = json.loads((tmp_path / "out.writing").read_text())
    assert said["command"] == "histograph tune"
