"""A run folder is read by one class, whatever command made it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import histograph_post as hg
from histograph_post.errors import ConfigError, NotFoundError
from histograph_post.runs.run import Run


def test_a_run_says_what_it_holds(folder: Path) -> None:
    run = hg.Run.open(folder / "run")
    assert (run.name, run.kind, run.head, run.config) == ("run", "train-head", "histograph", None)
    assert set(run.readouts) == {"histograph", "mean"}
    assert run.splits.kind == "kfold:3"
    assert run.plan["seeds"] == [0, 1]
    assert run.task.kind == "binary"
    fits = {(fold, seed) for fold in range(3) for seed in range(2)}
    assert run.scores("histograph", "test").keys() == fits
    assert all(run.fit_folder("mean", *key).is_dir() for key in fits)
    assert {(line["fold"], line["seed"]) for line in run.log} == fits
    backbone = run.backbone
    assert (backbone.model.spec, backbone.data.spec) == ("gin", "demo:")
    assert backbone.cache == (folder / "demo.cache").resolve()


def test_a_head_comes_with_the_weights_of_its_fold_and_seed(run: Run) -> None:
    for fold, seed in ((0, 0), (2, 1), run.chosen):
        head, standardizer = run.load_head(fold, seed)
        assert standardizer is not None
        stored = load_file(run.fit_folder("histograph", fold, seed) / "head.safetensors")
        for prefix, module in (("head", head), ("standardizer", standardizer)):
            for name, value in module.state_dict().items():
                assert torch.equal(value, stored[f"{prefix}.{name}"]), name
    chosen, _ = run.load_head()
    for one, other in zip(chosen.parameters(), head.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_small_files_are_read_without_torch(run: Run) -> None:
    code = (
        "import sys; import histograph_post as hg; run = hg.Run.open(sys.argv[1])\n"
        "found = run.kind, run.head, run.chosen, run.splits, run.log, run.backbone.model\n"
        "sys.exit('imported torch' if 'torch' in sys.modules else 0)"
    )
    command = [sys.executable, "-c", code, str(run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("plan", "config", "kind"),
    [
        ({"heads": [{}, {}]}, None, "train-head"),
        ({"heads": [{}, {}, {}]}, None, "compare"),
        ({"heads": [{}, {}, {}]}, 'head = "mean"', "train-head"),
        ({"heads": [{}, {}]}, 'heads = "mean,max"', "compare"),
        ({"stage": "tune"}, None, "tune"),
        ({"stage": "finetune"}, "epochs = 3", "finetune"),
        ({"stage": "pretrain"}, None, "pretrain"),
        ({"stage": "end-to-end"}, 'head = "histograph"', "pretrain"),
        (None, None, "export"),
    ],
)
def test_the_kind_of_a_run_is_the_command_that_makes_it(
    tmp_path: Path, plan: Any, config: str | None, kind: str
) -> None:
    if plan is not None:
        (tmp_path / "run.json").write_text(json.dumps(plan))
    if config is not None:
        (tmp_path / "config.toml").write_text(config)
    assert Run.of(tmp_path).kind == kind


def test_what_is_no_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="found no folder, expected a finished run"):
        hg.Run.open(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"found no results\.json, expected a finished run"):
        hg.Run.open(tmp_path)
    for text, expected in (("[]", "found list, expected an object"), ("{", "found broken JSON")):
        (tmp_path / "results.json").write_text(text)
        with pytest.raises(ConfigError, match=expected):
            hg.Run.open(tmp_path)
    named = '"metric": "accuracy", "model": "gin", "data": "demo:"'
    (tmp_path / "results.json").write_text(f'{{"task": {{}}, {named}, "folds": []}}')
    assert hg.Run.open(tmp_path).results["folds"] == []  # a backbone alone has no head
    for use in (
        hg.report,
        hg.load,
        lambda run: hg.Run.open(run).verdict,
        lambda run: hg.Run.open(run).head,
    ):
        with pytest.raises(ConfigError, match="found backbones without a head, expected"):
            use(tmp_path)
