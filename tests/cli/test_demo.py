"""The demo, and the commands it prints, as a newcomer meets them."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from histograph_post.utils.outputs import OutputLock

from ..helpers import histograph


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """A small demo from an empty folder, and the one object it prints."""
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = histograph("demo", "--num-graphs", "40", "--json")
    assert result.exit_code == 0, result.output
    return folder, json.loads(result.stdout)


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def test_the_demo_goes_the_whole_way(done: tuple[Path, dict]) -> None:
    folder, found = done
    names = [shlex.split(step["command"])[1] for step in found["steps"]]
    assert names == ["pretrain", "pretrain", "cache", "train-head", "compare", "finetune", "report"]
    assert (folder / "demo" / "compare" / "report.html").stat().st_size > 100_000
    compared = found["steps"][4]["result"]["readouts"]
    assert set(compared) == {"own readout", "mean", "concat", "histograph"}
    assert compared == results(folder / "demo" / "compare")["readouts"]


def test_the_commands_it_prints_are_the_ones_it_ran(
    done: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, found = done
    monkeypatch.chdir(folder)
    for step in found["steps"][:-1]:  # drawing the report again would only take time
        # A command goes on with what is there only if it asks for the very same thing.
        again = histograph(*shlex.split(step["command"])[1:], "--json")
        assert again.exit_code == 0, again.output
        typed = json.loads(again.stdout)
        assert {**typed, "seconds_per_epoch": 0} == {**step["result"], "seconds_per_epoch": 0}


def test_an_older_demo_stays_and_a_stopped_one_goes_on_without_matplotlib(
    done: tuple[Path, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = done
    monkeypatch.chdir(folder)
    refused = histograph("demo", "--num-graphs", "40")
    assert refused.exit_code == 1
    assert "--overwrite" in refused.stderr
    page = folder / "demo" / "compare" / "report.html"
    page.unlink()  # the last step; the others are done
    result = histograph("demo", "--num-graphs", "40")
    assert result.exit_code == 0, result.output
    assert page.is_file()
    (folder / "demo" / "finetuned" / "results.json").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = histograph("demo", "--num-graphs", "40")
    assert result.exit_code == 0, result.output
    assert "pip install 'histograph-post[report]', then histograph report" in result.stderr
    assert "HistoGraph, backbone trained too" in result.stdout
    assert "histograph inspect model.ckpt --model my_model.py:Net" in result.stderr


def test_a_step_that_fails_ends_the_demo(tmp_path: Path) -> None:
    (tmp_path / "shallow").mkdir()
    (tmp_path / "shallow" / "thesis.txt").write_text("mine")
    result = histograph("demo", "-o", str(tmp_path), "--overwrite")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["shallow"]


def test_a_second_demo_in_the_same_folder_is_told_who_is_there(tmp_path: Path) -> None:
    with OutputLock(tmp_path / "demo"):
        result = histograph("demo", "-o", tmp_path / "demo")
    assert result.exit_code == 1
    assert "demo: found another writer (" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "demo").exists()
