"""Layer weights by class: which graphs to average over."""

from __future__ import annotations

import numpy as np

from ..tasks import Task
from ..utils.text import number

#: Classes that are drawn, the most frequent first: more lines cannot be told apart.
MAX_CLASSES = 6


def group_weights(weights: np.ndarray, labels: np.ndarray, task: Task) -> dict[str, np.ndarray]:
    """Return the weights of the graphs of each class, or of each third of the values.

    Rows of a graph share its weights, so at node and link level there is one group: all graphs.

    Args:
        weights: Weight of each layer, ``[num_graphs, layers]``.
        labels: One row per graph, NaN where missing, ``[num_graphs, targets]``.
        task: What the labels mean.
    """
    everything = {"all graphs": weights}
    if task.level != "graph" or task.kind == "multilabel" or task.num_targets > 1:
        return everything
    values = labels[:, 0]
    present = ~np.isnan(values)
    if task.kind == "regression":
        if present.sum() < 3:
            return everything
        low, high = np.quantile(values[present], [1 / 3, 2 / 3])
        groups = {
            f"below {number(low)}": values < low,
            f"{number(low)} to {number(high)}": (values >= low) & (values <= high),
            f"above {number(high)}": values > high,
        }
    else:
        counts = {value: int((values == value).sum()) for value in task.classes}
        frequent = sorted(counts, key=lambda value: -counts[value])[:MAX_CLASSES]
        groups = {f"class {value:g}": values == value for value in sorted(frequent)}
    found = {name: weights[members] for name, members in groups.items() if members.any()}
    return found or everything
