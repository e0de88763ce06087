"""From the stored outputs of fits: how many seeds to average, and when to calibrate.

Both are measured on validation rows, to choose defaults by; of inner splits, on the half of them
that is scored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch

import histograph_post as hg
from histograph_post.runs.fits import OUTPUTS_NAME
from histograph_post.runs.predictions import EXPECTED_SPREAD, calibration_error, fit_temperature
from histograph_post.tasks import Task
from histograph_post.utils.files import load_arrays

from .page import CHOSEN, markdown, signed
from .ranking import Part

#: Seeds that are averaged, and validation rows that a temperature is fitted on.
SEEDS = (1, 2, 3, 5, 8)
ROWS = (8, 15, 30, 60, 120, 250)

#: Draws of those rows from every validation part.
_DRAWS = 6


@dataclass(frozen=True)
class Outputs:
    """The outputs of all seeds of a readout on one part of a fold."""

    #: Name of the cell and the fold.
    unit: str
    task: Task
    #: ``[rows, targets]``.
    labels: np.ndarray
    #: ``[seeds, rows, out_dim]``.
    each: np.ndarray


def read_outputs(out: Path, part: Part, readout: str | None = None) -> Iterator[Outputs]:
    """Read the outputs of every run of a study, of all readouts or of one."""
    prefix = "valid_" if part == "valid" else ""
    for folder in sorted(path.parent for path in (out / "runs").rglob("results.json")):
        run = hg.Run.open(folder)
        labels = hg.Cache.open(run.backbone.cache).labels()
        for name in dict.fromkeys(fit["head"] for fit in run.results["fits"]):
            if readout not in (None, name):
                continue
            keys = [(f["fold"], f["seed"]) for f in run.results["fits"] if f["head"] == name]
            fits = [load_arrays(run.fit_folder(name, *key) / OUTPUTS_NAME) for key in keys]
            each = np.stack([fit[f"{prefix}outputs"] for fit in fits])
            unit = str(folder.parent.relative_to(out / "runs"))
            yield Outputs(unit, run.task, labels[fits[0][f"{prefix}rows"]], each)


def seeds_view(out: Path, part: Part) -> str:
    """Return what averaging more seeds gains, as the mean over all subsets of that size."""
    gains: dict[tuple[str, bool], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for found in read_outputs(out, part, CHOSEN):
        if len(found.each) < max(SEEDS):
            continue
        higher = found.task.higher_is_better
        cell = found.unit.rpartition("/")[0]
        scores = {count: _averaged(found, count) for count in SEEDS}
        for count, score in scores.items():
            gain = (score - scores[1]) * (100 if higher else -1)
            gains[cell, higher][count].append(gain)
    header = ["cell", "folds", *(f"{count} seeds" for count in SEEDS[1:])]
    lines = [header, ["relative time", "", *(f"{count}" for count in SEEDS[1:])]]
    for (cell, higher), by_count in sorted(gains.items()):
        figures = [signed(float(np.mean(by_count[k])), 2 if higher else 4) for k in SEEDS[1:]]
        lines.append([cell, str(len(by_count[1])), *figures])
    return (
        f"What the mean of several seeds of `{CHOSEN}` gains over one seed on validation rows, in "
        f"points of ROC-AUC or accuracy, or in RMSE\n\n{markdown(lines)}\n"
    )


def _averaged(found: Outputs, count: int) -> float:
    """Return the score of ``count`` averaged seeds, as the mean over all subsets of that size."""
    choices = combinations(range(len(found.each)), count)
    means = (found.each[list(chosen)].mean(axis=0) for chosen in choices)  # [rows, out_dim] each
    return float(np.mean([found.task.score(mean, found.labels) for mean in means]))


def calibration_view(out: Path, part: Part) -> str:
    """Return what a temperature fitted on some validation rows does to the others."""
    rules = {"none": None, "as fitted": math.inf, "shrunk": EXPECTED_SPREAD}
    measured: dict[tuple[int, str], list[Sequence[float]]] = defaultdict(list)
    random = np.random.default_rng(0)
    for found in read_outputs(out, part):
        if found.task.kind == "regression":
            continue
        logits = found.each.mean(axis=0).astype(np.float64)  # [rows, out_dim]
        for count in ROWS:
            if 2 * count > len(logits):
                continue
            for _ in range(_DRAWS):
                order = random.permutation(len(logits))
                fitted, judged = order[:count], order[count:]
                for name, spread in rules.items():
                    temperature = 1.0
                    if spread is not None:
                        temperature = fit_temperature(
                            found.task, logits[fitted], found.labels[fitted], spread=spread
                        )
                    measured[count, name].append(
                        _judge(found.task, logits[judged] / temperature, found.labels[judged])
                    )
    lines = [
        ["rows", "draws", *(f"{what}, {name}" for what in ("loss", "error") for name in rules)]
    ]
    for count in ROWS:
        if (count, "none") in measured:
            means = [np.nanmean(measured[count, name], axis=0) for name in rules]  # [loss, error]
            figures = [f"{mean[column]:.3f}" for column in (0, 1) for mean in means]
            lines.append([str(count), str(len(measured[count, "none"])), *figures])
    return (
        "Log loss and expected calibration error of validation rows, without a temperature and "
        f"with one from other validation rows of the same fold\n\n{markdown(lines)}\n"
    )


def _judge(task: Task, logits: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """Return the mean loss of labelled rows, and the expected calibration error."""
    outputs, targets = torch.from_numpy(logits), task.targets(labels)
    if targets.is_floating_point():
        targets = targets.double()
    error = calibration_error(task, task.probabilities(outputs).numpy(), labels)
    return float(task.loss(outputs, targets)), math.nan if error is None else error
