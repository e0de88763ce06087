"""What an experiment gives: scores, differences, the chosen head and its predictions.

The fits of one readout that differ in their seed alone predict together, by their mean.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from ..runs.fits import Fit, read_fit
from ..runs.predictions import (
    LabelRows,
    calibration_error,
    fit_temperature,
    member_spread,
    number_cells,
    prediction_cells,
    prediction_columns,
    spread_columns,
)
from ..runs.run import (
    HEAD_CONFIG_NAME,
    HEAD_NAME,
    MODEL_NAME,
    PREDICTIONS_NAME,
    member_prefix,
)
from ..runs.verdict import OWN as OWN
from ..runs.verdict import verdict_of
from ..tasks import Task
from ..utils.files import copy_file, write_json, write_text
from ..utils.tensors import load_tensors, save_tensors

#: Draws of test rows for an interval; fewer where there are many targets or folds to score in each.
_DRAWS = 1000
_FEWEST_DRAWS = 100
_DRAWN_COLUMNS = 5000

#: Rows of all draws together: more than 33,554 test rows are drawn less often.
_DRAWN_ROWS = 1 << 25


@dataclass(frozen=True)
class FoldOutputs:
    """What the fits of one fold say of the rows of a part."""

    fold: int
    #: Label rows of the part, ``[rows]``.
    rows: np.ndarray
    #: Outputs of every fit, in the units of the labels: ``[fits, rows, out_dim]``.
    each: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """The mean over the fits: ``[rows, out_dim]``."""
        return self.each.mean(axis=0)


def outputs_on_test(fits: Sequence[Fit]) -> list[FoldOutputs]:
    """Return what the seeds of each fold say of its test rows."""
    return _by_fold(fits, lambda fit: (fit.test_rows, fit.test_outputs))


def outputs_on_valid(fits: Sequence[Fit]) -> list[FoldOutputs]:
    """Return what the seeds of each fold say of its validation rows; not of earlier versions."""
    return _by_fold(fits, lambda fit: (fit.valid_rows, fit.valid_outputs))


def _by_fold(
    fits: Sequence[Fit], part: Callable[[Fit], tuple[np.ndarray, np.ndarray]]
) -> list[FoldOutputs]:
    found = []
    for fold in dict.fromkeys(fit.spec.fold for fit in fits):
        parts = [part(fit) for fit in fits if fit.spec.fold == fold]
        rows = parts[0][0]
        # A fit of an earlier version lacks the validation part.
        each = [outputs for own_rows, outputs in parts if np.array_equal(own_rows, rows)]
        if len(rows):
            found.append(FoldOutputs(fold, rows, np.stack(each)))
    return found


def members_with(best: Fit, fits: Sequence[Fit], weights_of: Callable[[Fit], str]) -> list[Fit]:
    """Return the fits that predict together with the best one, those of a fold together.

    They are all fits of its readout that read exactly its backbone: other weights give other
    activations, which would need a backbone of their own to run beside it.

    Args:
        best: The fit that was chosen.
        fits: Every fit of the run.
        weights_of: The hash of the backbone that a fit reads.
    """
    own = weights_of(best)
    named = [fit for fit in fits if fit.spec.name == best.spec.name and weights_of(fit) == own]
    named.sort(key=lambda fit: fit is not best)
    return sorted(distinct(named), key=lambda fit: (fit.spec.fold, fit.spec.seed))


def distinct(fits: Sequence[Fit]) -> list[Fit]:
    """Return fits of one readout that differ: of one that is solved, the first of each fold.

    A solution does not depend on the seed, and five times the same is no better than once.
    """
    found: list[Fit] = []
    for fit in fits:
        folds = {other.spec.fold for other in found}
        if fit.strength is None or fit.spec.fold not in folds:
            found.append(fit)
    return found


class Averages:
    """The readouts of a run, the seeds of each fold averaged, scored on the test part.

    Args:
        task: What is predicted.
        labels: Of all rows, ``[rows, targets]``.
        fits: Every fit of the run.
        own: Outputs of the backbone's own readout for the test rows of each fold.
    """

    def __init__(
        self, task: Task, labels: np.ndarray, fits: Sequence[Fit], own: Mapping[int, np.ndarray]
    ) -> None:
        self._task, self._labels = task, labels
        self._rows: dict[int, np.ndarray] = {}
        self._outputs: dict[str, dict[int, np.ndarray]] = {OWN: dict(own)}
        self._on_valid: dict[str, list[FoldOutputs]] = {}
        self._resampled: dict[tuple[str, int], np.ndarray] = {}
        for name in dict.fromkeys(fit.spec.name for fit in fits):
            members = [fit for fit in fits if fit.spec.name == name]
            found = outputs_on_test(members)
            self._outputs[name] = {outputs.fold: outputs.mean for outputs in found}
            self._rows |= {outputs.fold: outputs.rows for outputs in found}
            self._on_valid[name] = outputs_on_valid(members)

    def scores(self, name: str) -> dict[Key, float]:
        """Return the test score of each fold that has one, under its fold and 0 for the seed."""
        return self._scored(
            (fold, self._rows[fold], outputs)
            for fold, outputs in self._outputs.get(name, {}).items()
        )

    def valid_scores(self, name: str) -> dict[Key, float]:
        """Return the same of the validation part, by which readouts are ranked and chosen."""
        return self._scored(
            (outputs.fold, outputs.rows, outputs.mean) for outputs in self._on_valid.get(name, ())
        )

    def _scored(self, parts: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> dict[Key, float]:
        found = {
            (fold, 0): self._task.score(outputs, self._labels[rows])
            for fold, rows, outputs in parts
        }
        return {key: score for key, score in found.items() if score == score}

    def difference(self, name: str, other: str) -> Difference | None:
        """Return how much better one readout is than another.

        Paired over folds where there are several, with the interval over all test rows beside it,
        else over the test rows of the only one.
        """
        scores, others = self.scores(name), self.scores(other)
        found = paired_difference(scores, others)
        if found is None:
            return None
        folds = sorted(fold for fold, _ in scores.keys() & others.keys())
        drawn = [
            np.mean([self._drawn(each, fold) for fold in folds], axis=0) for each in (name, other)
        ]  # each [draws]
        interval, count = resampled_interval(*drawn), sum(len(self._rows[fold]) for fold in folds)
        low, high = (None, None) if interval is None else interval
        if found.count == 1:
            return Difference(found.mean, low, high, count, "rows")
        if low is None or high is None:
            return found
        return replace(found, rows={"low": low, "high": high, "count": count})

    def _drawn(self, name: str, fold: int) -> np.ndarray:
        """Return the scores of a readout on rows that are drawn again and again: ``[draws]``."""
        if (name, fold) not in self._resampled:
            outputs, labels = self._outputs[name][fold], self._labels[self._rows[fold]]
            columns = labels.shape[1] * len(self._rows)
            most = min(_DRAWN_COLUMNS // columns, _DRAWN_ROWS // max(1, len(outputs)))
            count = max(_FEWEST_DRAWS, min(_DRAWS, most))
            drawn = resampled_rows(len(outputs), count, fold)  # [draws, rows]
            scores = [self._task.score(outputs[rows], labels[rows]) for rows in drawn]
            self._resampled[name, fold] = np.array(scores)
        return self._resampled[name, fold]

    def calibration(self, name: str, temperature: float) -> dict[str, Any] | None:
        """Return how well the probabilities for all test rows are calibrated, before and after.

        Args:
            name: Of the readout.
            temperature: What logits are divided by; None is returned for a regression.
        """
        found = self._outputs.get(name, {})
        if self._task.kind == "regression" or not found:
            return None
        labels = np.concatenate([self._labels[self._rows[fold]] for fold in found])
        logits = torch.from_numpy(np.concatenate(list(found.values()))).double()
        before, after = (
            calibration_error(self._task, self._task.probabilities(each).numpy(), labels)
            for each in (logits, logits / temperature)
        )
        return {"temperature": temperature, "test": {"before": before, "after": after}}


def temperature_of(
    task: Task, fits: Sequence[Fit], label_rows: LabelRows, weights_of: Callable[[Fit], str]
) -> float:
    """Return the temperature of a run: fitted on the validation rows of all folds together.

    What is calibrated is what predicts: the mean of the fits that share a backbone, fold by fold.

    Args:
        task: What is predicted.
        fits: Of the chosen readout.
        label_rows: The labels.
        weights_of: The hash of the backbone that a fit reads.
    """
    groups: dict[str, list[Fit]] = {}
    for fit in fits:
        groups.setdefault(weights_of(fit), []).append(fit)
    found = [outputs for group in groups.values() for outputs in outputs_on_valid(group)]
    if not found:
        return 1.0
    labels = np.concatenate([label_rows.labels[outputs.rows] for outputs in found])
    return fit_temperature(task, np.concatenate([outputs.mean for outputs in found]), labels)


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
        task: What is predicted.
        fits: Every fit of the run.
        chosen: The name of the fits that the run is about.
        own: The test score of the backbone's own readout, for every fold and seed.
        averages: The same fits, the seeds of each fold averaged.
        temperatures: What the logits of each readout that is kept are divided by.
    """
    metric = task.metric
    several_seeds = len({fit.spec.seed for fit in fits}) > 1
    rows: dict[str, Any] = {}
    if own:
        first = next(iter(own))[1]  # a checkpoint says the same whatever the seed of a head
        alike = all(own[fold, seed] == own[fold, first] for fold, seed in own)
        once = {key: score for key, score in own.items() if key[1] == first or not alike}
        rows[OWN] = {"test": _summary(once), "versus_own": None, "num_parameters": None}
    names = list(dict.fromkeys(fit.spec.name for fit in fits))
    names.sort(key=lambda name: name not in BASELINES)  # what there is to beat comes first
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
            "versus_baseline": versus(fits, name, baseline, metric),
            "averaged": averaged,
            "num_parameters": members[0].num_parameters,
            **({"diverged": diverged} if (diverged := sum(f.diverged for f in members)) else {}),
            **({"compared_only": True} if name in RIVALS else {}),
            **({"simple": True} if name in SIMPLE else {}),
            **({"temperature": temperatures[name]} if name in temperatures else {}),
        }
        if not several_seeds:
            # The average is the only fit of a fold, and what its outputs say of an interval holds.
            rows[name] |= {k: v for k, v in averaged.items() if k.startswith("versus")}
            rows[name]["averaged"] = None
    found = {
        "task": task.to_json(),
        "metric": metric,
        "higher_is_better": task.higher_is_better,
        "head": chosen,
        "readouts": rows,
        "versus_baseline": rows[chosen]["versus_baseline"],
    }
    verdict = verdict_of(found).to_json()
    return {**found, "verdict": verdict, "fits": [fit.to_json() for fit in fits]}


def rank_by_validation(task: Task, averages: Averages, fits: Sequence[Fit]) -> list[str]:
    """Return readouts from the best validation score to the worst, their seeds averaged.

    That is what predicts. Of equal ones the one with fewer parameters comes first; those without a
    validation score stay in their order, last.
    """
    sign = -1 if task.higher_is_better else 1
    parameters = {fit.spec.name: fit.num_parameters for fit in fits}

    def place(name: str) -> tuple[float, int]:
        scores = list(averages.valid_scores(name).values())
        return (sign * float(np.mean(scores)), parameters[name]) if scores else (np.inf, 0)

    return sorted(parameters, key=place)


def best_by_validation(task: Task, averages: Averages, fits: Sequence[Fit]) -> str:
    """Return the readout that a comparison predicts with: the best one that is saved as a head.

    Without a validation part, that is HistoGraph, or else the first.
    """
    saved = [fit for fit in fits if fit.spec.name not in RIVALS]
    saved.sort(key=lambda fit: fit.spec.name != "histograph")
    return rank_by_validation(task, averages, saved)[0]


def _averaged(
    averages: Averages, name: str, baseline: str | None, rival: str | None
) -> dict[str, Any]:
    """Return scores and differences of a readout with the seeds of each fold averaged."""

    def against(other: str | None) -> dict[str, Any] | None:
        if other is None or name in (other, OWN):
            return None
        found = averages.difference(name, other)
        return None if found is None else {"baseline": other, **found.to_json()}

    own = None if name == OWN else averages.difference(name, OWN)
    return {
        "test": _summary(averages.scores(name)),
        "valid": _summary(averages.valid_scores(name)),
        "versus_own": None if own is None else own.to_json(),
        "versus_baseline": against(baseline),
        "versus_rival": against(rival),
    }


def versus(
    fits: Sequence[Fit], name: str, baseline: str | None, metric: str
) -> dict[str, Any] | None:
    """Return how much better the fits called ``name`` are than those called ``baseline``."""
    if baseline is None or baseline == name:
        return None
    scores = [scores_of(named(fits, which), "test", metric) for which in (name, baseline)]
    found = paired_difference(*scores)
    return None if found is None else {"baseline": baseline, **found.to_json()}


def named(fits: Sequence[Fit], name: str) -> list[Fit]:
    """Return the fits of that name."""
    return [fit for fit in fits if fit.spec.name == name]


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


#: What ``head.json`` says of each member, where it differs from the best one.
_OF_A_MEMBER = ("config", "standardize", "layer_norm", "target_scale")


def write_chosen_head(
    folder: Path,
    best: Fit,
    members: Sequence[Fit],
    task: Task,
    target_names: Sequence[str],
    backbone: Mapping[str, Any],
    *,
    temperature: float = 1.0,
) -> None:
    """Gather the members' weights at the top of the run, and say how to build and use them.

    Args:
        folder: The run.
        best: The fit that was chosen, one of the members, whose folder is in the run.
        members: The fits whose mean the run predicts with.
        task: What is predicted.
        target_names: One name per column of the labels.
        backbone: What :class:`~histograph_post.runs.saved_backbone.SavedBackbone` reads.
        temperature: What logits are divided by.
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
    stored = _of_a_member(folder, best)
    write_json(
        folder / HEAD_CONFIG_NAME,
        {
            "head": best.spec.head,
            "fold": best.spec.fold,
            "seed": best.spec.seed,
            **stored,
            "members": [
                {
                    "fold": member.spec.fold,
                    "seed": member.spec.seed,
                    **{
                        name: value
                        for name, value in _of_a_member(folder, member).items()
                        if value != stored[name]
                    },
                }
                for member in members
            ],
            "temperature": temperature,
            "task": task.to_json(),
            "target_names": list(target_names),
            "backbone": dict(backbone),
        },
    )


def _of_a_member(folder: Path, fit: Fit) -> dict[str, Any]:
    stored = read_fit(folder / fit.spec.folder)
    return {name: stored[name] for name in _OF_A_MEMBER}


def write_predictions(
    folder: Path,
    fits: Sequence[Fit],
    name: str,
    task: Task,
    label_rows: LabelRows,
    *,
    temperature: float = 1.0,
) -> None:
    """Write what the fits of that name say of the test rows of every fold, their seeds averaged."""
    targets = label_rows.target_names
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    found = outputs_on_test(distinct(named(fits, name)))
    columns = prediction_columns(task, targets)
    if any(len(outputs.each) > 1 for outputs in found):
        columns += spread_columns(task, targets)
    labelled = [f"label_{target}" for target in targets]
    writer.writerow(["id", "fold", *columns, *labelled])
    for outputs in found:
        each = outputs.each / temperature  # [seeds, rows, out_dim]
        cells, spread = prediction_cells(task, each.mean(axis=0)), member_spread(task, each)
        more = [[] for _ in cells] if spread is None else number_cells(spread)
        for row, predicted, spreads in zip(outputs.rows, cells, more, strict=True):
            truth = ["" if value != value else f"{value:g}" for value in label_rows.labels[row]]
            writer.writerow([label_rows.names[row], outputs.fold, *predicted, *spreads, *truth])
    write_text(folder / PREDICTIONS_NAME, text.getvalue())
