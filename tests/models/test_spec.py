"""A specification becomes code if the user named it or if it is built in, never from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from histograph_post.data import DataSpec
from histograph_post.errors import CheckpointError, DataError, ModelError, NotFoundError
from histograph_post.models import ModelSpec
from histograph_post.models.spec import load_pretrained

SIZES = {"hidden": 8, "num_layers": 2}


def test_what_a_file_recorded_is_built_only_if_it_is_built_in(tmp_path: Path) -> None:
    code = tmp_path / "mine.py"
    code.write_text(
        "from torch import nn\nfrom histograph_post.data import load_data\n"
        "def net(): return nn.Linear(2, 3)\n"
        "def graphs(): return load_data('demo:', args={'num_graphs': 3}).graphs\n"
    )
    named, recorded = ModelSpec(f"{code}:net"), ModelSpec(f"{code}:net", recorded_in="head.json")
    assert named.build().out_features == 3
    for refused in (recorded.build, recorded.load):
        with pytest.raises(ModelError, match=r"^head\.json: .*which is code.*--model my_model"):
            refused()
    assert recorded.to_follow(named.spec).build().out_features == 3
    with pytest.raises(DataError, match=r"^head\.json: .*which is code.*--data my_data"):
        DataSpec(f"{code}:graphs", recorded_in="head.json").load()
    assert len(DataSpec(f"{code}:graphs").load()) == 3
    assert len(DataSpec("demo:", {"num_graphs": 2}, recorded_in="head.json").load()) == 2
    built_in = ModelSpec("gin", SIZES, recorded_in="head.json", out_dim=1)
    assert built_in.build(in_dim=4).settings.hidden == 8


def test_a_model_is_loaded_with_its_checkpoint_and_key_map(tmp_path: Path) -> None:
    data = DataSpec("demo:", {"num_graphs": 6})
    model = ModelSpec("gin", SIZES, out_dim=1).build(in_dim=4)
    state = model.state_dict()
    save_file({f"old.{name}": value for name, value in state.items()}, tmp_path / "w.safetensors")
    (tmp_path / "names.toml").write_text('"old.*" = "*"\n')
    spec = ModelSpec("gin", checkpoint=tmp_path / "w.safetensors", key_map=tmp_path / "names.toml")
    found = load_pretrained(spec, data)
    assert not found.model.training
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, state[name]), name
    assert len(found.dataset) == 6
    with pytest.raises(NotFoundError, match="found no checkpoint"):
        ModelSpec("gin").load()
    save_file({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="does not fit the model"):
        ModelSpec("gin", checkpoint=tmp_path / "other.safetensors").fill(model)
