"""Sizes that a constructor insists on: the weights know them better than the data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from histograph_post.errors import CheckpointError
from histograph_post.models import ModelSpec, build_model

MODELS = """
from torch import nn
from torch_geometric.nn import GATConv

class Logits(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.conv = GATConv(in_dim, 3, heads=2)
        self.out = nn.Linear(6, num_classes)

class Heads(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.out = GATConv(in_dim, num_classes, heads=4)

class Folded(nn.Module):
    def __init__(self, in_dim, num_classes):
        super().__init__()
        self.out = nn.Linear(in_dim, 1 if num_classes <= 2 else num_classes)

class Categories(nn.Module):
    def __init__(self, num_features, out_dim):
        super().__init__()
        self.embedding = nn.Embedding(num_features, 4)
        self.out = nn.Linear(4, 2 * out_dim + 1)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return path


@pytest.mark.parametrize("name", ["Logits", "Heads", "Folded"])
@pytest.mark.parametrize("classes", [1, 2, 3, 12])
@pytest.mark.parametrize("prefix", ["", "net."])
def test_the_weights_decide_the_number_of_outputs(
    file: Path, name: str, classes: int, prefix: str
) -> None:
    saved = build_model(f"{file}:{name}", {"in_dim": 7, "num_classes": classes}).state_dict()
    weights = {prefix + key: value for key, value in saved.items()}
    for guess in (1, None):  # two classes; links and data without labels
        filled: dict[str, Any] = {}
        built = build_model(
            f"{file}:{name}", {}, state_dict=weights, in_dim=7, out_dim=guess, filled=filled
        )
        assert {k: v.shape for k, v in built.state_dict().items()} == {
            k: v.shape for k, v in saved.items()
        }
        assert filled["in_dim"] == 7
        # What the weights do not tell apart is as the data say.
        assert filled["num_classes"] == (1 if name == "Folded" and classes <= 2 else classes)


def test_both_sizes_may_be_other_than_the_data_say(file: Path) -> None:
    args = {"num_features": 119, "out_dim": 5}
    saved = build_model(f"{file}:Categories", args).state_dict()
    filled: dict[str, Any] = {}
    build_model(f"{file}:Categories", {}, state_dict=saved, in_dim=2, out_dim=1, filled=filled)
    assert filled == args


def test_what_the_user_gives_wins(file: Path) -> None:
    saved = build_model(f"{file}:Logits", {"in_dim": 7, "num_classes": 2}).state_dict()
    built = build_model(f"{file}:Logits", {"num_classes": 3}, state_dict=saved, in_dim=7)
    assert isinstance(built.out, nn.Linear)
    assert built.out.out_features == 3


def test_weights_of_another_model_are_refused_as_before(file: Path, tmp_path: Path) -> None:
    import torch

    torch.save({"conv.bias": torch.ones(9), "out.weight": torch.ones(4, 5)}, tmp_path / "a.pt")
    spec = ModelSpec(f"{file}:Logits", {}, tmp_path / "a.pt", out_dim=1)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        spec.load(in_dim=7)
