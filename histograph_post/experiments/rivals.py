"""Rivals that readouts are compared with, on the statistics that `probe` reads.

Support vectors and boosted trees are what many would train on frozen features. They are not
modules, and not saved as heads: a fit keeps their outputs and scores, and cannot predict. Neither
depends on a seed, so that the seeds of a fold share one fit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.svm import SVC, SVR
from torch import Tensor

from ..heads.base import Readout
from ..heads.standardize import Standardizer
from ..runs.fits import Fit, FitSpec, Trained, save_fit
from ..tasks import TargetScale, Task
from ..training.loop import Progress
from ..training.solving import labels_of
from .folds import Fold
from .solved_fits import draw_rows, rows_that_fit

#: The grid of support vectors: the cost of an error, and the inverse width of the kernel in units
#: of the median squared distance between training rows.
COSTS = (0.1, 1.0, 10.0, 100.0)
GAMMAS = (0.2, 1.0, 4.0, 16.0)

#: Used without a validation part.
USUAL_COST, USUAL_GAMMA = 10.0, 1.0

#: Errors of scaled regression targets that support vectors ignore.
EPSILON = 0.1

#: Most training rows of support vectors, whose time and memory are quadratic; drawn at random.
MOST_ROWS = 6000

#: Rows whose kernel is computed at a time.
ROWS_AT_ONCE = 1024

#: Boosting stops after so many trees, or once so many did not lower the validation loss.
MOST_ITERATIONS, PATIENCE = 600, 20

#: Trees without a validation part.
USUAL_ITERATIONS = 100

#: Columns that each of more than :data:`FEW_TARGETS` targets is boosted on, drawn at random.
MOST_COLUMNS, FEW_TARGETS = 2000, 4


@dataclass(frozen=True)
class RivalRows:
    """What a rival is fitted on, and the rows to predict."""

    #: Of all label rows, ``[all rows, F]``, in single precision.
    features: Tensor
    #: Scaled, from :meth:`~histograph_post.tasks.Task.targets`.
    targets: Tensor
    task: Task
    #: Label rows to fit, to choose by (possibly none), and to predict.
    train: np.ndarray
    valid: np.ndarray
    rows: np.ndarray
    #: Widths of the blocks of features.
    widths: tuple[int, ...]
    #: Weigh classes by how rare they are.
    balance: bool = False

    def problems(self) -> list[np.ndarray]:
        """Return the labels of each problem that is fitted by itself, NaN if missing."""
        if self.task.kind == "multiclass":
            numbers = self.targets.double().numpy()
            return [np.where(numbers < 0, np.nan, numbers)]  # [all rows]
        return list(self.targets.double().numpy().T)  # T of [all rows]

    def can_be_fitted(self, truth: np.ndarray) -> bool:
        """Whether labels of training rows are of more than one class."""
        return len(truth) > 0 and (self.task.kind == "regression" or len(np.unique(truth)) > 1)

    def constant(self, truth: np.ndarray, count: int) -> np.ndarray:
        """Return outputs for rows if all training labels are equal: ``[count, K]``."""
        outputs = np.zeros((count, self.outputs_of_a_problem))
        if self.task.kind == "multiclass" and len(truth):
            outputs[:, int(truth[0])] = 1.0
        elif self.task.kind != "regression" and len(truth):
            outputs[:] = 2 * truth[0] - 1
        return outputs

    def by_class(self, values: np.ndarray, classes: np.ndarray) -> np.ndarray:
        """Return outputs for all classes from those that scikit-learn has seen: ``[rows, K]``."""
        if self.task.kind != "multiclass":
            return values.reshape(-1, 1)
        if len(classes) == 2:
            values = np.stack([-values.ravel(), values.ravel()], axis=1)
        unseen = values.min(axis=1, keepdims=True) - 1
        outputs = np.repeat(unseen, self.outputs_of_a_problem, axis=1)
        outputs[:, classes.astype(np.int64)] = values
        return outputs

    @property
    def outputs_of_a_problem(self) -> int:
        """Outputs of each problem that is fitted by itself."""
        return self.task.out_dim if self.task.kind == "multiclass" else 1

    def measured(self, outputs: np.ndarray, scale: TargetScale) -> dict[str, float]:
        """Return loss and scores on the validation part, as an entry of a log."""
        targets, task = self.targets[self.valid], self.task
        loss = float(task.loss(torch.from_numpy(outputs), targets))
        scores = task.scores(scale.undo(outputs), labels_of(task, scale.undo(targets)))
        return {"valid_loss": loss} | {f"valid_{name}": value for name, value in scores.items()}


@dataclass(frozen=True)
class RivalFit:
    """The outputs of a rival, ``[rows, out_dim]`` at the scale of the targets, and its log."""

    outputs: np.ndarray
    log: list[dict[str, float]]
    chosen: int = 0


# --- support vectors


def fit_support_vectors(given: RivalRows, scale: TargetScale) -> RivalFit:
    """Fit support vectors with a Gaussian kernel, a machine for each target.

    The cost of errors and the width of the kernel are those with the best score on validation, the
    same for all targets.
    """
    problems, task = given.problems(), given.task
    drawn = draw_rows(given.train, MOST_ROWS)
    distances = _Distances(given.features, drawn, given.widths)
    among = distances.to(drawn)  # [drawn, drawn]
    unit = max(float(np.median(among)), 1e-12)
    to_valid = distances.to(given.valid)  # [valid, drawn]
    places = [np.flatnonzero(~np.isnan(labels[drawn])) for labels in problems]

    log: list[dict[str, float]] = []
    best: tuple[tuple[float, float], float, list[Any]] | None = None
    grid = [(gamma, cost) for gamma in GAMMAS for cost in COSTS]
    kernels: dict[float, np.ndarray] = {}
    for gamma, cost in grid if len(given.valid) else [(USUAL_GAMMA, USUAL_COST)]:
        if gamma not in kernels:
            kernels = {gamma: np.exp(-gamma / unit * among)}  # [drawn, drawn], one at a time
        machines = [
            _machine(given, kernels[gamma][np.ix_(own, own)], labels[drawn[own]], cost)
            for labels, own in zip(problems, places, strict=True)
        ]
        entry: dict[str, float] = {"epoch": len(log), "cost": cost, "gamma": gamma / unit}
        merit = (0.0, 0.0)
        if len(given.valid):
            entry |= given.measured(
                _machine_outputs(given, machines, places, np.exp(-gamma / unit * to_valid)), scale
            )
            score = entry.get(f"valid_{task.metric}", 0.0)
            merit = (score if task.higher_is_better else -score, -entry["valid_loss"])
        log.append(entry)
        if best is None or merit > best[0]:
            best, chosen = (merit, gamma, machines), len(log) - 1
    assert best is not None  # the grid is not empty
    _, gamma, machines = best
    pieces = [
        _machine_outputs(given, machines, places, np.exp(-gamma / unit * distances.to(rows)))
        for rows in np.array_split(given.rows, -(-len(given.rows) // ROWS_AT_ONCE))
    ]
    return RivalFit(np.concatenate(pieces), log, chosen)


class _Distances:
    """Squared distances to some rows, of features that are standardised by them."""

    def __init__(self, features: Tensor, known: np.ndarray, widths: Sequence[int]) -> None:
        self._features, self._widths = features, list(widths)
        vectors = features[known]  # [known, F]
        self._standardizer = Standardizer(widths).fit([vectors.split(self._widths, dim=1)])
        self._known = self._standardized(vectors)
        self._squares = self._known.square().sum(1)  # [known]

    def _standardized(self, rows: Tensor) -> Tensor:
        self._standardizer.apply_(rows.split(self._widths, dim=1))
        return rows

    def to(self, rows: np.ndarray) -> np.ndarray:
        """Return the distances of label rows: ``[rows, known]`` in double precision."""
        own = self._standardized(self._features[rows.copy()])  # [rows, F]
        products = own @ self._known.T  # [rows, known]
        found = own.square().sum(1, keepdim=True) + self._squares - 2 * products
        return found.clamp(min=0).double().numpy()


def _machine(given: RivalRows, kernel: np.ndarray, truth: np.ndarray, cost: float) -> Any:
    """Fit one machine; if there is one class or none, return the labels themselves."""
    if not given.can_be_fitted(truth):
        return truth
    if given.task.kind == "regression":
        return SVR(kernel="precomputed", C=cost, epsilon=EPSILON).fit(kernel, truth)
    weight = "balanced" if given.balance else None
    return SVC(kernel="precomputed", C=cost, class_weight=weight).fit(kernel, truth)


def _machine_outputs(
    given: RivalRows, machines: Sequence[Any], places: Sequence[np.ndarray], kernel: np.ndarray
) -> np.ndarray:
    """Return the outputs of the machines for rows with this kernel to the drawn ones."""
    columns = []
    for machine, own in zip(machines, places, strict=True):
        if isinstance(machine, np.ndarray):
            columns.append(given.constant(machine, len(kernel)))
        elif isinstance(machine, SVR):
            columns.append(machine.predict(kernel[:, own]).reshape(-1, 1))
        else:
            values = machine.decision_function(kernel[:, own])
            columns.append(given.by_class(values, machine.classes_))
    return np.hstack(columns)  # [rows, out_dim]


# --- boosting


def fit_boosting(given: RivalRows, scale: TargetScale) -> RivalFit:
    """Boost trees on histograms of the features, for each target by itself.

    The number of trees is that with the lowest loss on validation.
    """
    problems, width = given.problems(), given.features.size(1)
    outputs: list[np.ndarray] = []
    stages: list[int] = []
    for number, labels in enumerate(problems):
        columns = np.arange(width)
        if len(problems) > FEW_TARGETS and width > MOST_COLUMNS:
            random = np.random.default_rng(number)
            columns = np.sort(random.choice(width, MOST_COLUMNS, replace=False))
        found, stage = _boost(given, labels, given.features[:, columns].numpy())
        outputs.append(found)
        stages.append(stage)
    every = np.hstack(outputs)  # [all rows asked for, out_dim]
    entry: dict[str, float] = {"epoch": 0, "iterations": float(np.mean(stages))}
    if len(given.valid):
        position = {int(row): place for place, row in enumerate(given.rows)}
        entry |= given.measured(every[[position[int(row)] for row in given.valid]], scale)
    return RivalFit(every, [entry])


def _boost(given: RivalRows, labels: np.ndarray, features: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the outputs ``[rows, K]`` of one problem, and its number of trees."""
    train, valid = (part[~np.isnan(labels[part])] for part in (given.train, given.valid))
    if not given.can_be_fitted(labels[train]):
        return given.constant(labels[train], len(given.rows)), 0
    regression = given.task.kind == "regression"
    # A class of the validation part that training has not seen cannot be scored.
    if not regression:
        valid = valid[np.isin(labels[valid], np.unique(labels[train]))]
    settings: dict[str, Any] = {"max_bins": 63, "random_state": 0, "early_stopping": False}
    settings["max_iter"] = MOST_ITERATIONS if len(valid) else USUAL_ITERATIONS
    watched: dict[str, Any] = {}
    if len(valid):
        settings |= {"early_stopping": True, "scoring": "loss", "n_iter_no_change": PATIENCE}
        watched = {"X_val": features[valid], "y_val": labels[valid]}
    if regression:
        model: Any = HistGradientBoostingRegressor(**settings)
    else:
        weight = "balanced" if given.balance else None
        model = HistGradientBoostingClassifier(**settings, class_weight=weight)
    model.fit(features[train], labels[train], **watched)

    def stages(rows: np.ndarray) -> Any:
        if regression:
            return (each.reshape(-1, 1) for each in model.staged_predict(features[rows]))
        staged = model.staged_decision_function(features[rows])
        return (given.by_class(each, model.classes_) for each in staged)

    stage = model.n_iter_ - 1
    if len(valid):
        truth = torch.from_numpy(labels[valid])
        truth = truth.long() if given.task.kind == "multiclass" else truth.unsqueeze(1)
        losses = [float(given.task.loss(torch.from_numpy(each), truth)) for each in stages(valid)]
        stage = int(np.argmin(losses))
    return next(itertools.islice(stages(given.rows), stage, None)), stage + 1


# --- the fit of a rival

#: By the names of :data:`~histograph_post.heads.registry.RIVALS`.
_FITTED: Mapping[str, Callable[[RivalRows, TargetScale], RivalFit]] = {
    "svm": fit_support_vectors,
    "boosting": fit_boosting,
}


def fit_rival(
    spec: FitSpec,
    reader: Readout,
    features: Callable[[], Tensor],
    fold: Fold,
    task: Task,
    folder: Path,
) -> Fit:
    """Fit a rival on one fold, on the features of a probe: ``reader``.

    The other arguments are those of :func:`~.solved_fits.solve_fit`.
    """
    loaded, split, started = fold.loaded, fold.split, time.perf_counter()
    labels, rows = loaded.labels, np.concatenate(split.parts)
    scale = TargetScale.of(task, labels[split.train])
    given = RivalRows(
        features=features(),
        targets=scale.apply(task.targets(labels)),
        task=task,
        train=rows_that_fit(np.array(split.train), reader.width, loaded.memory.allowed),
        valid=np.array(split.valid),
        rows=rows,
        widths=reader.feature_widths,
        balance=spec.training.balance,
    )
    found = _FITTED[spec.head](given, scale)
    position = np.zeros(len(labels), dtype=np.int64)
    position[rows] = np.arange(len(rows))
    trained = Trained(
        task=task,
        split=split,
        labels=labels,
        scale=scale,
        progress=Progress(epoch=len(found.log), best_epoch=found.chosen, log=found.log),
        num_parameters=0,
        predict=lambda part: scale.undo(found.outputs[position[part]]),
    )
    seconds = (time.perf_counter() - started) / len(found.log)
    return save_fit(spec, trained, folder / spec.folder, seconds=seconds, head=None)
