"""A checkpoint with dropout and running statistics, its cache and a run, for the tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

import histograph_post as hg
from histograph_post.training.options import TrainingOptions

from ...helpers import histograph, make_model

NUM_GRAPHS = 48


@pytest.fixture(scope="session")
def backbone() -> nn.Module:
    """What the checkpoint holds: running statistics that are not the initial ones, dropout."""
    model = make_model(dropout=0.2)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture(scope="session")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
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
