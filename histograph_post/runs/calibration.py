"""Calibration: whether what is called 80 % likely is right four times in five, and making it so.

One number does it: logits are divided by a temperature, which changes no order and no predicted
class. It is fitted on validation rows, never on test rows, and few of them move it little.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import minimize_scalar

from ..metrics import expected_calibration_error
from ..tasks import Task, has_labels

#: The lowest and the highest temperature. Validation parts that are small and all right would ask
#: for certainty (0), and those that are all wrong for none at all (infinity).
TEMPERATURES = (0.25, 20.0)

#: How far the logarithm of a temperature is expected to be from 0, before any row is seen. Fitted
#: without it, temperatures of fewer than a hundred validation rows do harm; see docs/results.md.
EXPECTED_SPREAD = 0.3


def fit_temperature(
    task: Task, outputs: np.ndarray, labels: np.ndarray, *, spread: float = EXPECTED_SPREAD
) -> float:
    """Return the likeliest temperature given these labels; 1 where nothing can be fitted.

    It minimises the loss, summed over the rows, plus ``log(temperature)^2 / (2 spread^2)``.

    Args:
        task: What is predicted; a regression has no probabilities, and temperature 1.
        outputs: Logits of validation rows, ``[rows, out_dim]``.
        labels: NaN where missing, ``[rows, targets]``.
        spread: The expected one of its logarithm; infinity leaves all to the labels.
    """
    if task.kind == "regression" or not has_labels(labels):
        return 1.0
    rows = int((~np.isnan(labels)).any(axis=1).sum())
    logits, targets = torch.from_numpy(outputs).double(), task.targets(labels)
    if targets.is_floating_point():
        targets = targets.double()

    def loss(logarithm: float) -> float:
        penalty = logarithm**2 / (2 * spread**2)
        return rows * float(task.loss(logits / np.exp(logarithm), targets)) + penalty

    found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded")
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0


def confidences(
    task: Task, probabilities: np.ndarray, labels: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return how sure each prediction was and whether it was right, for every target.

    Args:
        task: What is predicted: binary, multi-class or multi-label.
        probabilities: ``[rows, out_dim]``.
        labels: NaN where missing, ``[rows, targets]``; rows without a label are left out.
    """
    found = []
    for target in range(labels.shape[1]):
        present = ~np.isnan(labels[:, target])
        truth = labels[present, target]
        if task.kind == "multiclass":
            sure, chosen = probabilities[present].max(axis=1), probabilities[present].argmax(axis=1)
        else:
            second = probabilities[present, target]  # [rows]
            sure, chosen = np.maximum(second, 1 - second), (second > 0.5).astype(int)
        classes = np.array(task.classes or (0.0, 1.0))
        found.append((sure, classes[chosen] == truth))
    return found


def calibration_error(task: Task, probabilities: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the expected calibration error, the mean over targets; None without labels."""
    pairs: Sequence[tuple[np.ndarray, np.ndarray]] = confidences(task, probabilities, labels)
    errors = [expected_calibration_error(sure, right) for sure, right in pairs if len(sure)]
    return float(np.mean(errors)) if errors else None
