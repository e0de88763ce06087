"""Means, deviations and paired differences over folds and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

#: A fold and a seed: what two readouts are paired by.
Key = tuple[int, int]


@dataclass(frozen=True)
class Summary:
    """The mean and the standard deviation of some scores."""

    mean: float
    deviation: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Difference:
    """How much one readout is better than another on the same folds and seeds.

    The interval is the 95 % Student interval of the mean paired difference. Its units are folds
    (their seeds averaged first), or seeds where there is a single fold; None where there is one
    unit only. Folds share training data, so the interval is somewhat too narrow.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def summarize(scores: Sequence[float]) -> Summary | None:
    """Return the mean and the sample standard deviation; None without scores."""
    if not scores:
        return None
    deviation = float(np.std(scores, ddof=1)) if len(scores) > 1 else 0.0
    return Summary(float(np.mean(scores)), deviation, len(scores))


def paired_difference(
    scores: Mapping[Key, float], others: Mapping[Key, float], *, level: float = 0.95
) -> Difference | None:
    """Compare two readouts over the folds and seeds that both have; None if there are none."""
    keys = sorted(set(scores) & set(others))
    if not keys:
        return None
    differences = np.array([scores[key] - others[key] for key in keys])
    folds = np.array([fold for fold, _ in keys])
    if len(np.unique(folds)) > 1:
        differences = np.array([differences[folds == fold].mean() for fold in np.unique(folds)])
    mean, count = float(differences.mean()), len(differences)
    if count < 2:
        return Difference(mean, None, None, count)
    error = float(differences.std(ddof=1)) / np.sqrt(count)
    reach = float(stats.t.ppf((1 + level) / 2, count - 1) * error)
    return Difference(mean, mean - reach, mean + reach, count)
