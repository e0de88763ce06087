"""What a head says of new graphs: a row per graph, node or link, and the csv file of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..experiments.results import prediction_cells, prediction_columns
from ..tasks import Task


@dataclass(frozen=True)
class Predictions:
    """Predictions for every row of a data set, in its order."""

    task: Task
    target_names: Sequence[str]
    #: Name of each row: the id of the graph, with the number of the node or link within it.
    ids: Sequence[str]
    #: Source row of each prediction's graph (a line of a csv file), or its place: ``[rows]``.
    rows: np.ndarray
    #: Logits, or values in the units of the labels: ``[rows, out_dim]``.
    outputs: np.ndarray
    #: The labels that came with the data, NaN where missing: ``[rows, targets]``; None without.
    labels: np.ndarray | None = None
    #: Scores on the labelled rows; empty without labels.
    scores: Mapping[str, float] = field(default_factory=dict)
    #: What a user should know about the data and the pass.
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Probabilities, or the values of a regression: float64 ``[rows, out_dim]``."""
        outputs = torch.from_numpy(self.outputs).double()
        return self.task.probabilities(outputs).numpy()

    @cached_property
    def classes(self) -> np.ndarray | None:
        """The label value of the likeliest class, ``[rows]``; None unless there are classes."""
        if self.task.kind == "multiclass":
            chosen = self.probabilities.argmax(axis=1)
        elif self.task.kind == "binary":
            chosen = (self.probabilities[:, 0] > 0.5).astype(int)
        else:
            return None
        return np.asarray(self.task.classes)[chosen]

    def to_csv(self) -> str:
        """Return the predictions as the text of a csv file, labels last where there are any."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        labelled = [f"label_{name}" for name in self.target_names]
        columns = prediction_columns(self.task, self.target_names)
        writer.writerow(["id", *columns, *(labelled if self.labels is not None else ())])
        cells = prediction_cells(self.task, self.outputs)
        for row, (name, predicted) in enumerate(zip(self.ids, cells, strict=True)):
            truth = () if self.labels is None else self.labels[row]
            writer.writerow(
                [name, *predicted, *("" if value != value else f"{value:g}" for value in truth)]
            )
        return text.getvalue()
