"""The command line as a user and a script see it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from histograph_cli.app import app

from ..helpers import contents, histograph, make_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "model.safetensors"
    save_file(make_model(num_layers=2).state_dict(), path)
    return path


def cache_arguments(checkpoint: Path, out: Path, *more: object) -> tuple[object, ...]:
    demo = ("--data", "demo:", "--data-args", "num_graphs=40")
    return ("cache", "--model", "gin", "--checkpoint", checkpoint, *demo, "-o", out, *more)


def test_help_answers_without_importing_torch() -> None:
    code = (
        "import sys; from histograph_cli.app import app\n"
        "for words in ([], ['cache'], ['train-head'], ['bench']):\n"
        "    try: app([*words, '--help'])\n"
        "    except SystemExit: pass\n"
        "slow = {'torch', 'torch_geometric', 'sklearn', 'h5py', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "cache" in done.stdout


def test_python_dash_m_works_for_launchers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "histograph_cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("histograph-post ")


def test_cache_prints_the_own_score_and_the_next_command(checkpoint: Path, tmp_path: Path) -> None:
    result = histograph(*cache_arguments(checkpoint, tmp_path / "a.cache"))
    assert result.exit_code == 0, result.output
    assert "The checkpoint's own readout" in result.stdout
    assert "accuracy" in result.stdout
    assert f"next: histograph train-head {tmp_path / 'a.cache'} -o RUN" in result.stdout
    assert "\x1b" not in result.stdout + result.stderr


def test_json_is_one_object_on_stdout(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.cache"
    written = json.loads(histograph(*cache_arguments(checkpoint, out, "--json")).stdout)
    assert written["complete"]
    assert written["layers"] == ["input", "convs.0", "convs.1"]
    inspected = json.loads(histograph("inspect", out, "--json").stdout)
    assert inspected["own_metrics"] == written["own_metrics"]
    assert json.loads(histograph("verify", out, "--json").stdout)["ok"]


def test_dry_run_writes_nothing_and_tells_the_bytes(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.cache"
    planned = json.loads(
        histograph(*cache_arguments(checkpoint, out, "--dry-run", "--json")).stdout
    )
    assert not out.exists()
    words = ("--model", "gin", "--checkpoint", checkpoint, "--data", "demo:", "--dry-run")
    assert "writing to" not in histograph("cache", *words).stderr
    assert planned["bytes"] == planned["num_nodes"] * 3 * 8 * 4
    assert planned["seconds"] > 0


def test_inspect_shows_what_would_be_captured(checkpoint: Path) -> None:
    result = histograph("inspect", checkpoint, "--model", "gin", "--data", "demo:")
    assert result.exit_code == 0, result.output
    for layer in ("input", "convs.0", "convs.1"):
        assert layer in result.stdout
    assert "embedding.linear.weight" in histograph("inspect", checkpoint).stdout


def test_known_failures_are_one_line_and_exit_1(checkpoint: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pt"
    for arguments in (
        ("inspect", missing),
        ("inspect", tmp_path),
        ("train-head", tmp_path / "none.cache", "-o", tmp_path / "run"),
        (
            "cache",
            "--model",
            "gin",
            "--checkpoint",
            missing,
            "--data",
            "demo:",
            "-o",
            tmp_path / "x",
        ),
        cache_arguments(
            checkpoint, tmp_path / "y", "--data", "tu:NO_SUCH", "--data-root", tmp_path
        ),
        cache_arguments(checkpoint, tmp_path / "y", "--model", "transformer"),
        cache_arguments(checkpoint, tmp_path / "y", "--layers", "conv_one"),
        cache_arguments(checkpoint, tmp_path / "y", "--split", "kfold:1000"),
    ):
        result = histograph(*arguments)
        lines = [line for line in result.stderr.splitlines() if not line.startswith("note:")]
        assert result.exit_code == 1, arguments
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("error: ")
        assert result.stdout == ""
    assert "Traceback" in histograph("inspect", missing, "--debug").stderr


def test_mismatch_prints_a_table_above_the_line(checkpoint: Path, tmp_path: Path) -> None:
    result = histograph(
        *cache_arguments(checkpoint, tmp_path / "a.cache", "--model-args", "hidden=16")
    )
    assert result.exit_code == 1
    assert "convs.0" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "a.cache").exists()


def test_files_that_cannot_be_written_are_one_line(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "sub", Path("/proc/none/a.cache")):
        result = histograph(*cache_arguments(checkpoint, out))
        assert result.exit_code == 1
        assert result.stderr.splitlines()[-1].startswith("error: ")


def test_what_user_code_prints_does_not_mix_with_the_result(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import torch\nfrom torch_geometric.nn import GCNConv\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.conv = GCNConv(4, 2)\n"
        "    def forward(self, x, edge_index):\n"
        "        print('hello'); return self.conv(x, edge_index)\n"
    )
    weights = {"conv.lin.weight": torch.zeros(2, 4), "conv.bias": torch.zeros(2)}
    weights["conv.\x1b]0;title"] = torch.zeros(1)
    torch.save(weights, tmp_path / "loud.pt")
    assert "\x1b" not in histograph("inspect", tmp_path / "loud.pt").output
    del weights["conv.\x1b]0;title"]
    torch.save(weights, tmp_path / "loud.pt")
    model = ("--model", f"{tmp_path}/loud.py:Net", "--data", "demo:")
    result = histograph("inspect", tmp_path / "loud.pt", *model, "--json")
    assert json.loads(result.stdout)["num_graphs"] == 600
    assert "hello" in result.stderr


def test_usage_errors_exit_2(tmp_path: Path) -> None:
    for arguments in (
        ("cache",),
        ("cache", "--no-such-option"),
        ("verify",),
        ("inspect", tmp_path / "model.pt", "--model", "gin"),
    ):
        assert histograph(*arguments).exit_code == 2, arguments


def test_config_file_sets_options_flags_win_and_the_resolved_copy_works(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = tmp_path / "job.toml"
    config.write_text(
        f'model = "gin"\ncheckpoint = "{checkpoint}"\ndata = "demo:"\n'
        'data-args = ["num_graphs=40"]\ndtype = "float16"\nsplit = "kfold:4"\n'
    )
    first, second = tmp_path / "a.cache", tmp_path / "b.cache"
    result = histograph("cache", "--config", config, "-o", first, "--dtype", "bfloat16", "--json")
    assert json.loads(result.stdout)["dtype"] == "bfloat16"
    again = histograph("cache", "--config", first / "config.toml", "-o", second)
    assert again.exit_code == 0, again.output
    assert (first / "manifest.json").read_bytes() == (second / "manifest.json").read_bytes()
    config.write_text('colour = "blue"\n')
    refused = histograph("cache", "--config", config, "-o", tmp_path / "c.cache")
    assert refused.exit_code == 2
    assert "'colour' is not an option of cache" in " ".join(refused.stderr.split())


def test_shards_of_a_job_array_are_joined_by_the_last(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.cache"
    first = histograph(*cache_arguments(checkpoint, out, "--shard", "1/2", "--json"))
    assert json.loads(first.stdout) == {"cache": str(out), "complete": False}
    last = histograph(*cache_arguments(checkpoint, out, "--shard", "0/2", "--json"))
    assert json.loads(last.stdout)["complete"]
    assert histograph(*cache_arguments(checkpoint, out, "--shard", "2/2")).exit_code == 2


def test_processes_write_the_shards_of_one_command(checkpoint: Path, tmp_path: Path) -> None:
    data = ("--data", "demo:", "--data-args", "num_graphs=600", "--shard-mb", "1")
    options = ("cache", "--model", "gin", "--checkpoint", checkpoint, *data)
    whole = histograph(*options, "-o", tmp_path / "a.cache")
    assert whole.exit_code == 0, whole.output
    done = histograph(*options, "-o", tmp_path / "b.cache", "--jobs", "2", "--json")
    found = json.loads(done.stdout)
    assert found["complete"]
    assert found["shards"] > 1
    made = [contents(tmp_path / name) for name in ("a.cache", "b.cache")]
    assert all(each.pop("config.toml") for each in made)
    assert made[0] == made[1]
    twice = histograph(*options, "-o", tmp_path / "c.cache", "--jobs", "2", "--shard", "0/2")
    assert twice.exit_code == 2


def test_damage_is_found_by_verify(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.cache"
    histograph(*cache_arguments(checkpoint, out))
    shard = out / "shard-00000.h5"
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    result = histograph("verify", out)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")


def test_every_command_and_option_has_help() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"
