"""The results of an experiment: scores, differences, the chosen head and its predictions.

The seeds of each fold count averaged, as the run predicts.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from ..heads.registry import RIVALS, SIMPLE, is_solved
from ..metrics import (
    Difference,
    Key,
    paired_difference,
    resampled_interval,
    resampled_rows,
    summarize,
)
from ..runs.fits import Fit, distinct, named, outputs_by_fold, read_fit
from ..runs.predictions import (
    LabelRows,
    Predictions,
    calibration_error,
    fit_temperature,
    member_spread,
    prediction_columns,
)
from ..runs.records import head_entries
from ..runs.run import HEAD_CONFIG_NAME, HEAD_NAME, MODEL_NAME, PREDICTIONS_NAME, member_prefix
from ..runs.verdict import OWN, by_validation, verdict_of
from ..tasks import Task
from ..utils.files import copy_file, load_tensors, save_tensors, write_json, write_text

#: Bootstrap samples for an interval; fewer if there are many targets or folds to score in each.
_DRAWS = 1000
_FEWEST_DRAWS = 100
_DRAWN_COLUMNS = 5000

#: Rows of all draws together: more than 33,554 test rows are drawn less often.
_DRAWN_ROWS = 1 << 25

#: The readouts to beat, for graphs and for nodes and links: the last layer, retrained.
BASELINES = ("mean", "mlp")


def results(
    task: Task,
    fits: Sequence[Fit],
    chosen: str,
    own: Mapping[Key, float],
    averages: Averages,
    temperatures: Mapping[str, float],
) -> dict[str, Any]:
    """Return ``results.json``: the same on every run with the same seeds on the same machine.

    Args:
        own: The test score of the backbone's own readout, for every fold and seed.
    """
    metric = task.metric
    several_seeds = len({fit.spec.seed for fit in fits}) > 1
    rows: dict[str, Any] = {}
    if own:
        first = next(iter(own))[1]  # a checkpoint predicts the same whatever the seed of a head
        alike = all(own[fold, seed] == own[fold, first] for fold, seed in own)
        once = {key: score for key, score in own.items() if key[1] == first or not alike}
        rows[OWN] = {"test": _summary(once), "versus_own": None, "num_parameters": None}
    names = list(dict.fromkeys(fit.spec.name for fit in fits))
    names.sort(key=lambda name: name not in BASELINES)  # the baseline comes first
    baseline = next((name for name in BASELINES if name in names), None)
    simple = [name for name in rank_by_validation(task, averages, fits) if name in SIMPLE]
    for name in names:
        members = named(fits, name)
        test = scores_of(members, "test", metric)
        rival = next((other for other in simple if other != name), None)
        averaged = _averaged(averages, name, baseline, rival)
        difference = None if name == OWN else paired_difference(test, own)
        counted, spec = members, members[0].spec
        if name != OWN and not spec.stage and is_solved(spec.head, task.level):
            # Every seed has the same solution: it counts once in each fold.
            counted = [fit for fit in members if fit.spec.seed == members[0].spec.seed]
        rows[name] = {
            "test": _summary(scores_of(counted, "test", metric)),
            "valid": _summary(scores_of(counted, "valid", metric)),
            "versus_own": None if difference is None else difference.to_json(),
            "versus_baseline": _versus(fits, name, baseline, metric),
            "averaged": averaged,
            "num_parameters": members[0].num_parameters,
            **({"diverged": diverged} if (diverged := sum(f.diverged for f in members)) else {}),
            **({"compared_only": True} if name in RIVALS else {}),
            **({"simple": True} if name in SIMPLE else {}),
            **({"temperature": temperatures[name]} if name in temperatures else {}),
        }
        if not several_seeds:
            # The average is the only fit of a fold, so that its intervals hold for the fit.
            rows[name] |= {k: v for k, v in averaged.items() if k.startswith("versus")}
            rows[name]["averaged"] = None
    found = {
        "task": task.to_json(),
        "metric": metric,
        "higher_is_better": task.higher_is_better,
        "head": chosen,
        "labelled_rows": averages.labelled_rows,
        "readouts": rows,
        "versus_baseline": rows[chosen]["versus_baseline"],
    }
    verdict = verdict_of(found).to_json()
    return {**found, "verdict": verdict, "fits": [fit.to_json() for fit in fits]}


def rank_by_validation(task: Task, averages: Averages, fits: Sequence[Fit]) -> list[str]:
    """Return readouts from the best validation score to the worst, their seeds averaged."""
    scored: dict[str, tuple[float | None, int]] = {}
    for name, parameters in {fit.spec.name: fit.num_parameters for fit in fits}.items():
        scores = list(averages.scores(name, "valid").values())
        scored[name] = float(np.mean(scores)) if scores else None, parameters
    return by_validation(scored, higher=task.higher_is_better)


def best_by_validation(task: Task, averages: Averages, fits: Sequence[Fit]) -> str:
    """Return the readout that a comparison predicts with: the best one that is saved as a head.

    Without a validation part it is HistoGraph, or else the first.
    """
    saved = [fit for fit in fits if fit.spec.name not in RIVALS]
    saved.sort(key=lambda fit: fit.spec.name != "histograph")
    return rank_by_validation(task, averages, saved)[0]


def _averaged(
    averages: Averages, name: str, baseline: str | None, rival: str | None
) -> dict[str, Any]:
    """Return scores and differences of a readout with the seeds of each fold averaged."""
    own = None if name == OWN else averages.difference(name, OWN)
    return {
        "test": _summary(averages.scores(name)),
        "valid": _summary(averages.scores(name, "valid")),
        "versus_own": None if own is None else own.to_json(),
        "versus_baseline": averages.versus(name, baseline),
        "versus_rival": averages.versus(name, rival),
    }


def _versus(
    fits: Sequence[Fit], name: str, baseline: str | None, metric: str
) -> dict[str, Any] | None:
    """Return how much better the fits called ``name`` are than those called ``baseline``."""
    if baseline is None or baseline == name:
        return None
    scores = [scores_of(named(fits, which), "test", metric) for which in (name, baseline)]
    found = paired_difference(*scores)
    return None if found is None else {"baseline": baseline, **found.to_json()}


def scores_of(fits: Sequence[Fit], part: str, metric: str) -> dict[Key, float]:
    """Return the score of each fold and seed that has one."""
    return {
        (fit.spec.fold, fit.spec.seed): fit.scores[part][metric]
        for fit in fits
        if metric in fit.scores.get(part, {})
    }


def _summary(scores: Mapping[Key, float]) -> dict[str, Any] | None:
    found = summarize(list(scores.values()))
    return None if found is None else found.to_json()


def choose_fit(fits: Sequence[Fit], name: str, task: Task) -> Fit:
    """Return the fit of that name with the best validation score."""
    members = named(fits, name)
    if not members:
        raise ConfigError(f"head: found no fit of {name!r}")
    sign = 1 if task.higher_is_better else -1
    return max(
        members, key=lambda fit: sign * fit.scores.get("valid", {}).get(task.metric, -sign * np.inf)
    )


def write_chosen_head(
    folder: Path,
    best: Fit,
    members: Sequence[Fit],
    task: Task,
    target_names: Sequence[str],
    backbone: Mapping[str, Any],
    temperature: float,
) -> None:
    """Write the members' weights to one file, and ``head.json``, how to build and use them.

    Args:
        members: The fits whose mean the run predicts with.
        backbone: What :class:`~histograph_post.runs.saved_backbone.SavedBackbone` reads.
    """
    tensors: dict[str, Tensor] = {}
    for number, member in enumerate(members):
        found = load_tensors(folder / member.spec.folder / HEAD_NAME, "the weights of a head")
        prefix = member_prefix(number)
        tensors |= {f"{prefix}{name}": value for name, value in found.items()}
    save_tensors(folder / HEAD_NAME, tensors)
    source = folder / best.spec.folder
    if (source / MODEL_NAME).is_file():
        copy_file(source / MODEL_NAME, folder / MODEL_NAME)
    stored = head_entries(read_fit(source))
    entries = [head_entries(read_fit(folder / member.spec.folder)) for member in members]
    write_json(
        folder / HEAD_CONFIG_NAME,
        {
            "head": best.spec.head,
            **stored,
            "members": [
                {
                    name: value
                    for name, value in entry.items()
                    if name in ("fold", "seed") or value != stored[name]
                }
                for entry in entries
            ],
            "temperature": temperature,
            "task": task.to_json(),
            "target_names": list(target_names),
            "backbone": dict(backbone),
        },
    )


def write_predictions(
    folder: Path,
    fits: Sequence[Fit],
    name: str,
    task: Task,
    label_rows: LabelRows,
    temperature: float,
) -> None:
    """Write the predictions for the test rows of every fold, the seeds of a fold averaged."""
    targets = label_rows.target_names
    columns = [*prediction_columns(task, targets), *(f"label_{target}" for target in targets)]
    lines: list[list[str]] = [["id", "fold", *columns]]
    for outputs in outputs_by_fold(distinct(named(fits, name))):
        each = outputs.each / temperature  # [seeds, rows, out_dim]
        predictions = Predictions(
            task=task,
            target_names=targets,
            ids=[label_rows.names[row] for row in outputs.rows],
            rows=outputs.rows,
            outputs=each.mean(axis=0),
            spread=member_spread(task, each),
            labels=label_rows.labels[outputs.rows],
        )
        (_, *columns), *rows = predictions.csv_rows()
        lines[0] = ["id", "fold", *columns]  # with the spread of several seeds
        lines += [[row_id, str(outputs.fold), *cells] for row_id, *cells in rows]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_text(folder / PREDICTIONS_NAME, text.getvalue())


# --- the seeds of each fold averaged


class Averages:
    """The readouts of a run, the seeds of each fold averaged.

    Args:
        own: Outputs of the backbone's own readout for the test rows of each fold.
    """

    def __init__(
        self, task: Task, labels: np.ndarray, fits: Sequence[Fit], own: Mapping[int, np.ndarray]
    ) -> None:
        self.fits, self._task, self._labels = fits, task, labels
        self._resampled: dict[tuple[str, int], np.ndarray] = {}
        #: Part and readout -> the rows of each fold, and the mean outputs for them.
        self._outputs: dict[tuple[str, str], dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        test_rows = {fit.spec.fold: fit.test_rows for fit in fits if len(fit.test_rows)}
        self._num_folds = len(test_rows)
        self._outputs["test", OWN] = {fold: (test_rows[fold], own[fold]) for fold in own}
        for name in dict.fromkeys(fit.spec.name for fit in fits):
            for part in ("test", "valid"):
                found = outputs_by_fold(named(fits, name), part)
                self._outputs[part, name] = {each.fold: (each.rows, each.mean) for each in found}

    @property
    def labelled_rows(self) -> int:
        """Rows of any part that have a label: as many could be tested."""
        return int((~np.isnan(self._labels)).any(axis=1).sum())

    def scores(self, name: str, part: str = "test") -> dict[Key, float]:
        """Return the score of each fold that has one, with 0 as the seed."""
        found = {
            (fold, 0): self._task.score(outputs, self._labels[rows])
            for fold, (rows, outputs) in self._outputs.get((part, name), {}).items()
        }
        return {key: score for key, score in found.items() if score == score}

    def difference(self, name: str, other: str) -> Difference | None:
        """Return how much better one readout is than another on the test part.

        Paired over folds if there are several, with an interval over all test rows as well, else
        over the test rows of the only fold.
        """
        scores, others = self.scores(name), self.scores(other)
        found = paired_difference(scores, others)
        if found is None:
            return None
        folds = sorted(fold for fold, _ in scores.keys() & others.keys())
        drawn = [
            np.mean([self._drawn(each, fold) for fold in folds], axis=0) for each in (name, other)
        ]  # each [draws]
        interval = resampled_interval(*drawn)
        count = sum(len(self._outputs["test", name][fold][0]) for fold in folds)
        low, high = (None, None) if interval is None else interval
        if found.count == 1:
            return Difference(found.mean, low, high, count, "rows")
        if low is None or high is None:
            return found
        return replace(found, rows={"low": low, "high": high, "count": count})

    def versus(self, name: str, other: str | None) -> dict[str, Any] | None:
        """Return the difference to another readout as it is stored, if there is one."""
        if other is None or name in (other, OWN):
            return None
        found = self.difference(name, other)
        return None if found is None else {"baseline": other, **found.to_json()}

    def _drawn(self, name: str, fold: int) -> np.ndarray:
        """Return the scores of a readout on bootstrap samples of the test rows: ``[draws]``."""
        if (name, fold) not in self._resampled:
            own_rows, outputs = self._outputs["test", name][fold]
            labels = self._labels[own_rows]
            columns = labels.shape[1] * self._num_folds
            most = min(_DRAWN_COLUMNS // columns, _DRAWN_ROWS // max(1, len(outputs)))
            count = max(_FEWEST_DRAWS, min(_DRAWS, most))
            drawn = resampled_rows(len(outputs), count, fold)  # [draws, rows]
            self._resampled[name, fold] = self._task.resample(outputs, labels, drawn)
        return self._resampled[name, fold]

    def calibration(self, name: str, temperature: float) -> dict[str, Any] | None:
        """Return the calibration error on all test rows, before and after temperature scaling.

        None for a regression.
        """
        found = self._outputs.get(("test", name))
        if self._task.kind == "regression" or not found:
            return None
        labels = np.concatenate([self._labels[rows] for rows, _ in found.values()])
        logits = torch.from_numpy(np.concatenate([outputs for _, outputs in found.values()]))
        before, after = (
            calibration_error(self._task, self._task.probabilities(each).numpy(), labels)
            for each in (logits.double(), logits.double() / temperature)
        )
        return {"temperature": temperature, "test": {"before": before, "after": after}}


def temperature_of(
    task: Task, fits: Sequence[Fit], labels: np.ndarray, weights_of: Callable[[Fit], str]
) -> float:
    """Return the temperature of a readout, fitted on the validation rows of all folds together.

    It calibrates what the run predicts: the mean of the fits of a fold that share a backbone, by
    the hash of its weights.
    """
    groups: dict[str, list[Fit]] = {}
    for fit in fits:
        groups.setdefault(weights_of(fit), []).append(fit)
    found = [each for group in groups.values() for each in outputs_by_fold(group, "valid")]
    if not found:
        return 1.0
    truth = np.concatenate([labels[each.rows] for each in found])
    return fit_temperature(task, np.concatenate([each.mean for each in found]), truth)
