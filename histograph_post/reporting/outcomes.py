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
from ..runs.fits import OUTPUTS_NAME
from ..runs.run import PREDICTIONS_NAME, Run


def readout_to_beat(run: Run) -> str | None:
    """Return the readout to beat: the retrained last layer, or the own one trained beside it."""
    names = (*BASELINES, OWN)
    return next((name for name in names if name in run.readouts and name != run.head), None)


@dataclass(frozen=True)
class Outcome:
    """What a readout said of the test rows of one fold."""

    fold: int
    #: The seeds whose outputs were averaged.
    seeds: tuple[int, ...]
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
    """Return the chosen readout's predictions for the test rows of every fold.

    Runs of earlier versions have them for every seed by itself.
    """
    try:
        with (run.folder / PREDICTIONS_NAME).open(encoding="utf-8", newline="") as file:
            columns, *lines = csv.reader(file)
    except (FileNotFoundError, ValueError):
        return []
    seeds: dict[int, list[int]] = {}
    for fit in run.results["fits"]:
        if fit["head"] == run.head:
            seeds.setdefault(fit["fold"], []).append(fit["seed"])
    has_seeds = columns[2] == "seed"
    groups: dict[tuple[int, tuple[int, ...]], list[list[str]]] = {}
    for line in lines:
        fold = int(line[1])
        averaged = (int(line[2]),) if has_seeds else tuple(seeds.get(fold, ()))
        groups.setdefault((fold, averaged), []).append(line)
    num_targets, width = run.task.num_targets, run.task.out_dim
    # id, fold, (seed,) (class,) predictions, (spread,) labels
    first = 2 + has_seeds + (run.task.kind in ("binary", "multiclass"))
    return [
        Outcome(
            fold=fold,
            seeds=averaged,
            rows=run.splits.folds[fold].test,
            ids=[line[0] for line in members],
            predicted=_numbers([line[first : first + width] for line in members]),
            labels=_numbers([line[-num_targets:] for line in members]),
        )
        for (fold, averaged), members in groups.items()
    ]


def outcomes_of(run: Run, readout: str) -> list[Outcome]:
    """Return the same of another readout, as far as its fits are still there."""
    if readout == run.head:
        return chosen_outcomes(run)
    found = []
    for outcome in chosen_outcomes(run):
        each = []
        for seed in outcome.seeds:
            try:
                stored = load_file(run.fit_folder(readout, outcome.fold, seed) / OUTPUTS_NAME)
            except (OSError, SafetensorError):
                continue
            if np.array_equal(stored["rows"], outcome.rows):
                each.append(torch.from_numpy(stored["outputs"]).double())  # [rows, outputs]
        if each:
            predicted = run.task.probabilities(torch.stack(each).mean(dim=0)).numpy()
            found.append(replace(outcome, predicted=predicted))
    return found


def _numbers(cells: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) if cell else np.nan for cell in row] for row in cells])
