"""Temperatures and calibration errors, against a grid and definitions written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from histograph_post.metrics import expected_calibration_error
from histograph_post.runs.predictions import (
    EXPECTED_SPREAD,
    TEMPERATURES,
    calibration_error,
    fit_temperature,
)
from histograph_post.tasks import Task

TASKS = {
    "binary": Task("binary", "graph", 1, "accuracy", (2.0, 5.0)),
    "multiclass": Task("multiclass", "graph", 1, "accuracy", (0.0, 1.0, 4.0)),
    "multilabel": Task("multilabel", "graph", 3, "roc_auc"),
}


def overconfident(kind: str, factor: float, rows: int = 600) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are ``factor`` times too large for the labels; some labels are missing."""
    task, random = TASKS[kind], np.random.default_rng(1)
    logits = random.normal(size=(rows, task.out_dim))
    probabilities = task.probabilities(torch.from_numpy(logits)).numpy()
    if kind == "multiclass":
        drawn = [random.choice(task.classes, p=row) for row in probabilities]
        labels = np.array(drawn)[:, None]
    else:
        drawn = (random.random(probabilities.shape) < probabilities).astype(int)
        labels = np.array(task.classes or (0.0, 1.0))[drawn]
    labels[random.random(labels.shape) < 0.2] = np.nan
    return factor * logits, labels


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("factor", [0.5, 1.0, 4.0])
def test_the_temperature_is_the_best_of_a_grid(kind: str, factor: float) -> None:
    task = TASKS[kind]
    logits, labels = overconfident(kind, factor)
    targets = task.targets(labels)
    grid = np.exp(np.linspace(*np.log(TEMPERATURES), 2001))
    losses = [float(task.loss(torch.from_numpy(logits / t).float(), targets)) for t in grid]
    found = fit_temperature(task, logits, labels, spread=math.inf)
    assert found == pytest.approx(grid[int(np.argmin(losses))], rel=0.01)
    assert found == pytest.approx(factor, rel=0.25)  # what was done to the logits is undone
    before, after = (
        calibration_error(task, task.probabilities(torch.from_numpy(each)).numpy(), labels)
        for each in (logits, logits / found)
    )
    assert before is not None
    assert after is not None
    if factor > 1:
        assert after < before / 2


def test_a_temperature_stays_within_bounds() -> None:
    task = TASKS["binary"]
    labels = np.array([[2.0], [5.0]] * 5)
    sure = np.array([[-1.0], [1.0]] * 5)  # all right, then all wrong
    for logits, expected in ((sure, TEMPERATURES[0]), (-sure, TEMPERATURES[1])):
        found = fit_temperature(task, logits, labels, spread=math.inf)
        assert found == pytest.approx(expected, rel=1e-3)


def test_few_rows_move_the_temperature_little() -> None:
    # Logits of 2 that are right three times in four: of many rows the temperature is that at which
    # 2 / T is the logit of 3/4. Of n rows its logarithm l balances the slope of their loss,
    # u (p - sigmoid(u)) each with u = 2 / T, against l / spread^2.
    task = TASKS["binary"]
    found = []
    for times in (1, 10, 10_000):
        labels = np.array([[5.0], [5.0], [5.0], [2.0]] * times)
        found.append(fit_temperature(task, np.full((4 * times, 1), 2.0), labels))
        scaled, share = 2 / found[-1], 3 / 4
        slope = 4 * times * scaled * (share - 1 / (1 + math.exp(-scaled)))
        assert slope == pytest.approx(-math.log(found[-1]) / EXPECTED_SPREAD**2, rel=1e-2)
    assert 1 < found[0] < 1.1 < found[1] < found[2]
    assert found[2] == pytest.approx(2 / math.log(3), rel=1e-3)


def test_rows_without_a_label_count_for_nothing() -> None:
    task, logits = TASKS["multilabel"], np.full((8, 3), 3.0)
    labels = np.array([[1.0, np.nan, 0.0], [0.0, 1.0, 1.0]] * 4)
    more = np.vstack([labels, np.full((50, 3), np.nan)])
    expected = fit_temperature(task, logits, labels)
    assert fit_temperature(task, np.full((58, 3), 3.0), more) == pytest.approx(expected)


@pytest.mark.parametrize("rows", [0, 5])
def test_nothing_is_fitted_without_labels_or_to_a_regression(rows: int) -> None:
    nothing = np.full((rows, 1), np.nan)
    assert fit_temperature(TASKS["binary"], np.zeros((rows, 1)), nothing) == 1.0
    regression = Task("regression", "graph", 1, "rmse")
    assert fit_temperature(regression, np.ones((4, 1)), np.ones((4, 1))) == 1.0


def test_the_error_of_several_targets_is_the_mean_of_theirs() -> None:
    task = TASKS["multilabel"]
    logits, labels = overconfident("multilabel", 2.0, rows=50)
    probabilities = task.probabilities(torch.from_numpy(logits)).numpy()
    errors: list[Any] = []
    for target in range(3):
        rows = ~np.isnan(labels[:, target])
        p, truth = probabilities[rows, target], labels[rows, target]
        errors.append(expected_calibration_error(np.maximum(p, 1 - p), (p > 0.5) == truth))
    assert calibration_error(task, probabilities, labels) == pytest.approx(np.mean(errors))
    assert calibration_error(task, probabilities, np.full_like(labels, np.nan)) is None
