"""What an experiment gives: scores, differences, the chosen head and its predictions."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .errors import ConfigError
from .files import atomic_path, write_json, write_text
from .fits import FIT_NAME, Fit
from .run import HEAD_CONFIG_NAME, HEAD_NAME, PREDICTIONS_NAME
from .summaries import Key, paired_difference, summarize
from .tasks import Task, infer_task

if TYPE_CHECKING:
    from .head_training import Experiment
    from .storage import Cache

#: The checkpoint's own readout, in tables and results.
OWN = "own readout"


def results(experiment: Experiment, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
    """Return ``results.json``: the same on every run with the same seeds on the same machine."""
    metric = experiment.task.metric
    own = own_scores(experiment)
    rows: dict[str, Any] = {}
    if own:
        rows[OWN] = {"test": _summary(own), "versus_own": None, "num_parameters": None}
    for head in dict.fromkeys(fit.spec.head for fit in fits):
        members = [fit for fit in fits if fit.spec.head == head]
        test = scores_of(members, "test", metric)
        difference = paired_difference(test, own)
        rows[head] = {
            "test": _summary(test),
            "valid": _summary(scores_of(members, "valid", metric)),
            "versus_own": None if difference is None else difference.to_json(),
            "num_parameters": members[0].num_parameters,
        }
    baseline = next((head for head in ("mean", "mlp") if head in rows and head != chosen), None)
    versus = None
    if baseline is not None and chosen in rows:
        both = [
            scores_of([fit for fit in fits if fit.spec.head == head], "test", metric)
            for head in (chosen, baseline)
        ]
        found = paired_difference(*both)
        versus = None if found is None else {"baseline": baseline, **found.to_json()}
    return {
        "task": experiment.task.to_json(),
        "metric": metric,
        "higher_is_better": experiment.task.higher_is_better,
        "head": chosen,
        "readouts": rows,
        "versus_baseline": versus,
        "fits": [fit.to_json() for fit in fits],
    }


def scores_of(fits: Sequence[Fit], part: str, metric: str) -> dict[Key, float]:
    """Return the score of each fold and seed that has one."""
    return {
        (fit.spec.fold, fit.spec.seed): fit.scores[part][metric]
        for fit in fits
        if metric in fit.scores.get(part, {})
    }


def own_scores(experiment: Experiment) -> dict[Key, float]:
    """Return the test score of the checkpoint's own readout, for every fold and seed."""
    task = experiment.task
    found: dict[Key, float] = {}
    for fold in experiment.folds:
        logits = fold.loaded.own_logits(task)
        if logits is None or not len(fold.split.test):
            continue
        rows = fold.split.test
        score = task.score(logits[rows], fold.loaded.labels[rows])
        if score == score:
            found |= {(fold.number, seed): score for seed in experiment.seeds}
    return found


def _summary(scores: Mapping[Key, float]) -> dict[str, Any] | None:
    found = summarize(list(scores.values()))
    return None if found is None else found.to_json()


def choose_fit(fits: Sequence[Fit], head: str, task: Task) -> Fit:
    """Return the fit of a readout with the best validation score: what the run predicts with."""
    members = [fit for fit in fits if fit.spec.head == head]
    if not members:
        raise ConfigError(f"head: found no fit of {head!r}")
    sign = 1 if task.higher_is_better else -1
    return max(
        members, key=lambda fit: sign * fit.scores.get("valid", {}).get(task.metric, -sign * np.inf)
    )


def write_chosen_head(folder: Path, best: Fit, experiment: Experiment) -> None:
    """Copy the best fit's weights to the top of the run, and say how to build and use them."""
    source = folder / best.spec.folder
    with atomic_path(folder / HEAD_NAME) as partial:
        shutil.copyfile(source / HEAD_NAME, partial)
    stored = json.loads((source / FIT_NAME).read_text(encoding="utf-8"))
    cache = experiment.folds[best.spec.fold].loaded.cache
    write_json(
        folder / HEAD_CONFIG_NAME,
        {
            "head": best.spec.head,
            "fold": best.spec.fold,
            "seed": best.spec.seed,
            "config": stored["config"],
            "standardize": stored["standardize"],
            "target_scale": stored["target_scale"],
            "task": experiment.task.to_json(),
            "target_names": list(cache.manifest.layout.target_names),
            "backbone": {
                "weights_sha256": cache.weights_sha256,
                "checkpoint": cache.manifest.checkpoint,
                "model": {
                    "spec": cache.manifest.model.spec,
                    "args": dict(cache.manifest.model.args),
                    "out_dim": _labels_width(cache),
                },
                "data": {
                    "spec": cache.manifest.data.spec,
                    "args": dict(cache.manifest.data.args),
                    "fingerprint": cache.manifest.data.fingerprint,
                },
                "capture": cache.manifest.capture,
                "cache": _place(cache.path, folder),
            },
        },
    )


def _labels_width(cache: Cache) -> int | None:
    """Return what a model whose constructor insists on a number of outputs was built with."""
    level = cache.manifest.layout.level
    return None if level == "link" else infer_task(cache.labels(), level).out_dim


def _place(path: Path, folder: Path) -> str:
    """Return where a path is as seen from a folder: they may move together."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on another drive
        return path.resolve().as_posix()


def prediction_columns(task: Task, target_names: Sequence[str]) -> list[str]:
    """Return the columns that a prediction fills."""
    if task.kind == "multiclass":
        return ["class", *(f"p_{value:g}" for value in task.classes)]
    if task.kind == "binary":
        return ["class", f"p_{task.classes[1]:g}"]
    if task.kind == "multilabel":
        return [f"p_{name}" for name in target_names]
    return list(target_names)


def prediction_cells(task: Task, outputs: np.ndarray) -> list[list[str]]:
    """Return a prediction per row: the class and its probabilities, or the values."""
    probabilities = task.probabilities(torch.from_numpy(outputs).double()).numpy()
    numbers = [[f"{value:.6g}" for value in row] for row in probabilities]
    if task.kind == "multiclass":
        chosen = probabilities.argmax(axis=1)
    elif task.kind == "binary":
        chosen = (probabilities[:, 0] > 0.5).astype(int)
    else:
        return numbers
    return [[f"{task.classes[c]:g}", *cells] for c, cells in zip(chosen, numbers, strict=True)]


def row_names(ids: Sequence[str], label_ptr: np.ndarray, level: str) -> list[str]:
    """Return a name per label row: the graph's id, with the row's number where it has several."""
    if level == "graph":
        return list(ids)
    return [
        f"{name}:{row}"
        for name, rows in zip(ids, np.diff(label_ptr), strict=True)
        for row in range(rows)
    ]


def write_predictions(folder: Path, fits: Sequence[Fit], head: str, experiment: Experiment) -> None:
    """Write the outputs of a readout for the test rows of every fold and seed."""
    task = experiment.task
    cache = experiment.caches[0]
    names = row_names(cache.ids(), cache.label_ptr, task.level)
    labels = experiment.folds[0].loaded.labels
    targets = list(cache.manifest.layout.target_names)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    labelled = [f"label_{name}" for name in targets]
    writer.writerow(["id", "fold", "seed", *prediction_columns(task, targets), *labelled])
    for fit in fits:
        if fit.spec.head != head:
            continue
        cells = prediction_cells(task, fit.test_outputs)
        for row, predicted in zip(fit.test_rows, cells, strict=True):
            truth = ["" if value != value else f"{value:g}" for value in labels[row]]
            writer.writerow([names[row], fit.spec.fold, fit.spec.seed, *predicted, *truth])
    write_text(folder / PREDICTIONS_NAME, text.getvalue())
