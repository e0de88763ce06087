"""Seeds averaged: the fits of one readout that predict together, and what they say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..metrics import Difference, Key, paired_difference, resampled_interval, resampled_rows
from ..runs.fits import Fit
from ..runs.predictions import LabelRows, calibration_error, fit_temperature
from ..runs.verdict import OWN as OWN
from ..tasks import Task

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
