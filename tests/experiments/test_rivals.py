"""Rivals against scikit-learn as it comes, and compared in a run without being saved as heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.svm import SVC, SVR

import histograph_post as hg
from histograph_post.errors import ConfigError
from histograph_post.experiments import rivals
from histograph_post.experiments.rivals import RivalFit, RivalRows, fit_boosting
from histograph_post.experiments.rivals import fit_support_vectors as fit_svm
from histograph_post.heads import build_head
from histograph_post.tasks import TargetScale, Task, infer_task
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph

QUICK = TrainingOptions(epochs=2, batch_size=16)
TRAIN, VALID, ROWS = np.arange(120), np.arange(120, 160), np.arange(200)


def make(labels: np.ndarray, features: np.ndarray, **options: Any) -> tuple[RivalRows, TargetScale]:
    task = options.pop("task", None) or infer_task(labels, "graph")
    scale = TargetScale.of(task, labels[TRAIN])
    targets = scale.apply(task.targets(labels))
    given: dict[str, Any] = {"train": TRAIN, "valid": VALID, "rows": ROWS, **options}
    rows = RivalRows(torch.from_numpy(features), targets, task, widths=(4, 4), **given)
    return rows, scale


@pytest.fixture
def features() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)


def standardized(features: np.ndarray) -> np.ndarray:
    return (features - features[TRAIN].mean(0)) / features[TRAIN].std(0)


def test_support_vectors_are_those_of_scikit_learn(features: np.ndarray) -> None:
    labels = (np.sin(2 * features[:, :1]) + features[:, 1:2] ** 2 > 0.8).astype(float)
    given, scale = make(labels, features)
    found = fit_svm(given, scale)
    best = found.log[found.chosen]
    assert len(found.log) == len(rivals.COSTS) * len(rivals.GAMMAS)
    metric = f"valid_{given.task.metric}"
    assert best[metric] == max(entry[metric] for entry in found.log)
    rows = standardized(features)
    model = SVC(C=best["cost"], gamma=best["gamma"]).fit(rows[TRAIN], labels[TRAIN, 0])
    np.testing.assert_allclose(found.outputs[:, 0], model.decision_function(rows), atol=2e-2)
    score = given.task.score(found.outputs[VALID], labels[VALID])
    assert score == pytest.approx(best[metric])


def test_support_vectors_of_a_quantity_are_in_its_units(features: np.ndarray) -> None:
    labels = 50 + 20 * np.tanh(features[:, :2])
    labels[:30, 1] = np.nan
    given, scale = make(labels, features)
    found = fit_svm(given, scale)
    outputs = scale.undo(found.outputs)
    assert np.abs(outputs - np.where(np.isnan(labels), outputs, labels)).mean() < 6
    best = found.log[found.chosen]
    truth = labels[30:120, 1]
    model = SVR(C=best["cost"], gamma=best["gamma"], epsilon=rivals.EPSILON)
    rows = standardized(features)
    model.fit(rows[30:120], (truth - truth.mean()) / truth.std())
    expected = model.predict(rows) * truth.std() + truth.mean()
    np.testing.assert_allclose(outputs[:, 1], expected, atol=0.5)


def test_boosting_has_the_trees_that_validation_wants(features: np.ndarray) -> None:
    labels = (features[:, :1] * features[:, 1:2] > 0).astype(float)
    given, scale = make(labels, features)
    found = fit_boosting(given, scale)
    trees = int(found.log[0]["iterations"])
    model = HistGradientBoostingClassifier(
        max_iter=trees, max_bins=63, random_state=0, early_stopping=False
    ).fit(features[TRAIN], labels[TRAIN, 0])
    np.testing.assert_allclose(found.outputs[:, 0], model.decision_function(features), atol=1e-6)
    losses = [
        float(given.task.loss(torch.from_numpy(each).view(-1, 1), given.targets[VALID]))
        for each in model.staged_decision_function(features[VALID])
    ]
    assert losses[-1] == min(losses)
    assert found.log[0]["valid_loss"] == pytest.approx(losses[-1], abs=1e-5)


FITTED: dict[str, Callable[[RivalRows, TargetScale], RivalFit]] = {
    "svm": fit_svm,
    "boosting": fit_boosting,
}


@pytest.mark.parametrize("name", FITTED)
def test_each_target_has_its_own_labels(features: np.ndarray, name: str) -> None:
    labels = (features[:, :6] > 0).astype(float)
    labels[np.random.default_rng(1).random(labels.shape) < 0.3] = np.nan
    labels[:, 2], labels[:120, 3] = 1.0, np.nan
    given, scale = make(labels, features)
    found = FITTED[name](given, scale)
    assert found.outputs.shape == (200, 6)
    assert np.isfinite(found.outputs).all()
    assert (found.outputs[:, 2] == 1).all()
    assert (found.outputs[:, 3] == 0).all()
    others = [0, 1, 4, 5]
    only = Task("multilabel", "graph", 4, "roc_auc")
    assert only.score(found.outputs[160:, others], labels[160:, others]) > 0.8


@pytest.mark.parametrize("name", FITTED)
def test_classes_that_training_has_not_seen_come_last(features: np.ndarray, name: str) -> None:
    labels = np.digitize(features[:, :1], [-0.5, 0.5]).astype(float)
    labels[150:, 0] = np.where(features[150:, 1] > 1, 3.0, labels[150:, 0])
    given, scale = make(
        labels, features, task=Task("multiclass", "graph", 1, "accuracy", (0, 1, 2, 3))
    )
    found = FITTED[name](given, scale)
    assert found.outputs.shape == (200, 4)
    assert (found.outputs.argmin(1) == 3).all()
    known = labels[:, 0] < 3
    assert (found.outputs.argmax(1) == labels[:, 0])[known].mean() > 0.8


@pytest.mark.parametrize("name", FITTED)
def test_without_a_validation_part_nothing_is_chosen(features: np.ndarray, name: str) -> None:
    labels = (features[:, :1] > 0).astype(float)
    given, scale = make(labels, features, valid=np.empty(0, np.int64))
    found = FITTED[name](given, scale)
    assert len(found.log) == 1
    assert not any(key.startswith("valid") for key in found.log[0])
    assert given.task.score(found.outputs[160:], labels[160:]) > 0.8


@pytest.mark.parametrize("name", FITTED)
def test_rare_classes_count_as_much_if_asked_to(features: np.ndarray, name: str) -> None:
    noise = np.random.default_rng(2).normal(size=(200, 1))
    labels = (features[:, :1] + noise > 1.5).astype(float)
    plain, balanced = (
        FITTED[name](*make(labels, features, valid=np.empty(0, np.int64), balance=balance))
        for balance in (False, True)
    )
    assert (balanced.outputs > 0).sum() > (plain.outputs > 0).sum()


def test_more_rows_than_support_vectors_can_take_are_drawn(
    features: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rivals, "MOST_ROWS", 50)
    labels = (features[:, :1] > 0).astype(float)
    given, scale = make(labels, features)
    assert given.task.score(fit_svm(given, scale).outputs[160:], labels[160:]) > 0.8


# --- in a run


@pytest.fixture(scope="module")
def demo_cache(make_demo_cache: Callable[..., Path]) -> Path:
    return make_demo_cache(num_graphs=90)


def test_they_are_compared_and_never_the_head(demo_cache: Path, tmp_path: Path) -> None:
    words = ["compare", demo_cache, "--heads", "svm,boosting,concat,mean", "--seeds", "0,1"]
    words += ["--epochs", 2, "-o", tmp_path / "run"]
    done = histograph(*words)
    assert done.exit_code == 0, done.output
    assert "boosting (compared only)" in done.stdout  # a tie goes to the first in the alphabet
    run = hg.Run.open(tmp_path / "run")
    assert run.head == "concat"
    for name in ("svm", "boosting"):
        row = run.results["readouts"][name]
        assert row["compared_only"] is True
        assert row["test"]["count"] == 1
        folders = sorted((run.folder / "fits" / name).iterdir())
        assert len(folders) == 2
        assert not (folders[0] / "head.safetensors").exists()
        stored = [json.loads((folder / "fit.json").read_text()) for folder in folders]
        assert {**stored[0], "seed": 1} == stored[1]
    assert "compared_only" not in run.results["readouts"]["mean"]
    assert "svm (compared only)" in hg.report(run).path.read_text()
    again = histograph(*words)
    assert again.exit_code == 0, again.output


@pytest.mark.parametrize("name", FITTED)
def test_what_needs_a_head_refuses_them(demo_cache: Path, tmp_path: Path, name: str) -> None:
    out = tmp_path / "run"
    for call in (
        lambda: hg.train_head(demo_cache, out, head=name),
        lambda: hg.tune(demo_cache, out, head=name),
        lambda: hg.finetune(demo_cache, out, head=name),
        lambda: hg.pretrain("gin", "demo:", out, head=name),
        lambda: build_head(name, [8, 8], 1),
    ):
        with pytest.raises(
            ConfigError, match=f"head '{name}': found a rival that is compared only"
        ):
            call()
    with pytest.raises(ConfigError, match=f"found {name}, compared only, expected at least one"):
        hg.compare(demo_cache, out, heads=[name])
    assert not out.exists()
    shown = histograph("train-head", demo_cache, "--head", name, "-o", out)
    assert shown.exit_code != 0
    assert len(shown.stderr.strip().splitlines()) == 1
