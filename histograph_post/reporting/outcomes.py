"""What a run predicted for its test rows, read back for the report, and the readout to beat."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..experiments.results import BASELINES, OWN
from ..metrics import Key
from ..runs.fits import OUTPUTS_NAME
from ..runs.run import PREDICTIONS_NAME, Run


def readout_to_beat(run: Run) -> str | None:
    """Return the readout to beat: the retrained last layer, or the own one trained beside it."""
    names = (*BASELINES, OWN)
    return next((name for name in names if name in run.readouts and name != run.head), None)


@dataclass(frozen=True)
class Outcome:
    """What a readout said of the test rows of one fold and seed."""

    fold: int
    seed: int
    #: Number of each row among all label rows, ``[rows]``.
    rows: np.ndarray
    #: Name of each row.
    ids: Sequence[str]
    #: Probabilities, or values in the units of the labels: ``[rows, outputs]``.
    predicted: np.ndarray
    #: NaN where missing: ``[rows, targets]``.
    labels: np.ndarray


@lru_cache(maxsize=1)  # many figures of one report ask; a run is read once anyway
def chosen_outcomes(run: Run) -> list[Outcome]:
    """Return the chosen readout's predictions for the test rows of every fold and seed."""
    try:
        with (run.folder / PREDICTIONS_NAME).open(encoding="utf-8", newline="") as file:
            _, *lines = csv.reader(file)
    except (FileNotFoundError, ValueError):
        return []
    groups: dict[Key, list[list[str]]] = {}
    for line in lines:
        groups.setdefault((int(line[1]), int(line[2])), []).append(line)
    num_targets = run.task.num_targets
    # id, fold, seed, (class,) predictions, labels
    first = 4 if run.task.kind in ("binary", "multiclass") else 3
    return [
        Outcome(
            fold=fold,
            seed=seed,
            rows=run.splits.folds[fold].test,
            ids=[line[0] for line in members],
            predicted=_numbers([line[first:-num_targets] for line in members]),
            labels=_numbers([line[-num_targets:] for line in members]),
        )
        for (fold, seed), members in groups.items()
    ]


def outcomes_of(run: Run, readout: str) -> list[Outcome]:
    """Return the same of another readout, as far as its fits are still there."""
    if readout == run.head:
        return chosen_outcomes(run)
    found = []
    for outcome in chosen_outcomes(run):
        path = run.fit_folder(readout, outcome.fold, outcome.seed) / OUTPUTS_NAME
        try:
            stored = load_file(path)
        except (OSError, SafetensorError):
            continue
        outputs = torch.from_numpy(stored["outputs"]).double()  # [rows, outputs]
        if np.array_equal(stored["rows"], outcome.rows):
            found.append(replace(outcome, predicted=run.task.probabilities(outputs).numpy()))
    return found


def _numbers(cells: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) if cell else np.nan for cell in row] for row in cells])
