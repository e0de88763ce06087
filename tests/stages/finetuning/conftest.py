"""A checkpoint with dropout and running statistics, its cache and a run, for the tests here."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from ...helpers import make_model, make_run_folder


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
def folder(tmp_path_factory: pytest.TempPathFactory, backbone: nn.Module) -> Path:
    """A folder with a checkpoint, its cache and a run, as the commands leave them."""
    return make_run_folder(tmp_path_factory.mktemp("work"), backbone, "checkpoint.safetensors")
