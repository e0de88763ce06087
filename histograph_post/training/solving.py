"""Linear maps solved to their optimum: a convex readout needs no training and no seed.

The objective is the mean loss of each target over the labels it has, summed over targets, plus
``strength / 2`` times the squared weights. Features are standardised by the training rows and the
bias is not penalised. A strength means the same for any number of rows, labels and targets; it is
``1 / (C * rows)`` of scikit-learn's ``LogisticRegression``, and ``2 * alpha / rows`` of ``Ridge``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import DataError
from ..heads.standardize import Limits, Standardizer
from ..tasks import TargetScale, Task
from .minimizing import LinearLoss, minimize

#: The path of penalties, strongest first: two in a decade, from 1000 to 1e-8.
STRENGTHS = tuple(10 ** (exponent / 2) for exponent in range(6, -17, -1))

#: The penalty without a validation part to choose it: for statistics of frozen layers, validation
#: has mostly chosen 0.1 to 1.
USUAL_STRENGTH = 0.3

#: The path ends after so many strengths without a better score or a lower loss on validation.
PATIENCE = 3

#: They count once the training loss is below this share of the strongest penalty's: before that,
#: next to nothing is fitted, and validation goes up and down by chance.
FITTED_SHARE = 0.9

#: Largest entry of the gradient on the path, where solutions need only be told apart by their
#: validation scores; the chosen one is then solved to the tolerance of :mod:`.minimizing`.
PATH_TOLERANCE = 3e-4

#: Training features of at most so many values are solved in double precision.
DOUBLE_VALUES = 1 << 24


@dataclass(frozen=True)
class PathPoint:
    """How good the solution for one strength is."""

    strength: float
    #: Mean loss over the labels of a part, without the penalty; NaN without a validation part.
    train_loss: float
    valid_loss: float = math.nan
    #: Every metric that the labels of the validation part allow.
    valid_scores: Mapping[str, float] = field(default_factory=dict)

    def measured(self) -> dict[str, float]:
        """Return the point as an entry of a training log."""
        valid = {} if math.isnan(self.valid_loss) else {"valid_loss": self.valid_loss}
        scores = {f"valid_{name}": value for name, value in self.valid_scores.items()}
        return {"loss": self.train_loss, "strength": self.strength, **valid, **scores}


@dataclass(frozen=True)
class Solution:
    """A linear map of features that are not standardised, and how it was chosen.

    Attributes:
        weight: ``[out_dim, F]``.
        bias: ``[out_dim]``.
        chosen: Its place on the path.
        path: What was tried, strongest penalty first.
        scale: The scale of its outputs: that of the training targets, in regression.
        limits: The ranges of the features of training graphs, which it keeps others in.
    """

    weight: Tensor
    bias: Tensor
    chosen: int
    path: tuple[PathPoint, ...]
    scale: TargetScale
    limits: Limits

    def __call__(self, features: Tensor) -> Tensor:
        """Return the outputs of features ``[rows, F]``, at its scale: ``[rows, out_dim]``."""
        return F.linear(self.limits(features), self.weight, self.bias)

    @property
    def strength(self) -> float:
        """The penalty that was chosen."""
        return self.path[self.chosen].strength


def solve_linear(
    features: np.ndarray | Tensor,
    targets: Tensor,
    task: Task,
    train: np.ndarray,
    valid: np.ndarray,
    *,
    strengths: Sequence[float] = STRENGTHS,
    widths: Sequence[int] | None = None,
    balance: bool = False,
    scaled: bool = False,
    on_point: Callable[[PathPoint], None] | None = None,
) -> Solution:
    """Return the linear map from features to outputs with the least penalised loss.

    It is solved for one strength of the penalty after the other, each from the solution before it,
    until neither score nor loss on validation has improved for ``PATIENCE`` of them. The best score
    decides, among equals the lower loss, and that one is solved to convergence. Without a
    validation part it is solved for ``USUAL_STRENGTH`` alone.

    Args:
        features: ``[rows, F]``, single precision.
        targets: Of all rows, from :meth:`~histograph_post.tasks.Task.targets`, missing ones too.
        task: Gives the loss and the metric.
        train: Rows to fit.
        valid: Rows to choose the strength by; may be empty.
        strengths: Penalties to try, strongest first.
        widths: Columns that belong together, whose typical scale is the floor of each column's; all
            by default. See :class:`~histograph_post.heads.standardize.Standardizer`.
        balance: Weigh classes (or positives) by how rare they are in the training part.
        scaled: Whether the features are standardised, and limited, already.
        on_point: Called after every strength.
    """
    features, labelled = torch.as_tensor(features), _labelled(targets)
    train, valid = (part[labelled[part]] for part in (train, valid))  # torch can index by a copy
    if not len(train):
        raise DataError("solve: found no training row with a label, expected at least one")
    scale = TargetScale.of(task, targets[train].double().numpy())
    learned = scale.apply(targets.double() if task.kind == "regression" else targets)
    weights = task.balancing_weights(labels_of(task, targets[train])) if balance else {}

    columns = list(widths or (features.size(1),))
    train_rows, valid_rows = (features[part].float() for part in (train, valid))  # [rows, F] each
    standardizer, limits = Standardizer(columns), Limits(features.size(1))
    if not scaled:
        standardizer.fit([train_rows.split(columns, dim=1)])
    if task.level == "graph" and not scaled:
        limits.include(train_rows)
    space = _Space.of(_standardize_(train_rows, standardizer))
    valid_rows = space.enter(_standardize_(limits(valid_rows), standardizer))  # [valid, r]
    if not (space.gram.isfinite().all() and valid_rows.isfinite().all()):
        raise DataError(
            "solve: found NaN or infinity, expected finite activations in the training and "
            "validation rows; `histograph verify` checks a cache"
        )
    loss = LinearLoss.of(task, learned[train], **weights)

    def measure(strength: float, weight: Tensor, bias: Tensor) -> PathPoint:
        train_loss = float(task.loss(_apply(space.rows, weight, bias), learned[train]))
        if not len(valid):
            return PathPoint(strength, train_loss)
        outputs = _apply(valid_rows, weight, bias)  # [valid, out_dim]
        scores = task.scores(scale.undo(outputs.numpy()), labels_of(task, targets[valid]))
        valid_loss = float(task.loss(outputs, learned[valid]))
        return PathPoint(strength, train_loss, valid_loss, scores)

    path: list[PathPoint] = []
    states = [loss.start(space.rows.size(1))]
    for strength in strengths if len(valid) else (USUAL_STRENGTH,):
        states.append(_minimize(loss, space, strength, *states[-1], tolerance=PATH_TOLERANCE))
        path.append(measure(strength, *loss.complete(*states[-1])))
        if on_point is not None:
            on_point(path[-1])
        chosen = _best(path, task)
        if _is_over(path, chosen):
            break
    converged: dict[int, tuple[Tensor, Tensor]] = {}
    while chosen not in converged:  # another one may be the best once this one has converged
        strength = path[chosen].strength
        state = _minimize(loss, space, strength, *states[chosen + 1])
        converged[chosen] = loss.complete(*state)
        path[chosen] = measure(strength, *converged[chosen])
        chosen = _best(path, task)
    weight, bias = converged[chosen]  # [out_dim, r], [out_dim]
    # W (x - mean) / scale + b is a linear map of x itself.
    weight = space.leave(weight) / standardizer.scale.double()  # [out_dim, F]
    bias = bias - weight @ standardizer.mean.double()  # [out_dim]
    return Solution(weight.float(), bias.float(), chosen, tuple(path), scale, limits)


def _best(path: Sequence[PathPoint], task: Task) -> int:
    """Return the position of the best score, among equals of the lowest loss."""
    sign = 1 if task.higher_is_better else -1

    def merit(place: int) -> tuple[float, float]:
        # Which metrics are defined depends on the labels alone: all points have a score, or none.
        return sign * path[place].valid_scores.get(task.metric, 0.0), -path[place].valid_loss

    return max(range(len(path)), key=merit)


def _is_over(path: Sequence[PathPoint], chosen: int) -> bool:
    """Say whether weaker penalties have been worse for long enough."""
    lowest = min(range(len(path)), key=lambda place: path[place].valid_loss)
    since = path[max(chosen, lowest) + 1 :]
    worse = [point for point in since if point.train_loss < FITTED_SHARE * path[0].train_loss]
    return len(worse) >= PATIENCE


def _labelled(targets: Tensor) -> np.ndarray:
    """Mark the rows that have a label: ``[rows]``."""
    if not targets.is_floating_point():
        return (targets >= 0).numpy()
    return (~targets.isnan()).any(dim=1).numpy()


def labels_of(task: Task, targets: Tensor) -> np.ndarray:
    """Turn targets back into labels, as metrics take them: ``[rows, T]``."""
    if task.kind in ("multilabel", "regression"):
        return targets.double().numpy()
    numbers = targets.double().view(-1, 1).numpy()  # -1 or NaN where missing: here none is
    return np.asarray(task.classes)[numbers.astype(np.int64)]


# --- features: standardised, and in the space of the rows where that is smaller


def _standardize_(rows: Tensor, standardizer: Standardizer) -> Tensor:
    """Standardise rows ``[rows, F]`` in place."""
    standardizer.apply_(rows.split(list(standardizer.in_dims), dim=1))
    return rows


@dataclass(frozen=True)
class _Space:
    """Where a linear map is solved: ``x = z basis^T`` for training rows, with fewer columns in z.

    With ``X^T = Q R``, rows ``X = R^T Q^T`` and weights ``W = A Q^T`` give the outputs ``R^T A^T``
    at the same penalty: weights outside of the span of the rows cannot lower the loss.

    Attributes:
        rows: Training rows, ``[rows, r]``.
        basis: ``[F, r]``; None where there are not far fewer rows than columns.
        gram: Mean of the products of columns, ``[r, r]``.
    """

    rows: Tensor
    basis: Tensor | None
    gram: Tensor

    @classmethod
    def of(cls, rows: Tensor) -> _Space:
        """Take the space of standardised rows ``[rows, F]``."""
        basis = None
        if len(rows) * min(rows.shape) <= DOUBLE_VALUES:
            rows = rows.double()
        if 2 * len(rows) < rows.size(1):  # else the decomposition costs more than it saves
            basis, triangle = torch.linalg.qr(rows.T)  # [F, r], [r, r]
            rows = triangle.T.contiguous()
        return cls(rows, basis, rows.T @ rows / len(rows))

    def enter(self, rows: Tensor) -> Tensor:
        """Return other rows ``[rows, F]`` in this space: ``[rows, r]``."""
        rows = rows.to(self.rows.dtype)
        return rows if self.basis is None else rows @ self.basis

    def leave(self, weight: Tensor) -> Tensor:
        """Return weights of this space, ``[out_dim, r]``, as weights of all columns."""
        return weight if self.basis is None else weight @ self.basis.double().T  # [out_dim, F]


def _apply(rows: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return outputs, ``[rows, out_dim]``: products in the rows' precision, sums in double."""
    return F.linear(rows, weight.to(rows.dtype)).double() + bias


# --- the minimum


def _minimize(
    loss: LinearLoss,
    space: _Space,
    strength: float,
    weight: Tensor,
    bias: Tensor,
    tolerance: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return weights ``[K, r]`` and bias ``[K]`` with the least penalised loss.

    The variables are such that the curvature is about 1 in all directions: with the typical second
    derivative ``c`` of the loss and ``c G + strength = L L^T``, weights are ``V L^-1``. Features
    that are nearly collinear would otherwise take thousands of steps.

    Args:
        loss: Of the training rows.
        space: The training rows.
        strength: Of the penalty.
        weight: Where to start, ``[K, r]``.
        bias: Where to start, ``[K]``.
        tolerance: As :func:`~histograph_post.training.minimizing.minimize` takes it.
    """
    if not len(bias):
        return weight, bias
    rows, dtype, curvature = space.rows, space.rows.dtype, loss.curvature()
    factor = _factor(curvature * space.gram, strength)  # [r, r], lower triangle

    def unpack(point: Tensor) -> tuple[Tensor, Tensor]:
        values = point.view(-1, weight.size(1) + 1)  # [K, r + 1]
        scaled = values[:, :-1].to(dtype)
        found = torch.linalg.solve_triangular(factor, scaled, upper=False, left=False)
        return found, values[:, -1] / math.sqrt(curvature)

    def evaluate(point: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = unpack(point)  # [K, r], [K] of these problems
        value, slope = loss.of_problems(problems)(_apply(rows, weight, bias))  # [P], [rows, K]
        gradient = slope.to(dtype).T @ rows + strength * weight  # [K, r]
        scaled = torch.linalg.solve_triangular(factor.T, gradient, upper=True, left=False)
        scaled_bias = slope.sum(0) / math.sqrt(curvature)  # [K]
        penalty = strength / 2 * weight.double().square().reshape(len(point), -1).sum(1)  # [P]
        both = torch.cat([scaled.double(), scaled_bias.unsqueeze(1)], dim=1)  # [K, r + 1]
        return value + penalty, both.view(len(point), -1)

    scaled = (weight.to(dtype) @ factor).double()  # [K, r]
    start = torch.cat([scaled, bias.unsqueeze(1) * math.sqrt(curvature)], dim=1)  # [K, r + 1]
    point = minimize(evaluate, start.view(loss.num_problems, -1), dtype, tolerance)
    weight, bias = unpack(point)
    return weight.double(), bias


def _factor(matrix: Tensor, added: float) -> Tensor:
    """Return the Cholesky factor of a matrix with something added to its diagonal.

    It need not be exact: more is added where rounding requires it.
    """
    smallest = 10 * torch.finfo(matrix.dtype).eps * float(matrix.diagonal().sum())
    shifted = matrix.clone()
    shifted.diagonal().add_(max(added, smallest))
    return torch.linalg.cholesky(shifted)
