"""Seeds averaged in results: scores, intervals, temperature, and who should be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import histograph_post as hg
from histograph_post.data import load_data
from histograph_post.experiments.options import DEFAULT_SEEDS
from histograph_post.runs.predictions import calibration_error, fit_temperature
from histograph_post.splits import Split
from histograph_post.training.options import TrainingOptions

from ..helpers import make_model

SHORT = TrainingOptions(epochs=2, batch_size=16, lr=3e-2)
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> hg.Cache:
    folder = tmp_path_factory.mktemp("averaged") / "demo.cache"
    model = make_model(num_layers=2)
    hg.cache(model, load_data("demo:", args={"num_graphs": 80}), folder)
    return hg.Cache.open(folder)


@pytest.fixture(scope="module")
def runs(cached: hg.Cache, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., hg.Run]:
    made: dict[str, hg.Run] = {}

    def make(name: str, **options: Any) -> hg.Run:
        if name not in made:
            given = {"seeds": SEEDS, "dim": 8, "training": SHORT, **options}
            made[name] = hg.train_head(cached, tmp_path_factory.mktemp("runs") / name, **given)
        return made[name]

    return make


def averaged(run: hg.Run, readout: str, fold: int, part: str = "") -> tuple[np.ndarray, Any]:
    """Return rows of a part, and the mean over seeds of the outputs that the fits stored."""
    prefix = f"{part}_" if part else ""
    files = [load_file(run.fit_folder(readout, fold, s) / "test.safetensors") for s in SEEDS]
    outputs = np.mean([file[f"{prefix}outputs"] for file in files], axis=0)
    return files[0][f"{prefix}rows"], outputs


def test_averages_are_scored_fold_by_fold(cached: hg.Cache, runs: Callable[..., hg.Run]) -> None:
    run, labels = runs("folds", folds=3), cached.labels()
    own = cached.outputs()
    found, expected = run.results["readouts"], {}
    for readout in ("mean", "histograph"):
        scores = []
        for fold in range(3):
            rows, outputs = averaged(run, readout, fold)
            scores.append(run.task.score(outputs, labels[rows]))
        expected[readout] = np.array(scores)
        summary = found[readout]["averaged"]["test"]
        assert summary["mean"] == pytest.approx(np.mean(scores))
        assert summary["deviation"] == pytest.approx(np.std(scores, ddof=1))
        assert summary["count"] == 3
    gap = expected["histograph"] - expected["mean"]
    versus = found["histograph"]["averaged"]["versus_baseline"]
    assert versus["mean"] == pytest.approx(gap.mean())
    assert (versus["baseline"], versus["count"], versus["over"]) == ("mean", 3, "folds")
    assert own is not None
    against = found["histograph"]["averaged"]["versus_own"]
    rows = [run.splits.folds[fold].test for fold in range(3)]
    theirs = [run.task.score(np.asarray(own)[part], labels[part]) for part in rows]
    assert against["mean"] == pytest.approx((expected["histograph"] - theirs).mean())
    # Beside the interval over folds, one over all their test rows.
    assert against["rows"]["count"] == sum(len(part) for part in rows) == len(labels)
    assert against["rows"]["low"] <= against["mean"] <= against["rows"]["high"]


def test_the_interval_of_a_single_fold_is_over_its_test_rows(
    cached: hg.Cache, runs: Callable[..., hg.Run]
) -> None:
    run, labels = runs("single"), cached.labels()
    found = run.results["readouts"]["histograph"]["averaged"]["versus_baseline"]
    rows, ours = averaged(run, "histograph", 0)
    _, theirs = averaged(run, "mean", 0)
    right = [((each > 0) == labels[rows]).mean(axis=1) for each in (ours, theirs)]
    assert found["mean"] == pytest.approx(right[0].mean() - right[1].mean())
    assert (found["count"], found["over"]) == (len(rows), "rows")
    # A bootstrap of a mean is close to the normal interval of it.
    error = 1.96 * (right[0] - right[1]).std() / np.sqrt(len(rows))
    assert found["high"] - found["low"] == pytest.approx(2 * error, rel=0.35, abs=0.05)


def test_one_seed_has_no_second_row_but_an_interval(runs: Callable[..., hg.Run]) -> None:
    run = runs("one", seeds=(1,))
    row = run.results["readouts"]["histograph"]
    assert row["averaged"] is None
    assert row["versus_baseline"]["over"] == "rows"
    assert row["versus_baseline"]["low"] <= row["versus_baseline"]["mean"]


@pytest.mark.parametrize("name", ["folds", "single"])
def test_the_temperature_comes_from_the_validation_rows_of_all_folds(
    cached: hg.Cache, runs: Callable[..., hg.Run], name: str
) -> None:
    run = runs(name, **({"folds": 3} if name == "folds" else {}))
    labels, folds = cached.labels(), range(len(run.splits.folds))
    parts = [averaged(run, "histograph", fold, "valid") for fold in folds]
    rows, outputs = (np.concatenate(values) for values in zip(*parts, strict=True))
    expected = fit_temperature(run.task, outputs, labels[rows])
    assert run.saved_head.temperature == pytest.approx(expected)
    stored = run.results["calibration"]
    assert stored["temperature"] == run.saved_head.temperature
    tested = [averaged(run, "histograph", fold) for fold in folds]
    rows, outputs = (np.concatenate(values) for values in zip(*tested, strict=True))
    for when, divisor in (("before", 1.0), ("after", expected)):
        probabilities = run.task.probabilities(torch.from_numpy(outputs / divisor)).numpy()
        error = calibration_error(run.task, probabilities, labels[rows])
        assert stored["test"][when] == pytest.approx(error)


def test_calibration_can_be_turned_off(runs: Callable[..., hg.Run]) -> None:
    run = runs("plain", calibrate=False)
    assert run.saved_head.temperature == 1.0
    errors = run.results["calibration"]["test"]
    assert errors["before"] == errors["after"]
    assert run.plan["calibrate"] is False


def test_without_a_validation_part_nothing_is_fitted(cached: hg.Cache, tmp_path: Path) -> None:
    parts = (np.arange(60), np.arange(0), np.arange(60, 80))
    splits = replace(cached.splits, folds=(Split(*parts),))
    splits.save(tmp_path / "splits.json")
    run = hg.train_head(
        cached,
        tmp_path / "run",
        seeds=(0, 1),
        dim=8,
        training=SHORT,
        split=str(tmp_path / "splits.json"),
    )
    assert run.saved_head.temperature == 1.0


def test_the_commands_have_the_same_seeds_as_the_library() -> None:
    from histograph_cli.flags import ExperimentFlags, parse_seeds

    seeds = ExperimentFlags().seeds
    assert seeds is not None
    assert tuple(parse_seeds(seeds)) == DEFAULT_SEEDS
