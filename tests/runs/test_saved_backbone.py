"""The backbone of a run is found again, or asked for, and another one is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import histograph_post as hg
from histograph_post.errors import CacheError, CheckpointError, ConfigError, NotFoundError
from histograph_post.models.checkpoints import weights_sha256
from histograph_post.runs.run import Run
from histograph_post.runs.saved_backbone import check_backbone

from ..helpers import demo_graphs, make_model
from .conftest import hashes, other_checkpoint


def test_backbone_with_other_weights_is_refused_with_bothhashes(run: Run, tmp_path: Path) -> None:
    right = weights_sha256(make_model().state_dict())
    for offered, model in (
        ({"checkpoint": other_checkpoint(tmp_path)}, None),
        ({"model": make_model(seed=1)}, make_model(seed=1)),
        ({"model": make_model(num_layers=2)}, make_model(num_layers=2)),
    ):
        with pytest.raises(CheckpointError) as refused:
            hg.load(run, **offered)
        assert right in str(refused.value)
        if model is not None:
            assert weights_sha256(model.state_dict()) in str(refused.value)
        assert len(set(hashes(str(refused.value)))) == 2
    assert hg.load(run, model=make_model()).task.kind == "binary"


def test_cache_of_another_backbone_is_refused_with_bothhashes(run: Run, tmp_path: Path) -> None:
    saved = run.backbone
    same = hg.cache(make_model(), demo_graphs(6), tmp_path / "same.cache")
    other = hg.cache(make_model(seed=1), demo_graphs(6), tmp_path / "other.cache")
    assert same is not None
    assert other is not None
    check_backbone(saved, same)
    with pytest.raises(CacheError) as refused:
        check_backbone(saved, other)
    assert str(tmp_path / "other.cache") in str(refused.value)
    assert hashes(str(refused.value)) == [other.weights_sha256, same.weights_sha256]


def test_checkpoint_that_was_moved_is_asked_for(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    run = tmp_path / "copy" / "run"
    assert hg.load(run).task.kind == "binary"
    config = tmp_path / "copy" / "demo.cache" / "config.toml"
    text = config.read_text()
    # A relative name is looked for from here, and from the folders the cache is in.
    config.write_text(text.replace(str(folder / "model.safetensors"), "model.safetensors"))
    assert hg.load(run).task.kind == "binary"
    (tmp_path / "copy" / "model.safetensors").rename(tmp_path / "moved.safetensors")
    with pytest.raises(NotFoundError, match=r"model\.safetensors.*--checkpoint FILE"):
        hg.load(run)
    assert hg.load(run, checkpoint=tmp_path / "moved.safetensors").task.kind == "binary"
    # A cache of a pretraining's fold names the folder of all folds.
    config.write_text(f'folder = "{tmp_path}/pretrained"')
    fold = tmp_path / "pretrained" / "demo"  # demo.cache is the cache of this fold
    fold.mkdir(parents=True)
    shutil.copy(tmp_path / "moved.safetensors", fold / "model.safetensors")
    assert hg.load(run).task.kind == "binary"
    shutil.rmtree(tmp_path / "copy" / "demo.cache")
    with pytest.raises(NotFoundError, match="--checkpoint FILE"):
        hg.load(run)


def test_folder_that_is_no_run_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="expected a run"):
        hg.load(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"head\.json"):
        hg.load(tmp_path)
    shutil.copytree(run.folder, tmp_path / "run")
    (tmp_path / "run" / "head.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"head\.safetensors"):
        hg.load(tmp_path / "run", model=make_model())
    (tmp_path / "run" / "head.json").write_text('{"head": "histograph"}')
    with pytest.raises(ConfigError, match=r"head\.json: found other contents"):
        hg.load(tmp_path / "run")
    (tmp_path / "run" / "SHA256SUMS").unlink()
    with pytest.raises(ConfigError, match=r"head\.json: found no"):
        hg.load(tmp_path / "run")
