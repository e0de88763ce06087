"""`histograph inspect` on folders: runs, comparisons, caches; in a blink, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import histograph_post as hg
from histograph_post.models import build_model
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two caches, a run on the first, and a comparison."""
    folder = tmp_path_factory.mktemp("inspected")
    data = hg.load_data("demo:", args={"num_graphs": 30})
    for fold in range(2):
        torch.manual_seed(fold)
        model = build_model("gin", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=1)
        hg.cache(model, data, folder / "caches" / f"fold-{fold}.cache", splits="random")
    cache = folder / "caches" / "fold-0.cache"
    done = histograph(
        *("train-head", cache, "-o", folder / "run", "--epochs", 2, "--dim", 8, "--heads", 2, "-q")
    )
    assert done.exit_code == 0, done.output
    heads = ("concat", "mean", "max", "sum")
    hg.compare(cache, folder / "compared", heads=heads, dim=8, training=QUICK)
    return folder


def test_run_says_what_it_is(folder: Path) -> None:
    done = histograph("inspect", folder / "run", "-q")
    assert done.exit_code == 0, done.output
    stored = json.loads((folder / "run" / "head.json").read_text())["backbone"]
    assert stored["weights_sha256"] in done.stdout
    assert stored["data"]["fingerprint"] in done.stdout
    for words in ("binary, graph level", "demo:", "random", "dim 8", "epochs 2", "histograph"):
        assert words in done.stdout, words


def test_json_has_the_scores_and_the_command_that_repeats_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.loads(histograph("inspect", folder / "run", "--json").stdout)
    assert said["facts"]["task"] == "binary, graph level"
    results = json.loads((folder / "run" / "results.json").read_text())
    assert said["readouts"] == results["readouts"]
    command = said["command"].splitlines()[0].split()
    assert command[:3] == ["histograph", "train-head", str(folder / "caches" / "fold-0.cache")]
    monkeypatch.chdir(folder)
    command[command.index("-o") + 1] = "again"
    done = histograph(*command[1:], "-q")
    assert done.exit_code == 0, done.output
    again = (folder / "again" / "results.json").read_bytes()
    assert again == (folder / "run" / "results.json").read_bytes()


def test_comparison_is_ranked(folder: Path) -> None:
    done = histograph("inspect", folder / "compared", "-q")
    readouts = json.loads((folder / "compared" / "results.json").read_text())["readouts"]
    table = done.stdout[done.stdout.index("Readouts by validation") :]  # behind the facts
    shown = sorted(readouts, key=lambda name: table.index(f"│ {name} "))
    assert shown[0] == "own readout"
    valid = [(readouts[n].get("averaged") or readouts[n])["valid"]["mean"] for n in shown[1:]]
    assert valid == sorted(valid, reverse=True)
    assert (
        "hg.compare"
        in json.loads(histograph("inspect", folder / "compared", "--json").stdout)["command"]
    )


def test_folder_of_caches_is_listed(folder: Path) -> None:
    said = json.loads(histograph("inspect", folder / "caches", "--json").stdout)
    assert list(said["caches"]) == ["fold-0.cache", "fold-1.cache"]
    hashes = {cache["weights_sha256"] for cache in said["caches"].values()}
    assert len(hashes) == 2
    assert all(sha[:12] in histograph("inspect", folder / "caches").stdout for sha in hashes)


def test_unfinished_run_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    done = histograph("inspect", tmp_path)
    assert done.exit_code == 1
    assert done.stderr.splitlines() == [
        f"error: {tmp_path}: found no results.json, expected a finished run; run the same command "
        "again to finish it"
    ]


@pytest.mark.parametrize("what", ["run", "compared", "caches", "caches/fold-0.cache"])
def test_folders_are_shown_without_torch(folder: Path, what: str) -> None:
    code = (
        "import sys; from histograph_cli.app import app\n"
        "try: app(['inspect', sys.argv[1]])\n"
        "except SystemExit as done: assert not done.code\n"
        "slow = {'torch', 'torch_geometric', 'sklearn', 'h5py', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder / what)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_what_pretrain_and_export_leave_is_shown(folder: Path, tmp_path: Path) -> None:
    given = ("--model", "gin", "--model-args", "hidden=8", "--data", "demo:", "--epochs", 1, "-q")
    args = ("--data-args", "num_graphs=30")
    assert histograph("pretrain", *given, *args, "--folds", 3, "-o", tmp_path / "b").exit_code == 0
    done = histograph("inspect", tmp_path / "b")
    assert done.exit_code == 0, done.output
    assert "fold 2" in done.stdout
    assert f"next: histograph cache {tmp_path / 'b'}" in done.stdout
    for words in (
        ("cache", tmp_path / "b", "-o", tmp_path / "caches"),
        ("train-head", tmp_path / "caches", "--epochs", 1, "--seeds", 0, "-o", tmp_path / "run"),
        ("export", tmp_path / "run", "--whole", "-o", tmp_path / "whole"),
    ):
        done = histograph(*words, "-q")
        assert done.exit_code == 0, done.output
    stored = json.loads((tmp_path / "whole" / "head.json").read_text())
    done = histograph("inspect", tmp_path / "whole")
    assert done.exit_code == 0, done.output
    assert stored["backbone"]["weights_sha256"] in done.stdout
    assert f"histograph of fold {stored['fold']}, seed 0" in done.stdout
