"""Where a report goes, what it replaces, and what it says when something is gone."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

import histograph_post as hg
from histograph_post.errors import (
    CacheError,
    ConfigError,
    MissingExtraError,
    OutputExistsError,
)
from histograph_post.reporting import Report
from histograph_post.runs.run import Run
from histograph_post.runs.summary import repeat_commands

from ..helpers import histograph, make_model


def test_report_stands_in_the_run_and_replaces_itself_only(
    binary_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(binary_run, run)
    assert hg.report(run).path == run / "report.html"
    hg.report(run)  # an older report may go
    (run / "report.html").write_text("my notes")
    with pytest.raises(OutputExistsError, match="found a file"):
        hg.report(run)
    hg.report(run, overwrite=True)
    assert "histograph-post report" in (run / "report.html").read_text()


def test_moved_cache_is_said_to_be_missing_and_can_be_named(
    binary_run: Path, binary_report: Report, workshop: Path, tmp_path: Path
) -> None:
    run = tmp_path / "elsewhere" / "run"
    shutil.copytree(binary_run, run)
    written = hg.report(run)
    assert "--cache" in written.notes[0]
    assert {"roc", "ranking", "calibration"} <= set(written.figures)
    assert "layer-weights" not in written.figures
    assert "--cache" in written.path.read_text()
    named = hg.report(run, cache=workshop / "binary.cache")
    assert named.figures == binary_report.figures


def test_missing_predictions_are_said_to_be_missing(
    binary_run: Path, workshop: Path, tmp_path: Path
) -> None:
    shutil.copytree(binary_run, tmp_path / "run")
    (tmp_path / "run" / "predictions.csv").unlink()
    written = hg.report(tmp_path / "run", cache=workshop / "binary.cache")
    assert any("predictions.csv" in note for note in written.notes)
    assert "ranking" in written.figures


def test_cache_of_another_backbone_is_refused(
    binary_run: Path, make_run: Callable[[str], Path], workshop: Path, tmp_path: Path
) -> None:
    model = make_model(seed=1)
    data = hg.load_data("demo:", args={"num_graphs": 48})
    hg.cache(model, data, tmp_path / "other.cache", splits="kfold:3")
    with pytest.raises(CacheError, match="found weights"):
        hg.report(binary_run, tmp_path / "a.html", cache=tmp_path / "other.cache")
    make_run("regression")  # the same weights on other data
    with pytest.raises(CacheError, match="found data"):
        hg.report(binary_run, tmp_path / "a.html", cache=workshop / "regression.cache")


def test_command(binary_run: Path, tmp_path: Path) -> None:
    done = histograph(
        *("report", binary_run, "-o", tmp_path / "r.html", "--json", "-q"),
        *("--figures", tmp_path / "figures", "--format", "svg"),
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["report"] == str(tmp_path / "r.html")
    files = [tmp_path / "figures" / f"{name}.svg" for name in said["figures"]]
    assert sorted((tmp_path / "figures").iterdir()) == sorted(files)
    for path in files:
        assert ElementTree.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
        assert b"var(--" not in path.read_bytes()  # a file has no page to take colours from
    files[0].write_text("mine")
    with pytest.raises(OutputExistsError, match=r"found a file; choose another --figures"):
        hg.report(binary_run, tmp_path / "s.html", figures=tmp_path / "figures", form="svg")
    files[0].unlink()  # as if a kill had come before it, and before the page
    hg.report(binary_run, tmp_path / "s.html", figures=tmp_path / "figures", form="svg")
    assert sorted((tmp_path / "figures").iterdir()) == sorted(files)
    # Not even a report: it may be that of another run.
    with pytest.raises(OutputExistsError, match=r"r\.html: found a file; choose another -o"):
        hg.report(binary_run, tmp_path / "r.html")


def test_figures_as_pdf(binary_run: Path, tmp_path: Path) -> None:
    written = hg.report(binary_run, tmp_path / "r.html", figures=tmp_path / "figures", form="pdf")
    assert {path.suffix for path in written.files} == {".pdf"}
    assert all(path.read_bytes().startswith(b"%PDF-") for path in written.files)


def test_a_run_is_repeated_from_the_cache_on(tmp_path: Path) -> None:
    cache, head, tuned = (str(tmp_path / name) for name in ("c", "head", "tuned"))
    small = ("--model", "gin", "--model-args", "num_layers=2", "--data", "demo:")
    small += ("--data-args", "num_graphs=40")
    backbone = str(tmp_path / "gin")
    for arguments in (
        ("pretrain", *small, "--epochs", "1", "-o", backbone),
        ("cache", f"{backbone}/fold-0", "-o", cache),
        ("train-head", cache, "--epochs", "1", "--seeds", "0", "--dim", "8", "-o", head),
        ("finetune", head, "--epochs", "1", "-o", tuned),
        ("report", tuned),  # into the run, without -o
    ):
        done = histograph(*arguments, "-q")
        assert done.exit_code == 0, done.output
    assert (tmp_path / "tuned" / "report.html").is_file()
    said = repeat_commands(Run.open(tuned)).replace(" \\\n   ", "")
    commands = [line for line in said.splitlines() if line.startswith("histograph")]
    names = [shlex.split(line)[1:3] for line in commands]
    expected = [["cache", f"{backbone}/fold-0"], ["train-head", cache], ["finetune", head]]
    assert names == [*expected, ["finetune", "--config"]]
    Path(head).rename(tmp_path / "moved")
    said = repeat_commands(Run.open(tuned)).splitlines()
    assert said[0].startswith(f"histograph cache {backbone}/fold-0")
    assert f"# then the run {head}, which was not found" in said


def test_unfinished_run_is_refused_in_one_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        done = histograph("report", folder)
        assert done.exit_code == 1
        assert len(done.stderr.splitlines()) == 1
        assert "finished run" in done.stderr


def test_missing_extra_is_named(binary_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    monkeypatch.setenv("MPLBACKEND", "none")
    with pytest.raises(ConfigError, match="MPLBACKEND: found 'none', expected a backend"):
        hg.report(binary_run)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'histograph-post[report]'")):
        hg.report(binary_run)
