"""The habits every command shares: configuration, completion, how much it says, event files."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import Result

from histograph_cli.app import app
from histograph_cli.progress import log_lines, make_bar
from histograph_post.data import load_data

from .helpers import histograph, make_model

COMMANDS = typer.main.get_command(app).commands
TRAINING = ("pretrain", "train-head", "compare", "tune", "finetune")


def train_head(demo_cache: Path, out: Path, *more: object) -> Result:
    return histograph("train-head", demo_cache, "-o", out, "--epochs", 2, "--dim", 8, *more)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_shared_options(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--config", "--json", "-q", "--quiet", "-v", "--verbose", "--debug"} <= options
    assert ("--tensorboard" in options) == (name in TRAINING)


# --- shell completion ---------------------------------------------------------------------------

_COMPLETE = """
import sys
from histograph_cli.app import app
try:
    app(prog_name="histograph")
finally:
    slow = {"torch", "torch_geometric", "sklearn", "h5py", "numpy"} & set(sys.modules)
    if slow:
        print("imported", slow)
"""


def complete(words: str, position: int) -> list[str]:
    variables = {"_HISTOGRAPH_COMPLETE": "complete_bash", "COMP_WORDS": words}
    done = subprocess.run(
        [sys.executable, "-c", _COMPLETE],
        env={**os.environ, **variables, "COMP_CWORD": str(position)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def test_commands_and_options_are_completed_without_importing_torch() -> None:
    assert complete("histograph tra", 1) == ["train-head"]
    assert complete("histograph train-head --warm", 2) == ["--warmup", "--warm-start"]


def test_training_a_head_loads_nothing_that_finds_layers_or_writes_caches() -> None:
    code = "import sys, histograph_post as hg; hg.train_head; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    slow = {"capture.probe", "caches.planning", "caches.writer", "models.checkpoints"}
    assert not {f"histograph_post.{name}" for name in slow} & set(done.stdout.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_can_be_shown(shell: str) -> None:
    result = histograph("--show-completion", shell)
    assert result.exit_code == 0, result.output
    assert "_HISTOGRAPH_COMPLETE" in result.stdout


# --- configuration ------------------------------------------------------------------------------


def test_a_file_with_tables_serves_several_commands(demo_cache: Path, tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f'cache = "{demo_cache}"\ndim = 8\nepochs = 9\nnode-budget = 100\n'
        '[train-head]\nepochs = 2\nhead = "jk-cat"\n[compare]\nheads = "mean,linear"\n'
    )
    out = tmp_path / "run"
    result = histograph("train-head", "--config", config, "-o", out, "--lr", "0.01", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["head"] == "jk-cat"
    assert {line["epoch"] for line in metrics(out)} == {0, 1}
    saved = (out / "config.toml").read_text()
    assert "dim = 8\n" in saved
    assert "lr = 0.01\n" in saved
    # What was saved makes the same run: the plan has to be the same for it to go on.
    again = histograph("train-head", "--config", out / "config.toml", "--json")
    assert json.loads(again.stdout)["readouts"] == json.loads(result.stdout)["readouts"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epoch = 3", "'epoch' is not an option of train-head, did you mean epochs?"),
        ('model = "gin"', "'model' is not an option of train-head"),
        ("[trainhead]\nepochs = 3", "[trainhead] is no command, did you mean train-head?"),
        ("[train-head]\nmodel = 3", "'model' is not an option of train-head"),
        ("color = 3\n[cache]\n", "'color' is not an option of train-head"),
        ("epochs = ", "not a readable TOML file"),
    ],
)
def test_a_wrong_file_is_refused(text: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text)
    result = histograph("train-head", "--config", tmp_path / "job.toml", "x", "-o", "y")
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.replace("│", " ").split())


# --- how much is said ---------------------------------------------------------------------------


def test_verbose_says_more_and_quiet_nothing(demo_cache: Path, tmp_path: Path) -> None:
    quiet = train_head(demo_cache, tmp_path / "quiet", "-q")
    assert quiet.stderr == ""
    assert "histograph" in quiet.stdout
    assert "next:" not in quiet.stdout
    verbose = train_head(demo_cache, tmp_path / "verbose", "-v").stderr
    assert "  weight-decay = 0.0001\n" in verbose
    assert "mean/fold-0-seed-0, epoch 1: loss 0." in verbose
    plain = train_head(demo_cache, tmp_path / "plain").stderr
    assert len(plain.splitlines()) < len(verbose.splitlines())
    assert "epoch 1: loss" not in plain
    assert train_head(demo_cache, tmp_path / "both", "-q", "-v").exit_code == 2


def test_a_bar_has_its_rate_and_the_time_left() -> None:
    clock = iter(range(0, 10_000))
    shown = io.StringIO()
    bar = make_bar(Console(file=shown, force_terminal=True, width=120))
    bar.get_time = lambda: next(clock)
    task = bar.add_task("caching nodes", total=1000)
    for done in (100, 200, 300):
        bar.update(task, completed=done)
    bar.console.print(bar.get_renderable())
    line = shown.getvalue()
    assert "300/1000" in line
    assert "/s" in line
    assert "elapsed, " in line
    assert "left" in line


def test_a_log_gets_lines_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 4.0, 20.0, 40.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    lines: list[str] = []
    update = log_lines("caching nodes", lines.append)
    for done in (0, 100, 1000, 2000):
        update(done, 2000)
    assert lines == [
        "caching nodes: 0/2000 (0 %)",
        "caching nodes: 1000/2000 (50 %), 50/s, 20.0 s left",
        "caching nodes: 2000/2000 (100 %), 50/s",
    ]


# --- event files --------------------------------------------------------------------------------


def test_event_files_hold_what_every_epoch_measured(demo_cache: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = tmp_path / "run"
    result = train_head(demo_cache, out, "--tensorboard", "--seeds", "0")
    assert result.exit_code == 0, result.output
    for head in ("mean", "histograph"):
        events = accumulators.EventAccumulator(str(out / "tensorboard" / head / "fold-0-seed-0"))
        events.Reload()
        lines = [line for line in metrics(out) if line["head"] == head]
        assert len(lines) == 2
        for name in ("loss", "lr", "valid_accuracy"):
            found = [(event.step, event.value) for event in events.Scalars(name)]
            assert found == [(line["epoch"], pytest.approx(line[name])) for line in lines]
    assert "tensorboard" not in (out / "config.toml").read_text()
    assert train_head(demo_cache, out, "--overwrite").exit_code == 0
    assert not (out / "tensorboard").exists()


def test_a_backbone_has_event_files_too(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    data = ("--data", "demo:", "--data-args", "num_graphs=30", "--split", "kfold:3")
    sizes = ("--model-args", "hidden=8", "--model-args", "num_layers=2", "--epochs", "1")
    words = ("pretrain", "--model", "gin", *data, *sizes, "-o", tmp_path / "run", "--tensorboard")
    assert histograph(*words).exit_code == 0
    folders = sorted(path.name for path in (tmp_path / "run" / "tensorboard").iterdir())
    assert folders == ["fold-0", "fold-1", "fold-2"]


# --- errors that tell what to do next -----------------------------------------------------------


def refused(*words: object) -> str:
    result = histograph(*words)
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("extra", "module", "words"),
    [
        ("tensorboard", "tensorboard", ("train-head", "CACHE", "-o", "OUT", "--tensorboard")),
        (
            *("chem", "rdkit"),
            ("pretrain", "--model", "gin", "--data", "smiles:molecules.csv", "-o", "OUT"),
        ),
    ],
)
def test_a_missing_extra_names_the_command_that_installs_it(
    extra: str,
    module: str,
    words: tuple[str, ...],
    demo_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("molecules.csv").write_text("smiles,y\nCCO,1\n")
    monkeypatch.setitem(sys.modules, module, None)
    line = refused(*(str(demo_cache) if word == "CACHE" else word for word in words))
    assert f"pip install 'histograph-post[{extra}]'" in line
    assert not Path("OUT").exists()


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--model", "gim", "built-in ones are gcn, gin, gat, sage, gps; your own is named file.py"),
        ("--layers", "conv.1", "did you mean convs.1"),
        ("--data", "model.pt", "looks like a checkpoint, give it with --checkpoint"),
        ("--data", "model.ckpt", "looks like a checkpoint, give it with --checkpoint"),
        ("--data", "molecules.csv", "molecules are named smiles:molecules.csv"),
        ("--data", "loader.py", "name the function, as in loader.py:graphs"),
        ("--checkpoint", "graphs.pt", "graphs"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(
    option: str, value: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_model(num_layers=2)
    torch.save(model.state_dict(), "model.pt")
    torch.save({"state_dict": model.state_dict()}, "model.ckpt")
    torch.save(load_data("demo:", args={"num_graphs": 4}).graphs, "graphs.pt")
    told = {"--model": "gin", "--checkpoint": "model.pt", "--data": "demo:", option: value}
    words = [word for pair in told.items() for word in pair]
    assert expected in refused("cache", *words, "-o", "x.cache")
