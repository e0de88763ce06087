"""Metrics: scikit-learn's or equal to them, and the ranks of links, which it has not."""

from __future__ import annotations

import numpy as np
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


def class_scores(truth: np.ndarray, chosen: np.ndarray) -> dict[str, float]:
    """Score the chosen class numbers ``[rows]``, as scikit-learn does.

    This is called after every epoch: what scikit-learn checks first takes far longer than counting.
    """
    size = 1 + int(max(truth.max(), chosen.max()))
    counted = (truth, chosen, truth[truth == chosen])
    there, taken, right = (np.bincount(numbers, minlength=size) for numbers in counted)  # [classes]
    # Over the classes that occur: a class that a small split lacks must not lower the mean.
    occurring = there > 0
    there, taken, right = there[occurring], taken[occurring], right[occurring]
    return {
        "accuracy": float(right.sum() / len(truth)),
        "balanced_accuracy": float(np.mean(right / there)),
        "f1": float(np.mean(2 * right / (there + taken))),
    }


def ranking_scores(truth: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Score the order that ``values [rows]`` put two classes in; nothing for a single class."""
    if len(np.unique(truth)) < 2:
        return {}
    return {
        "roc_auc": float(sk.roc_auc_score(truth, values)),
        "ap": float(sk.average_precision_score(truth, values)),
    }


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


def regression_scores(truth: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Score predicted quantities ``[rows]``."""
    found = {
        "rmse": float(sk.root_mean_squared_error(truth, values)),
        "mae": float(sk.mean_absolute_error(truth, values)),
    }
    if len(truth) > 1:
        found["r2"] = float(sk.r2_score(truth, values))
    return found
