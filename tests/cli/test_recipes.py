"""`histograph recipes`, and public checkpoints from the file to predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from histograph_cli.app import app
from histograph_post.models import build_model
from histograph_post.utils.specifications import PUBLIC_MODELS


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_recipes_list_every_public_checkpoint_and_the_command_for_each() -> None:
    printed = run("recipes")
    assert all(name in printed for name in PUBLIC_MODELS)
    listed = json.loads(run("recipes", "molclr:gin", "--json"))["recipes"]
    assert [recipe["name"] for recipe in listed] == ["molclr:gin"]
    assert listed[0]["command"].startswith("histograph cache --model molclr:gin --checkpoint")
    refused = CliRunner().invoke(app, ["recipes", "nothing"])
    assert refused.exit_code == 1
    assert "no such recipe, expected one of" in refused.stderr


def test_inspect_and_cache_name_the_family_and_how_to_give_a_file(tmp_path: Path) -> None:
    file = tmp_path / "file.pth"
    weights = build_model("pretrain-gnns:gat", {"emb_dim": 4, "num_layer": 2}).state_dict()
    torch.save(weights, file)
    found = CliRunner().invoke(app, ["inspect", str(file)])
    assert "these are the weights of pretrain-gnns:gat" in found.stderr
    assert "--model pretrain-gnns:gat" in found.stdout
    refused = CliRunner().invoke(app, ["cache", str(file), "-o", str(tmp_path / "x.cache")])
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
    run("cache", "--model", "molclr:gcn", "--checkpoint", tmp_path / "file.pth", *data, "-o", cache)
    run("train-head", cache, "--epochs", 1, "--seeds", 0, "--head", "mean", "-o", out)
    # The model is built in and recorded, as are the features: neither has to be named again.
    run("predict", out, *data, "-o", tmp_path / "predictions.csv")
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 41
