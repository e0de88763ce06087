"""A checkpoint, its cache and a run, shared by the tests of prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

import histograph_post as hg
from histograph_cli.main import app
from histograph_post.models import build_model
from histograph_post.runs.run import Run
from histograph_post.training.options import TrainingOptions

SHORT = TrainingOptions(epochs=3, lr=1e-2)
NUM_GRAPHS = 48


def make_model(seed: int = 0, **args: object) -> nn.Module:
    torch.manual_seed(seed)
    return build_model("gin", {"hidden": 8, "num_layers": 3, **args}, in_dim=4, out_dim=1)


def histograph(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its cache and a run, as the commands leave them."""
    folder = tmp_path_factory.mktemp("work")
    save_file(make_model().state_dict(), folder / "model.safetensors")
    demo = ("--data", "demo:", "--data-args", f"num_graphs={NUM_GRAPHS}", "--split", "kfold:3")
    model = ("--model", "gin", "--checkpoint", folder / "model.safetensors")
    assert histograph("cache", *model, *demo, "-o", folder / "demo.cache").exit_code == 0
    hg.train_head(
        folder / "demo.cache", folder / "run", seeds=(0, 1), dim=8, heads=2, training=SHORT
    )
    return folder


@pytest.fixture(scope="session")
def run(folder: Path) -> Run:
    return Run.open(folder / "run")
