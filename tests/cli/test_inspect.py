"""`histograph inspect` on folders, in a blink, without torch; and `histograph recipes`."""

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
from histograph_post.utils.specifications import PUBLIC_MODELS

from ..helpers import histograph, make_model

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two caches, a run on the first, and a comparison."""
    folder = tmp_path_factory.mktemp("inspected")
    data = hg.load_data("demo:", args={"num_graphs": 30})
    for fold in range(2):
        model = make_model(seed=fold, num_layers=2)
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


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    done = histograph("inspect", tmp_path / "none")
    expected = f"error: {tmp_path}/none: found nothing, expected a checkpoint, a cache or a run\n"
    assert (done.exit_code, done.stderr) == (1, expected)


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


# --- public checkpoints


def typed(*words: object) -> str:
    result = histograph(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recipes_list_every_public_checkpoint_and_the_command_for_each() -> None:
    printed = typed("recipes")
    assert all(name in printed for name in PUBLIC_MODELS)
    listed = json.loads(typed("recipes", "molclr:gin", "--json"))["recipes"]
    assert [recipe["name"] for recipe in listed] == ["molclr:gin"]
    assert listed[0]["command"].startswith("histograph cache --model molclr:gin --checkpoint")
    refused = histograph("recipes", "nothing")
    assert refused.exit_code == 1
    assert "no such recipe, expected one of" in refused.stderr


def test_inspect_and_cache_name_the_family_and_how_to_give_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file.pth"
    weights = build_model("pretrain-gnns:gat", {"emb_dim": 4, "num_layer": 2}).state_dict()
    torch.save(weights, file)
    found = histograph("inspect", file)
    assert "these are the weights of pretrain-gnns:gat" in found.stderr
    assert "--model pretrain-gnns:gat" in found.stdout
    refused = histograph("cache", file, "-o", tmp_path / "x.cache")
    assert refused.exit_code == 2
    assert "--checkpoint" in refused.stderr
    assert not (tmp_path / "x.cache").exists()


def test_a_public_checkpoint_goes_from_file_and_csv_to_predictions(tmp_path: Path) -> None:
    pytest.importorskip("rdkit")
    torch.manual_seed(0)
    model = build_model("molclr:gcn", {"emb_dim": 4, "num_layer": 2})
    torch.save(model.state_dict(), tmp_path / "file.pth")
    chains = [f"{'C' * (1 + n // 2)}{'ON'[n % 2]},{n % 2}" for n in range(40)]
    (tmp_path / "data.csv").write_text("\n".join(["smiles,active", *chains]))
    data = ("--data", f"smiles:{tmp_path / 'data.csv'}")
    cache, out = tmp_path / "x.cache", tmp_path / "run"
    typed(
        "cache", "--model", "molclr:gcn", "--checkpoint", tmp_path / "file.pth", *data, "-o", cache
    )
    typed("train-head", cache, "--epochs", 1, "--seeds", 0, "--head", "mean", "-o", out)
    # The model is built in and recorded, as are the features: neither has to be named again.
    typed("predict", out, *data, "-o", tmp_path / "predictions.csv")
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 41
