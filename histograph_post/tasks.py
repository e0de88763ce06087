"""What is predicted: the kind of task, its loss, and its metrics.

Labels arrive as one float array ``[rows, targets]`` with NaN for a missing label, whatever the
level (graphs, nodes or links). A task turns them into training targets, and a model's outputs
into a loss, probabilities and scores. Regression learns its targets on a :class:`TargetScale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import ConfigError, DataError
from .metrics import (
    LINK_METRICS,
    LOWER_IS_BETTER,
    METRICS,
    binary_scores,
    class_scores,
    regression_scores,
)
from .utils import Level
from .utils.decoding import Positive, decode

Kind = Literal["binary", "multiclass", "multilabel", "regression"]

#: How many labels of a batch are missing.
Missing = Literal["none", "some", "all"]

#: Integer labels with more distinct values than this are taken for a quantity, not for classes.
MAX_CLASSES = 1000

#: Labels from 0 up to here may leave classes out.
_MOST_NUMBERED = 10_000


@dataclass(frozen=True)
class Task:
    """One prediction task: its kind, its level, its classes and the metric that ranks models."""

    kind: Kind
    level: Level
    num_targets: Positive
    metric: str
    #: The label value of each class (binary and multiclass), in the order of the outputs.
    classes: tuple[float, ...] = ()

    @property
    def out_dim(self) -> int:
        """Width of the output a head needs."""
        return len(self.classes) if self.kind == "multiclass" else self.num_targets

    @property
    def higher_is_better(self) -> bool:
        """Whether a larger value of the tracked metric is better."""
        return self.metric not in LOWER_IS_BETTER

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of this task, in the order of tables."""
        return _metrics(self.kind, self.level)

    def to_json(self) -> dict[str, Any]:
        """Return the task as plain values."""
        return {**asdict(self), "classes": list(self.classes)}

    @classmethod
    def from_json(cls, value: Any, *, where: str = "task") -> Task:
        """Read what :meth:`to_json` returned, checking every type and that they fit together."""
        task = decode(cls, value, where, error=ConfigError)
        found, least = len(task.classes), {"binary": 2, "multiclass": 1}.get(task.kind, 0)
        if found < least or (found > least and task.kind != "multiclass"):
            expected = f"those of {task.kind} labels"
            raise ConfigError(f"{where}: found {found} classes, expected {expected}")
        if any(a >= b for a, b in pairwise(task.classes)) or (least and task.num_targets > 1):
            raise ConfigError(
                f"{where}: found classes twice, out of order, or of several targets, expected none"
            )
        if task.metric not in task.metrics:
            expected = f"one of {list(task.metrics)}"
            raise ConfigError(f"{where}: found the metric {task.metric!r}, expected {expected}")
        return task

    def accepts(self, width: int) -> bool:
        """Whether outputs of this width can be scored: one logit or two for a binary task."""
        return width in (1, 2) if self.kind == "binary" else width == self.out_dim

    def targets(self, labels: np.ndarray) -> Tensor:
        """Return class numbers ``[rows]`` (missing: -1), or values ``[rows, T]`` (missing: NaN)."""
        if self.kind == "multiclass":
            return torch.from_numpy(self._class_numbers(labels[:, 0]))  # [rows]
        if self.kind == "binary":
            numbers = self._class_numbers(labels[:, 0]).astype(np.float32)
            return torch.from_numpy(np.where(numbers < 0, np.nan, numbers)[:, None])  # [rows, 1]
        return torch.from_numpy(labels.astype(np.float32))  # [rows, T]

    def loss(
        self,
        outputs: Tensor,
        targets: Tensor,
        *,
        class_weight: Tensor | None = None,
        positive_weight: Tensor | None = None,
        missing: Missing | None = None,
    ) -> Tensor:
        """Return the mean loss over the labels that are present; zero when none is.

        The weights, see :meth:`balancing_weights`, may be on another device than the outputs.

        Args:
            outputs: ``[rows, out_dim]``.
            missing: How many of the targets are missing, if the caller knows: finding out would
                copy targets back from their device.
        """
        if missing is None:
            missing = self.missing(targets)
        if missing == "all":
            return outputs.sum() * 0.0
        if self.kind == "multiclass":
            weight = None if class_weight is None else class_weight.to(outputs)  # [classes]
            return F.cross_entropy(outputs, targets, weight=weight, ignore_index=-1)
        # A missing label takes a harmless value before the loss: NaN * 0 would still be NaN.
        absent = None if missing == "none" else torch.isnan(targets)  # [rows, T]
        filled = targets if absent is None else targets.masked_fill(absent, 0)  # [rows, T]
        if self.kind == "regression":
            losses = (outputs - filled).square()  # [rows, T]
        else:
            weight = None if positive_weight is None else positive_weight.to(outputs)  # [T]
            losses = F.binary_cross_entropy_with_logits(
                outputs, filled, pos_weight=weight, reduction="none"
            )  # [rows, T]
        if absent is None:
            return losses.mean()
        return (losses * ~absent).sum() / (~absent).sum()

    def loss_weight(self, targets: Tensor, class_weight: Tensor | None = None) -> Tensor:
        """Return the number that :meth:`loss` divides the sum over these targets by."""
        if self.kind != "multiclass":
            return (~torch.isnan(targets)).sum().float()
        present = targets[targets >= 0]
        if class_weight is None:
            return targets.new_tensor(len(present), dtype=torch.float32)
        return class_weight.to(targets.device)[present].sum()

    def missing(self, targets: Tensor) -> Missing:
        """Return how many of the targets are missing; without any targets, all are."""
        absent = targets < 0 if self.kind == "multiclass" else torch.isnan(targets)
        if bool(absent.any()):
            return "all" if bool(absent.all()) else "some"
        return "none" if targets.numel() else "all"

    def _has_logit_per_class(self, width: int) -> bool:
        """Whether the classes share a softmax; otherwise each target has a sigmoid of its own."""
        return self.kind == "multiclass" or (self.kind == "binary" and width == 2)

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Turn logits into probabilities; regression values stay as they are."""
        if self.kind == "regression":
            return outputs
        softmax = self._has_logit_per_class(outputs.size(1))
        return outputs.softmax(dim=1) if softmax else outputs.sigmoid()  # [rows, width]

    def logits(self, probabilities: np.ndarray) -> np.ndarray:
        """Turn probabilities, which some models return, into logits."""
        if self.kind == "regression":
            return probabilities
        softmax = self._has_logit_per_class(probabilities.shape[1])
        inside = probabilities.astype(np.float64).clip(1e-12, 1 - 1e-12)
        return np.log(inside) - (0.0 if softmax else np.log1p(-inside))

    def _class_numbers(self, labels: np.ndarray) -> np.ndarray:
        """Map label values to class numbers, -1 where a label is missing: ``[rows]``."""
        classes = np.asarray(self.classes)
        numbers = np.searchsorted(classes, labels).clip(0, len(classes) - 1)
        missing = np.isnan(labels)
        unknown = ~missing & (classes[numbers] != labels)
        if unknown.any():
            raise DataError(
                f"labels: found the value {labels[unknown][0]:g}, expected one of the classes "
                f"{[float(c) for c in self.classes]}"
            )
        return np.where(missing, -1, numbers)

    def balancing_weights(self, labels: np.ndarray) -> dict[str, Tensor]:
        """Return the arguments of :meth:`loss` that weight classes by their inverse frequency."""
        if self.kind == "multiclass":
            numbers = self._class_numbers(labels[:, 0])
            counts = np.bincount(numbers[numbers >= 0], minlength=len(self.classes))  # [classes]
            weights = counts.sum() / np.maximum(counts, 1) / max(1, (counts > 0).sum())
            return {"class_weight": torch.from_numpy(weights.astype(np.float32))}
        if self.kind == "regression":
            return {}
        targets = self.targets(labels).numpy()  # [rows, targets]
        positive, negative = (targets == 1).sum(axis=0), (targets == 0).sum(axis=0)  # [targets]
        ratios = np.where((positive > 0) & (negative > 0), negative / np.maximum(positive, 1), 1.0)
        return {"positive_weight": torch.from_numpy(ratios.astype(np.float32))}

    def scores(self, outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return every metric of this kind of task that these rows allow; outputs are logits.

        A column with no labels is left out, and so is one with a single class where a metric
        needs both; a metric that no column allows is absent from the result.
        """
        return self._scores(outputs, labels, self.metrics)

    def score(self, outputs: np.ndarray, labels: np.ndarray) -> float:
        """Return the tracked metric alone; NaN where these rows do not allow it."""
        return self._scores(outputs, labels, (self.metric,)).get(self.metric, float("nan"))

    def resample(self, outputs: np.ndarray, labels: np.ndarray, samples: np.ndarray) -> np.ndarray:
        """Return :meth:`score` of each of ``samples [count, rows]`` of the rows: ``[count]``."""
        adds_up = self.metric in ("accuracy", "mae") and self.level != "link"
        if adds_up and len(labels) < len(samples) and not np.isnan(labels).any():
            each = [self.score(outputs[i : i + 1], labels[i : i + 1]) for i in range(len(labels))]
            return np.array(each)[samples].mean(axis=1)
        return np.array([self.score(outputs[rows], labels[rows]) for rows in samples])

    def _scores(
        self, outputs: np.ndarray, labels: np.ndarray, wanted: Sequence[str]
    ) -> dict[str, float]:
        """Average each metric over the targets that allow it."""
        probabilities = self.probabilities(torch.from_numpy(outputs).double()).numpy()
        per_class = self._has_logit_per_class(outputs.shape[1])
        found = []
        for target in range(labels.shape[1]):
            present = ~np.isnan(labels[:, target])  # [rows]
            if present.any():
                cells = (present, slice(None) if per_class else target)
                values = outputs[cells], probabilities[cells], labels[present, target]
                found.append(self._target_scores(*values, wanted))
        return {
            name: float(np.mean([scores[name] for scores in found if name in scores]))
            for name in wanted
            if any(name in scores for scores in found)
        }

    def _target_scores(
        self,
        outputs: np.ndarray,
        probabilities: np.ndarray,
        labels: np.ndarray,
        wanted: Sequence[str],
    ) -> dict[str, float]:
        """Score one target whose labels ``[rows]`` are all present.

        Outputs and probabilities are ``[rows]``, or ``[rows, classes]`` after a softmax.
        """
        if self.kind == "regression":
            return regression_scores(labels, probabilities, wanted)
        truth = labels.astype(int) if self.kind == "multilabel" else self._class_numbers(labels)
        if probabilities.ndim == 2:
            chosen = probabilities.argmax(axis=1)
            if self.kind == "multiclass":
                return class_scores(truth, chosen)
            values = probabilities[:, 1]
        else:
            chosen = (probabilities > 0.5).astype(int)
            # Links are ranked by the outputs: high probabilities would round to ties at the top.
            values = outputs if self.level == "link" else probabilities
        return binary_scores(truth, chosen, values, wanted, links=self.level == "link")


def has_labels(labels: np.ndarray) -> bool:
    """Whether any of the labels ``[rows, targets]`` is present."""
    return not bool(np.isnan(labels).all())


def infer_task(
    labels: np.ndarray, level: Level, *, kind: str = "auto", metric: str | None = None
) -> Task:
    """Find the task from the labels ``[rows, targets]``; ``kind`` and ``metric`` override it.

    One column of whole numbers is a classification, several columns of 0/1 are a multi-label
    task, anything else is a regression.
    """
    if not has_labels(labels):
        raise DataError("labels: found none, expected at least one labelled row")
    num_targets = labels.shape[1]
    values = np.unique(labels[~np.isnan(labels)])
    # Links without a single negative are one class of two.
    existence = level == "link" and num_targets == 1 and set(values) <= {0.0, 1.0}
    if kind == "auto":
        kind = "binary" if existence else _guess_kind(values, num_targets, len(labels))
    if kind not in METRICS:
        raise DataError(f"task: found {kind!r}, expected one of {['auto', *METRICS]}")
    classes: tuple[float, ...] = ()
    if kind in ("binary", "multiclass"):
        if num_targets != 1:
            raise DataError(f"task {kind}: found {num_targets} target columns, expected one")
        classes = (0.0, 1.0) if existence else _classes(values)
        if kind == "binary" and len(classes) != 2:
            raise DataError(f"task binary: found {len(classes)} classes, expected two")
    if kind == "multilabel" and not set(values) <= {0.0, 1.0}:
        raise DataError(f"task multilabel: found the value {values[-1]:g}, expected 0, 1 or blank")
    valid = _metrics(kind, level)
    if metric is not None and metric not in valid:
        raise DataError(f"metric: found {metric!r}, expected one of {list(valid)}")
    return Task(
        kind=kind,  # type: ignore[arg-type]  # checked against METRICS above
        level=level,
        num_targets=num_targets,
        metric=metric or valid[0],
        classes=classes,
    )


def _metrics(kind: str, level: str) -> tuple[str, ...]:
    return LINK_METRICS if (kind, level) == ("binary", "link") else METRICS[kind]


def _guess_kind(values: np.ndarray, num_targets: int, num_rows: int) -> str:
    whole = bool((values == np.round(values)).all())
    if num_targets > 1:
        return "multilabel" if set(values) <= {0.0, 1.0} else "regression"
    # Nearly as many values as rows is a quantity that happens to be whole, such as a count.
    if not whole or len(values) > min(MAX_CLASSES, max(2, num_rows // 3)):
        return "regression"
    return "binary" if len(_classes(values)) == 2 else "multiclass"


def _classes(values: np.ndarray) -> tuple[float, ...]:
    """Return the label value of each class; labels from 0 up keep classes that no row has.

    Unless nearly all are such: a label of 10^12 is a name, not the last of so many classes.
    """
    numbered = values[0] == 0 and bool((values == np.round(values)).all())
    if numbered and values[-1] < max(_MOST_NUMBERED, 2 * len(values)):
        return tuple(float(v) for v in range(max(2, int(values[-1]) + 1)))
    return tuple(float(v) for v in values)


def label_summary(task: Task, labels: np.ndarray, names: Sequence[str]) -> list[str]:
    """Return notes on target columns that cannot be scored (no labels, or one class only)."""
    notes = []
    for column, name in zip(labels.T, names, strict=True):
        values = np.unique(column[~np.isnan(column)])
        if len(values) == 0:
            notes.append(f"target {name}: no labels, skipped")
        elif len(values) == 1 and task.kind in ("binary", "multilabel"):
            notes.append(f"target {name}: one class only ({values[0]:g}), no ranking metric")
    return notes


_Values = TypeVar("_Values", np.ndarray, Tensor)


@dataclass(frozen=True)
class TargetScale:
    """Standardizes regression targets by the training part; other targets stay as they are."""

    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @classmethod
    def of(cls, task: Task, labels: np.ndarray) -> TargetScale:
        """Return the scale of training labels ``[rows, targets]``."""
        if task.kind != "regression":
            return cls()
        means, deviations = [], []
        for column in labels.T:
            present = column[~np.isnan(column)]
            means.append(float(present.mean()) if len(present) else 0.0)
            deviation = float(present.std()) if len(present) else 1.0
            deviations.append(deviation if deviation > 0 else 1.0)
        return cls(tuple(means), tuple(deviations))

    def apply(self, targets: Tensor) -> Tensor:
        """Standardize targets ``[rows, targets]``."""
        if not self.mean:
            return targets
        mean = _constant(self.mean, targets.dtype, targets.device)
        deviation = _constant(self.deviation, targets.dtype, targets.device)
        return (targets - mean) / deviation  # [rows, targets]

    def undo(self, outputs: _Values) -> _Values:
        """Return outputs ``[rows, targets]`` in the units of the labels; arrays become float64."""
        if not self.mean:
            return outputs
        as_outputs = outputs.new_tensor if isinstance(outputs, Tensor) else np.array
        return outputs * as_outputs(self.deviation) + as_outputs(self.mean)  # [rows, targets]


@lru_cache(8)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants of every step, copied to the device once: ``[targets]``."""
    return torch.tensor(values, dtype=dtype, device=device)
