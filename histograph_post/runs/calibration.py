"""Calibration: whether what is called 80 % likely is right four times in five, and making it so.

One number does it: logits are divided by a temperature, which changes no order and no predicted
class. It is fitted on validation rows, never on test rows.
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


def fit_temperature(task: Task, outputs: np.ndarray, labels: np.ndarray) -> float:
    """Return the temperature at which these labels are likeliest; 1 where nothing can be fitted.

    Args:
        task: What is predicted; a regression has no probabilities, and temperature 1.
        outputs: Logits of validation rows, ``[rows, out_dim]``.
        labels: NaN where missing, ``[rows, targets]``.
    """
    if task.kind == "regression" or not has_labels(labels):
        return 1.0
    logits, targets = torch.from_numpy(outputs).double(), task.targets(labels)
    if targets.is_floating_point():
        targets = targets.double()

    def loss(logarithm: float) -> float:
        return float(task.loss(logits / np.exp(logarithm), targets))

    # The loss is convex in 1 / temperature: it has one minimum.
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
