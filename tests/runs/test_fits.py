"""What a fit keeps beside its weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import histograph_post as hg
from histograph_post.data import load_data
from histograph_post.runs.fits import OUTPUTS_NAME, Fit, FitSpec, load_fit
from histograph_post.training.options import TrainingOptions

from ..helpers import make_model

TRAINING = TrainingOptions(epochs=2, batch_size=16)


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[hg.Run, FitSpec]:
    folder = tmp_path_factory.mktemp("fits")
    model = make_model(num_layers=2)
    hg.cache(model, load_data("demo:", args={"num_graphs": 40}), folder / "demo.cache")
    run = hg.compare(
        folder / "demo.cache", folder / "run", heads=["mean"], dim=8, training=TRAINING
    )
    return run, FitSpec("mean", {"dim": 8}, TRAINING, fold=0, seed=0)


def read(run: hg.Run, spec: FitSpec) -> Fit:
    return load_fit(spec, run.folder / spec.folder)


def test_outputs_of_the_validation_part_are_kept(fitted: tuple[hg.Run, FitSpec]) -> None:
    run, spec = fitted
    fit, split = read(run, spec), run.splits.folds[0]
    np.testing.assert_array_equal(fit.valid_rows, split.valid)
    np.testing.assert_array_equal(fit.test_rows, split.test)
    labels = hg.Cache.open(run.backbone.cache).labels()
    for part, rows, outputs in (
        ("valid", fit.valid_rows, fit.valid_outputs),
        ("test", fit.test_rows, fit.test_outputs),
    ):
        assert run.task.scores(outputs, labels[rows]) == fit.scores[part]


def test_a_fit_of_an_earlier_version_has_no_validation_outputs(
    fitted: tuple[hg.Run, FitSpec], tmp_path: Path
) -> None:
    run, spec = fitted
    folder = run.folder / spec.folder
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    arrays = load_file(folder / OUTPUTS_NAME)
    save_file({name: arrays[name] for name in ("rows", "outputs")}, tmp_path / OUTPUTS_NAME)
    stored = json.loads((tmp_path / "fit.json").read_text())
    (tmp_path / "fit.json").write_text(json.dumps({**stored, "files": {}}))
    fit = load_fit(spec, tmp_path)
    assert fit.valid_rows.shape == (0,)
    assert fit.valid_outputs.shape == (0, 1)
    np.testing.assert_array_equal(fit.test_outputs, read(run, spec).test_outputs)
