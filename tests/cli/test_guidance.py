"""What helps a newcomer: where output goes, examples, completed values, tables that fold."""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from histograph_cli import options
from histograph_cli.app import app
from histograph_cli.guidance import COMMANDS, DEFAULT_OUTPUTS, default_output
from histograph_cli.terminal import Terminal
from histograph_post import metrics
from histograph_post.utils.text import folded_command

from ..helpers import histograph


@pytest.mark.parametrize(
    ("command", "given", "place"),
    [
        ("train-head", {"cache": "a/mutag.cache", "head": "gmt"}, "runs/mutag-gmt"),
        ("train-head", {"cache": "c", "head": "my_head.py:MyHead"}, "runs/c-myhead"),
        ("compare", {"cache": Path("caches/fold-0.cache")}, "runs/caches-fold-0-readouts"),
        ("tune", {"cache": "c.cache", "head": "histograph"}, "runs/c-histograph-tuned"),
        ("finetune", {"source": "runs/mutag"}, "runs/mutag-finetuned"),
        ("cache", {"data": "tu:MUTAG", "model": "net.py:Net"}, "mutag-net.cache"),
        ("cache", {"folder": "backbones"}, "backbones.caches"),
        ("pretrain", {"data": "demo:", "model": "gin"}, "backbones/demo-gin"),
        ("predict", {"run": "runs/mutag"}, "mutag-predictions.csv"),
        ("embed", {"run": "runs/mutag"}, "mutag-vectors.npz"),
        ("export", {"run": "runs/mutag", "whole": False}, "mutag.pt2"),
        ("export", {"run": "runs/mutag", "whole": True}, "mutag-whole"),
    ],
)
def test_output_has_a_place(command: str, given: dict[str, object], place: str) -> None:
    assert default_output(command, given) == Path(place)
    assert command in DEFAULT_OUTPUTS


def test_a_run_goes_to_its_place_and_says_so(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--head", "linear", "--seeds", 0)
    done = histograph("train-head", demo_cache, *words)
    assert done.exit_code == 0, done.output
    assert "note: writing to runs/demo-linear" in done.stderr
    assert json.loads((tmp_path / "runs/demo-linear/results.json").read_text())["head"] == "linear"


def test_every_command_has_an_example_and_a_place() -> None:
    for command in app.registered_commands:
        assert command.name is not None
        panel, example = COMMANDS[command.name]
        assert panel
        assert example.split()[0] == command.name
    shown = histograph("train-head", "--help").output
    assert "Example: histograph train-head" in shown
    assert "--splits" not in shown


def test_metrics_are_those_of_the_tasks() -> None:
    known = {*metrics.LINK_METRICS, *(name for names in metrics.METRICS.values() for name in names)}
    assert set(options.METRICS) == known


def test_values_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert options.complete_heads("jk-") == ["jk-cat", "jk-max", "jk-lstm"]
    assert options.complete_several_heads("mean,con") == ["mean,concat"]
    assert "all" in options.complete_several_heads("")
    assert options.complete_metrics("ro") == ["roc_auc"]
    assert options.complete_models("gi") == ["gin"]
    (tmp_path / "tu" / "LOCAL" / "raw").mkdir(parents=True)
    monkeypatch.setenv("HISTOGRAPH_DATA_ROOT", str(tmp_path))
    assert options.complete_data("tu:L") == ["tu:LOCAL"]
    info = tmp_path / "readouts-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: readouts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[histograph_post.heads]\nof-others = nowhere:First\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert options.complete_heads("of-") == ["of-others"]
    assert options.complete_several_heads("mean,of-") == ["mean,of-others"]


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["cache", "--data", "tu", ":", "PRO"], ["PROTEINS"]),
        (["cache", "--data", "planetoid", ":"], ["Cora", "CiteSeer", "PubMed"]),
        (["inspect", "x.pt", "--model", "pretrain-gnns", ":", "g"], ["gcn", "gin", "gat"]),
        (["finetune", "run", "--head", "jk-m"], ["jk-max"]),
    ],
)
def test_bash_breaks_words_at_colons(typed: list[str], offered: list[str]) -> None:
    words = ["histograph", *typed]
    asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    found = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from histograph_cli.main import main; sys.argv = ['histograph']; main()",
        ],
        env={**os.environ, **asked, "_HISTOGRAPH_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == offered


def printed(width: int, columns: list[str], rows: list[list[object]]) -> list[str]:
    terminal = Terminal(options={})
    terminal._out = Console(file=io.StringIO(), width=width, force_terminal=False)
    terminal.table("title", columns, rows)
    file = terminal._out.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


def test_a_table_breaks_lines_between_words_only() -> None:
    row = ["histograph", "0.8412 ± 0.0123", "0.8412 ± 0.0123", "+0.0312 [+0.0100, +0.0524]"]
    lines = printed(60, ["readout", "test", "single seeds", "against own"], [row] * 2)
    assert max(map(len, lines)) <= 60
    words = " ".join(lines)
    for word in " ".join(row).split():
        assert word in words


def test_a_table_that_is_too_wide_is_turned_on_its_side() -> None:
    columns = [f"an_option_{number}" for number in range(12)]
    rows: list[list[object]] = [[f"{2.85e-06 * number:.2e}" for number in range(12)]] * 3
    lines = printed(80, columns, rows)
    assert max(map(len, lines)) <= 80
    for cell in (*columns, *map(str, rows[0])):
        assert any(cell in line for line in lines)


def test_a_table_that_is_too_wide_either_way_becomes_a_list() -> None:
    columns = ["--model", "file", "from", "licence"]
    rows: list[list[object]] = [
        [f"family:{'x' * 12}{number}", "y" * 26, f"example.org/{'z' * 30}, folder", "MIT"]
        for number in range(9)
    ]
    lines = printed(80, columns, rows)
    assert max(map(len, lines)) <= 80
    for cell in (word for row in rows for text in row for word in str(text).split()):
        assert any(cell in line for line in lines)


def test_lists_of_seeds_may_stand_in_a_file(demo_cache: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("seeds = [0, 1]\nhead = 'linear'\n")
    done = histograph("train-head", demo_cache, "--config", config, "-o", tmp_path / "r", "--json")
    assert done.exit_code == 0, done.output
    assert {fit["seed"] for fit in json.loads(done.stdout)["fits"]} == {0, 1}


def test_mistakes_are_answered_in_a_line(demo_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "MUTAG" / "raw").mkdir(parents=True)
    data = ("--model", "gin", "-o", tmp_path / "backbones", "--data-root", tmp_path)
    for words, expected in (
        (("predict", demo_cache, "--data", "demo:"), "found a cache, expected a run"),
        (("pretrain", "--data", "tu:mutag", *data), "expected tu:MUTAG"),
        (("pretrain", "--data", "ogb:molhiv", *data), "expected ogbg:molhiv"),
    ):
        done = histograph(*words)
        assert done.exit_code == 1, done.output
        assert len(done.stderr.splitlines()) <= 2  # where the output would have gone
        assert expected in done.stderr.splitlines()[-1]


def test_a_folded_command_is_the_same_command() -> None:
    typed = "histograph cache --model 'my -net.py:Net' --data \"a  b\" --split kfold:10 -o x.cache"
    lines = folded_command(typed, 40).splitlines()
    assert len(lines) == 4
    assert max(map(len, lines)) <= 40
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {folded_command(typed, 40)}"],
        capture_output=True,
        text=True,
    )
    assert echoed.stdout.splitlines() == shlex.split(typed)
