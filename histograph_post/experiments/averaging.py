"""Seeds averaged: the fits of one readout that predict together, and their mean predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ..metrics import Difference, Key, paired_difference, resampled_interval, resampled_rows
from ..runs.fits import Fit
from ..runs.predictions import calibration_error, fit_temperature
from ..runs.verdict import OWN
from ..tasks import Task

#: Bootstrap samples for an interval; fewer if there are many targets or folds to score in each.
_DRAWS = 1000
_FEWEST_DRAWS = 100
_DRAWN_COLUMNS = 5000

#: Rows of all draws together: more than 33,554 test rows are drawn less often.
_DRAWN_ROWS = 1 << 25


@dataclass(frozen=True)
class FoldOutputs:
    """The outputs of the fits of one fold for the rows of a part."""

    fold: int
    #: Label rows of the part, ``[rows]``.
    rows: np.ndarray
    #: Outputs of every fit, in the units of the labels: ``[fits, rows, out_dim]``.
    each: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """The mean over the fits: ``[rows, out_dim]``."""
        return self.each.mean(axis=0)


def outputs_by_fold(fits: Sequence[Fit], part: str = "test") -> list[FoldOutputs]:
    """Return the outputs of the seeds of each fold for a part, ``test`` or ``valid``."""
    found = []
    for fold in dict.fromkeys(fit.spec.fold for fit in fits):
        parts = [
            (getattr(fit, f"{part}_rows"), getattr(fit, f"{part}_outputs"))
            for fit in fits
            if fit.spec.fold == fold
        ]
        rows = parts[0][0]
        # A fit of an earlier version lacks the validation part.
        each = [outputs for own_rows, outputs in parts if np.array_equal(own_rows, rows)]
        if len(rows):
            found.append(FoldOutputs(fold, rows, np.stack(each)))
    return found


def members_with(best: Fit, fits: Sequence[Fit], weights_of: Callable[[Fit], str]) -> list[Fit]:
    """Return the fits that predict together with the best one, those of a fold together.

    They are the fits of its readout on exactly its backbone, by the hash of its weights: others
    would need another backbone to run as well.
    """
    own = weights_of(best)
    members = [fit for fit in named(fits, best.spec.name) if weights_of(fit) == own]
    members.sort(key=lambda fit: fit is not best)
    return sorted(distinct(members), key=lambda fit: (fit.spec.fold, fit.spec.seed))


def distinct(fits: Sequence[Fit]) -> list[Fit]:
    """Return distinct fits of one readout: a solution does not depend on the seed."""
    solved = {fit.spec.fold: fit for fit in reversed(fits)}
    return [fit for fit in fits if fit.strength is None or solved[fit.spec.fold] is fit]


class Averages:
    """The readouts of a run, the seeds of each fold averaged.

    Args:
        own: Outputs of the backbone's own readout for the test rows of each fold.
    """

    def __init__(
        self, task: Task, labels: np.ndarray, fits: Sequence[Fit], own: Mapping[int, np.ndarray]
    ) -> None:
        self._task, self._labels = task, labels
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


def named(fits: Sequence[Fit], name: str) -> list[Fit]:
    """Return the fits of that name."""
    return [fit for fit in fits if fit.spec.name == name]
