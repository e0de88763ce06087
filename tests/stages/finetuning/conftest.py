"""A checkpoint with dropout and running statistics, its cache and a run, for the tests here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner, Result

import histograph_post as hg
from histograph_cli.main import app
from histograph_post.models import build_model
from histograph_post.training.options import TrainingOptions

NUM_GRAPHS = 48


@pytest.fixture(scope="session")
def histograph() -> Callable[..., Result]:
    """Run a command of the tool."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run


@pytest.fixture(scope="session")
def backbone() -> nn.Module:
    """What the checkpoint holds: running statistics that are not the initial ones, dropout."""
    torch.manual_seed(0)
    model = build_model("gin", {"hidden": 8, "num_layers": 3, "dropout": 0.2}, in_dim=4, out_dim=1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    histograph: Callable[..., Result],
    backbone: nn.Module,
) -> Path:
    """A folder with a checkpoint, its cache and a run, as the commands leave them."""
    folder = tmp_path_factory.mktemp("work")
    save_file(backbone.state_dict(), folder / "checkpoint.safetensors")
    demo = ("--data", "demo:", "--data-args", f"num_graphs={NUM_GRAPHS}", "--split", "kfold:3")
    model = ("--model", "gin", "--checkpoint", folder / "checkpoint.safetensors")
    made = histograph("cache", *model, *demo, "-o", folder / "demo.cache")
    assert made.exit_code == 0, made.output
    hg.train_head(
        folder / "demo.cache",
        folder / "run",
        seeds=(0, 1),
        dim=8,
        heads=2,
        training=TrainingOptions(epochs=3, lr=1e-2),
    )
    return folder
