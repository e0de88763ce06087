"""The scale on which a network learns the targets of a regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from .tasks import Task

_Values = TypeVar("_Values", np.ndarray, Tensor)


@dataclass(frozen=True)
class TargetScale:
    """Regression targets are learned at mean 0 and deviation 1 of the training part.

    Other tasks pass through unchanged.
    """

    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    @classmethod
    def of(cls, task: Task, labels: np.ndarray) -> TargetScale:
        """Take the scale of the training labels ``[rows, targets]``."""
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
        """Turn labels into what the network learns."""
        if not self.mean:
            return targets
        mean, deviation = targets.new_tensor(self.mean), targets.new_tensor(self.deviation)
        return (targets - mean) / deviation  # [rows, targets]

    def undo(self, outputs: _Values) -> _Values:
        """Turn what the network gives into the units of the labels; arrays become double."""
        if not self.mean:
            return outputs
        as_outputs = outputs.new_tensor if isinstance(outputs, Tensor) else np.array
        return outputs * as_outputs(self.deviation) + as_outputs(self.mean)  # [rows, targets]
