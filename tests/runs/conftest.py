"""A checkpoint, its cache and a run, shared by the tests of prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import save_file

from histograph_post.runs.run import Run
from histograph_post.training.options import TrainingOptions

from ..helpers import make_model, make_run_folder

SHORT = TrainingOptions(epochs=3, lr=1e-2)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, its cache and a run, as the commands leave them."""
    return make_run_folder(tmp_path_factory.mktemp("work"), make_model())


@pytest.fixture(scope="session")
def run(folder: Path) -> Run:
    return Run.open(folder / "run")


def other_checkpoint(tmp_path: Path) -> Path:
    """Write the weights of the run's backbone with one tensor changed."""
    state = make_model().state_dict()
    name = next(name for name, value in state.items() if value.is_floating_point())
    state[name] = state[name] + 1e-3
    save_file(state, tmp_path / "other.safetensors")
    return tmp_path / "other.safetensors"


def hashes(text: str) -> list[str]:
    return [word for word in text.replace(",", " ").split() if len(word) == 64]
