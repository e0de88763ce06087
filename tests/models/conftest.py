"""A small model, weights for it, and what loading them is held to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from histograph_post.errors import CheckpointError
from histograph_post.models import Checkpoint, KeyMap, load_into


@pytest.fixture(autouse=True)
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trust is remembered: nothing is in there when a test begins."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ".state"))
    return tmp_path / ".state"


def checkpoint_of(state_dict: dict[str, Tensor], *stripped: str) -> Checkpoint:
    return Checkpoint(Path("model.pt"), state_dict, "", "bare", stripped)


def small_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def randomized(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.randn_like(value) if value.is_floating_point() else value + 5
        for name, value in model.state_dict().items()
    }


def assert_holds(model: nn.Module, state_dict: dict[str, Tensor]) -> None:
    held = model.state_dict()
    assert held.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert torch.equal(held[name], tensor), name


def mismatch(
    model: nn.Module, state_dict: dict[str, Tensor], key_map: KeyMap | None = None
) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_into(model, checkpoint_of(state_dict), key_map=key_map)
    assert str(caught.value).startswith("model.pt: does not fit the model: ")
    assert "\n" not in str(caught.value)
    return caught.value
