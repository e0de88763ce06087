"""Metrics of predictions, and statistics of scores over folds and seeds.

Most metrics are a few lines of NumPy with scikit-learn's results: predictions are scored after
every epoch and on a thousand bootstrap samples, where its input checks take longer than the scores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics as sk

#: Metrics of each kind of task; the first one is tracked unless another is asked for.
METRICS: dict[str, tuple[str, ...]] = {
    "binary": ("accuracy", "roc_auc", "ap", "balanced_accuracy", "f1"),
    "multiclass": ("accuracy", "balanced_accuracy", "f1"),
    "multilabel": ("roc_auc", "ap", "accuracy"),
    "regression": ("rmse", "mae", "r2"),
}
#: A link is scored against the part's negatives at each of these ranks.
HITS_AT = (20, 50)

#: Metrics of the existence of links. ROC-AUC is tracked: it uses every pair, where hits use a few.
LINK_METRICS = (
    "roc_auc",
    "ap",
    "mrr",
    *(f"hits@{k}" for k in HITS_AT),
    "accuracy",
    "balanced_accuracy",
    "f1",
)
LOWER_IS_BETTER = frozenset({"rmse", "mae", "loss"})

#: Metrics of predicted classes, and of rankings.
_CLASS_METRICS = frozenset({"accuracy", "balanced_accuracy", "f1"})
_RANKING_METRICS = frozenset({"roc_auc", "ap"})


def class_scores(truth: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    """Score predicted class numbers ``[rows]``, over the classes that occur in ``truth``."""
    size = 1 + int(max(truth.max(), chosen.max()))
    counted = (truth, chosen, truth[truth == chosen])
    there, taken, right = (np.bincount(numbers, minlength=size) for numbers in counted)  # [classes]
    # A class that a small split lacks must not lower the mean.
    occurring = there > 0
    there, taken, right = there[occurring], taken[occurring], right[occurring]
    return {
        "accuracy": float(right.sum() / len(truth)),
        "balanced_accuracy": float(np.mean(right / there)),
        "f1": float(np.mean(2 * right / (there + taken))),
    }


def ranking_scores(
    truth: np.ndarray, values: np.ndarray, wanted: Collection[str] = _RANKING_METRICS
) -> dict[str, float]:
    """Score how ``values [rows]`` rank two classes; nothing for a single class."""
    if _RANKING_METRICS.isdisjoint(wanted) or truth.min() == truth.max():
        return {}
    if not (np.isin(truth, (0, 1)).all() and np.isfinite(values).all()):
        # Its errors say what is wrong with them.
        known = {"roc_auc": sk.roc_auc_score, "ap": sk.average_precision_score}
        return {name: float(known[name](truth, values)) for name in known if name in wanted}
    scores: dict[str, float] = {}
    positives = int(truth.sum())
    if "roc_auc" in wanted:
        # The Mann-Whitney statistic: pairs of a positive and a negative in order, ties half.
        ordered = stats.rankdata(values)[truth == 1].sum() - positives * (positives + 1) / 2
        scores["roc_auc"] = float(ordered / (positives * (len(truth) - positives)))
    if "ap" in wanted:
        descending = np.argsort(-values)
        # Rows of equal value pass a threshold together: the last of each counts. [thresholds]
        last = np.append(np.flatnonzero(np.diff(values[descending])), len(values) - 1)
        found = np.cumsum(truth[descending])[last]
        precision, recall = found / (last + 1), found / positives
        scores["ap"] = float(np.sum(np.diff(recall, prepend=0.0) * precision))
    return scores


def link_scores(truth: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Score each link by its rank among all negatives of the part, as OGB does.

    ``mrr`` is the mean of 1 / rank; a negative with the link's own value counts half (the mean of
    the best and the worst rank it could have). ``hits@K`` is the share of links above the K-th
    highest negative, ties not counting as above; it is absent where there are fewer than K
    negatives, among which every link would be a hit. Empty without links or without negatives.
    """
    links, negatives = values[truth == 1], np.sort(values[truth == 0])
    if not len(links) or not len(negatives):
        return {}
    not_above = np.searchsorted(negatives, links, side="right")  # negatives <= link: [links]
    below = np.searchsorted(negatives, links, side="left")  # negatives < link: [links]
    best, worst = 1 + len(negatives) - not_above, 1 + len(negatives) - below  # ranks: [links]
    found = {"mrr": float(np.mean(2 / (best + worst)))}
    for k in HITS_AT:
        if len(negatives) >= k:
            found[f"hits@{k}"] = float(np.mean(worst <= k))
    return found


def binary_scores(
    truth: np.ndarray,
    chosen: np.ndarray,
    values: np.ndarray,
    wanted: Collection[str],
    *,
    links: bool,
) -> dict[str, float]:
    """Score two classes, at least by the wanted metrics.

    Args:
        chosen: Predicted class of each row: ``[rows]``.
        values: Rank the rows, the positive class higher: ``[rows]``.
        links: Whether the rows are pairs of nodes, which are also scored as links.
    """
    found = {} if _CLASS_METRICS.isdisjoint(wanted) else class_scores(truth, chosen)
    found |= ranking_scores(truth, values, wanted)
    if not links:
        return found
    ranks = link_scores(truth, values)
    # Training links come without negatives: any score would reward predicting a link everywhere.
    return found | ranks if ranks else {}


def regression_scores(
    truth: np.ndarray, values: np.ndarray, wanted: Collection[str] = METRICS["regression"]
) -> dict[str, float]:
    """Score predicted values ``[rows]``; ``r2`` needs two of them."""
    errors = values - truth  # [rows]
    if not np.isfinite(errors).all():
        sk.mean_absolute_error(truth, values)  # its error says what is wrong with them
    found = {
        "rmse": float(np.sqrt(np.mean(errors**2))),
        "mae": float(np.mean(np.abs(errors))),
    }
    if "r2" in wanted and len(truth) > 1:
        found["r2"] = float(sk.r2_score(truth, values))
    return {name: score for name, score in found.items() if name in wanted}


# --- calibration

#: Bins of equal width between 0 and 1.
NUM_BINS = 15


@dataclass(frozen=True)
class Reliability:
    """Predicted against observed frequencies, in the bins that have rows."""

    predicted: np.ndarray
    observed: np.ndarray
    counts: np.ndarray

    @property
    def error(self) -> float:
        """The expected calibration error: the mean gap, weighted by rows."""
        gaps = np.abs(self.predicted - self.observed)
        return float((gaps * self.counts).sum() / self.counts.sum())


def reliability(confidence: np.ndarray, right: np.ndarray) -> Reliability:
    """Bin predictions by their confidence.

    Args:
        confidence: The probability of the predicted class, ``[rows]``.
        right: Whether that class is the true one, ``[rows]``.
    """
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    used = counts > 0
    predicted = np.bincount(bins, weights=confidence, minlength=NUM_BINS)[used] / counts[used]
    observed = np.bincount(bins, weights=right, minlength=NUM_BINS)[used] / counts[used]
    return Reliability(predicted, observed, counts[used])


def expected_calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Return the mean gap between confidence and accuracy, over 15 bins of confidence."""
    return reliability(confidence, right).error


# --- scores over folds and seeds

#: A fold and a seed: what two readouts are paired by.
Key = tuple[int, int]

#: Of every interval.
_CONFIDENCE = 0.95


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
    unit only. Folds share training data, so the interval is somewhat too narrow. Of outputs, which
    a single fold has too, it is the 95 % interval over test rows, see :func:`resampled_interval`.
    """

    mean: float
    low: float | None
    high: float | None
    count: int
    #: What the interval is over: ``folds``, ``seeds`` or ``rows``.
    over: str = "folds"
    #: The interval over the test rows of all folds, and how many there are, beside one over folds.
    rows: Mapping[str, float] | None = None

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
    scores: Mapping[Key, float], others: Mapping[Key, float]
) -> Difference | None:
    """Compare two readouts over the folds and seeds that both have; None if there are none."""
    keys = sorted(set(scores) & set(others))
    if not keys:
        return None
    differences = np.array([scores[key] - others[key] for key in keys])
    folds = np.array([fold for fold, _ in keys])
    over = "seeds"
    if len(np.unique(folds)) > 1:
        over = "folds"
        differences = np.array([differences[folds == fold].mean() for fold in np.unique(folds)])
    low, high = student_interval(differences) or (None, None)
    return Difference(float(differences.mean()), low, high, len(differences), over)


def student_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float] | None:
    """Return the 95 % Student interval of the mean of independent values; None for a single one."""
    count = len(values)
    if count < 2:
        return None
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / np.sqrt(count)
    reach = float(student_quantile(count) * error)
    return mean - reach, mean + reach


def student_quantile(count: int) -> float:
    """Return how many standard errors the interval of so many values reaches to either side."""
    return float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))


#: Seed of the bootstrap samples, so that a run can be reproduced byte by byte.
_BOOTSTRAP_SEED = 0


def resampled_rows(num_rows: int, count: int, fold: int = 0) -> np.ndarray:
    """Return bootstrap samples of the rows, the same on every call: ``[count, num_rows]``."""
    random = np.random.default_rng(_BOOTSTRAP_SEED + fold)
    return random.integers(num_rows, size=(count, num_rows))


def resampled_interval(scores: np.ndarray, others: np.ndarray) -> tuple[float, float] | None:
    """Return the percentile interval of the paired bootstrap over test rows; None without one.

    Args:
        scores: Of one readout on each of :func:`resampled_rows`, ``[samples]``, the mean over
            folds where there are several; NaN where a sample allows no score.
        others: Of the other, on the same rows.
    """
    differences = scores - others
    differences = differences[np.isfinite(differences)]
    if len(differences) < len(scores) / 2:  # most samples have a single class
        return None
    low, high = np.quantile(differences, [(1 - _CONFIDENCE) / 2, (1 + _CONFIDENCE) / 2])
    return float(low), float(high)
