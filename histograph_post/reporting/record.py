"""A finished run as a report reads it: its files, and nothing else that may have moved."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file

from ..errors import ConfigError
from ..experiments.results import OWN
from ..metrics import Key
from ..runs.fits import OUTPUTS_NAME
from ..runs.run import FITS_NAME, METRICS_NAME, PREDICTIONS_NAME, SPLITS_NAME
from ..runs.saved_head import SavedHead
from ..runs.summary import RunSummary
from ..splits import Splits
from ..tasks import Task


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


class RunRecord(RunSummary):
    """A run folder with everything in it that a report shows."""

    @cached_property
    def task(self) -> Task:
        """What is predicted."""
        return Task.from_json(dict(self.results["task"]))

    @property
    def readouts(self) -> list[str]:
        """Every readout that was trained, in the order of the run."""
        return list(dict.fromkeys(fit["head"] for fit in self.results["fits"]))

    @cached_property
    def baseline(self) -> str | None:
        """The readout to beat: the retrained last layer, or the own readout trained beside it."""
        names = ("mean", "mlp", OWN)
        return next((name for name in names if name in self.readouts and name != self.head), None)

    @cached_property
    def saved(self) -> SavedHead:
        """The head that was chosen."""
        return SavedHead.read(self.folder)

    @cached_property
    def chosen(self) -> Key:
        """Fold and seed of the head that was chosen."""
        return int(self.stored_head["fold"]), int(self.stored_head["seed"])

    @cached_property
    def splits(self) -> Splits:
        """Which rows trained, validated and tested."""
        return Splits.load(self.folder / SPLITS_NAME)

    @cached_property
    def log(self) -> list[dict[str, Any]]:
        """A line per epoch of every fit."""
        path = self.folder / METRICS_NAME
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            return [json.loads(line) for line in lines if line.strip()]
        except FileNotFoundError:
            return []
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: not a file of JSON lines ({error})") from None

    def scores(self, head: str, part: str, metric: str | None = None) -> dict[Key, float]:
        """Return the score of each fold and seed that has one."""
        metric = metric or self.results["metric"]
        return {
            (fit["fold"], fit["seed"]): fit["scores"][part][metric]
            for fit in self.results["fits"]
            if fit["head"] == head and metric in fit["scores"].get(part, {})
        }

    def fit_folder(self, head: str, fold: int, seed: int) -> Path:
        """Return where one fit is kept."""
        return self.folder / FITS_NAME / head.replace(" ", "-") / f"fold-{fold}-seed-{seed}"

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """The chosen readout's predictions for the test rows of every fold and seed."""
        path = self.folder / PREDICTIONS_NAME
        try:
            with path.open(encoding="utf-8", newline="") as file:
                _, *lines = csv.reader(file)
        except (FileNotFoundError, ValueError):
            return []
        groups: dict[Key, list[list[str]]] = {}
        for line in lines:
            groups.setdefault((int(line[1]), int(line[2])), []).append(line)
        num_targets = self.task.num_targets
        # id, fold, seed, (class,) predictions, labels
        first = 4 if self.task.kind in ("binary", "multiclass") else 3
        return [
            Outcome(
                fold=fold,
                seed=seed,
                rows=self.splits.folds[fold].test,
                ids=[line[0] for line in members],
                predicted=_numbers([line[first:-num_targets] for line in members]),
                labels=_numbers([line[-num_targets:] for line in members]),
            )
            for (fold, seed), members in groups.items()
        ]

    def outcomes_of(self, head: str) -> list[Outcome]:
        """Return the same of another readout, as far as its fits are still there."""
        if head == self.head:
            return self.outcomes
        found = []
        for outcome in self.outcomes:
            path = self.fit_folder(head, outcome.fold, outcome.seed) / OUTPUTS_NAME
            try:
                stored = load_file(path)
            except (OSError, SafetensorError):
                continue
            outputs = torch.from_numpy(stored["outputs"]).double()  # [rows, outputs]
            if np.array_equal(stored["rows"], outcome.rows):
                predicted = self.task.probabilities(outputs).numpy()
                found.append(
                    Outcome(
                        outcome.fold,
                        outcome.seed,
                        outcome.rows,
                        outcome.ids,
                        predicted,
                        outcome.labels,
                    )
                )
        return found


def _numbers(cells: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) if cell else np.nan for cell in row] for row in cells])
