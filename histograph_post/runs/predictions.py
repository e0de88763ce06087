"""Predictions: a row per graph, node or link, their uncertainty, and the csv file of them."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ..data.tables import Table
from ..metrics import expected_calibration_error
from ..tasks import Task, has_labels
from ..utils.text import data_frame

if TYPE_CHECKING:
    import pandas


#: Rows of a csv file that are formatted at a time.
_ROWS_AT_ONCE = 10_000


@dataclass(frozen=True)
class LabelRows:
    """The names and labels of the rows of an experiment."""

    names: Sequence[str]
    #: NaN where missing: ``[rows, targets]``.
    labels: np.ndarray
    target_names: tuple[str, ...]


def prediction_columns(task: Task, target_names: Sequence[str]) -> list[str]:
    """Return the columns of a prediction."""
    if task.kind == "multiclass":
        return ["class", *(f"p_{value:g}" for value in task.classes)]
    if task.kind == "binary":
        return ["class", f"p_{task.classes[1]:g}"]
    if task.kind == "multilabel":
        return [f"p_{name}" for name in target_names]
    return list(target_names)


def prediction_cells(task: Task, outputs: np.ndarray) -> list[list[str]]:
    """Return a prediction per row: the class and its probabilities, or the values."""
    probabilities = task.probabilities(torch.from_numpy(outputs).double()).numpy()
    numbers, classes = number_cells(probabilities), likeliest_classes(task, probabilities)
    if classes is None:
        return numbers
    return [[f"{value:g}", *cells] for value, cells in zip(classes, numbers, strict=True)]


def likeliest_classes(task: Task, probabilities: np.ndarray) -> np.ndarray | None:
    """Return the label of the most likely class, ``[rows]``; None unless there are classes."""
    if task.kind == "multiclass":
        return np.asarray(task.classes)[probabilities.argmax(axis=1)]
    if task.kind == "binary":
        return np.asarray(task.classes)[(probabilities[:, -1] > 0.5).astype(int)]
    return None


def spread_columns(task: Task, target_names: Sequence[str]) -> list[str]:
    """Return the columns of :func:`member_spread`."""
    if task.kind in ("binary", "multiclass") or len(target_names) == 1:
        return ["spread"]
    return [f"spread_{name}" for name in target_names]


def member_spread(task: Task, outputs: np.ndarray) -> np.ndarray | None:
    """Return how much the heads of a run differ in each row: ``[rows, columns]``.

    The sample standard deviation over heads: of the probability of the predicted class, of the
    probability of each target, or of each value. None of a single head.

    Args:
        outputs: Of every head, ``[heads, rows, out_dim]``.
    """
    if len(outputs) < 2:
        return None
    given = torch.from_numpy(outputs).double()  # [heads, rows, out_dim]
    values = torch.stack([task.probabilities(each) for each in given]).numpy()
    if task.kind == "multiclass":
        chosen = task.probabilities(given.mean(dim=0)).argmax(dim=1)  # [rows]
        values = values[:, np.arange(values.shape[1]), chosen.numpy(), None]  # [heads, rows, 1]
    # For two classes the spread of one is that of the other.
    return values.std(axis=0, ddof=1)


def number_cells(values: np.ndarray) -> list[list[str]]:
    """Return numbers ``[rows, columns]`` as a csv file has them."""
    return [[f"{value:.6g}" for value in row] for row in values]


def row_names(
    ids: Sequence[str], label_ptr: np.ndarray, level: str, pairs: Tensor | None = None
) -> list[str]:
    """Return a name per label row: the graph's id, the node's number, or the two nodes of a link.

    Args:
        ids: One name per graph.
        label_ptr: First label row of each graph, and the number of rows: ``[num_graphs + 1]``.
        level: What a row is.
        pairs: For links, the nodes of every row, numbered within their graph: ``[2, rows]``.
    """
    if level == "graph":
        return list(ids)
    counts = np.diff(label_ptr)  # [num_graphs]
    owners = np.repeat(np.asarray(ids, dtype=object), counts)  # [rows]
    if pairs is not None:
        return [f"{name}:{u}-{v}" for name, (u, v) in zip(owners, pairs.t().tolist(), strict=True)]
    within = np.arange(len(owners)) - np.repeat(label_ptr[:-1], counts)  # [rows]
    return [f"{name}:{row}" for name, row in zip(owners, within, strict=True)]


@dataclass(frozen=True, repr=False)
class Predictions:
    """Predictions for every row of a data set, in its order."""

    task: Task
    target_names: Sequence[str]
    #: Name of each row: the id of the graph, with the number of the node or link within it.
    ids: Sequence[str]
    #: Source row of each prediction's graph (a line of a csv file), or its number: ``[rows]``.
    rows: np.ndarray
    #: Logits, or values in the units of the labels: ``[rows, out_dim]``.
    outputs: np.ndarray
    #: How much the heads of the run differ, see :func:`member_spread`: ``[rows, columns]``; None
    #: for a single head.
    spread: np.ndarray | None = None
    #: The labels that came with the data, NaN where missing: ``[rows, targets]``; None without.
    labels: np.ndarray | None = None
    #: Scores on the labelled rows; empty without labels.
    scores: Mapping[str, float] = field(default_factory=dict)
    #: What the user should know about the data and the pass.
    notes: Sequence[str] = ()
    #: SMILES of each row's graph, of molecules.
    smiles: Sequence[str] | None = None
    #: The table that the graphs were read from, if each of its rows is a graph.
    table: Table | None = None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Probabilities, or the values of a regression: float64 ``[rows, out_dim]``."""
        outputs = torch.from_numpy(self.outputs).double()
        return self.task.probabilities(outputs).numpy()

    @cached_property
    def classes(self) -> np.ndarray | None:
        """The label of the most likely class, ``[rows]``; None unless there are classes."""
        return likeliest_classes(self.task, self.probabilities)

    def __repr__(self) -> str:
        scores = ", ".join(f"{name} {value:.4f}" for name, value in list(self.scores.items())[:1])
        rows = f"{len(self)} {self.task.level}s"
        return f"Predictions({rows}{f', {scores}' if scores else ''})"

    def to_frame(self) -> pandas.DataFrame:
        """Return a row per prediction as a pandas frame (extra ``pandas``), ids first."""
        columns, *lines = self.csv_rows()
        rows = [dict(zip(columns, map(_value, line), strict=True)) for line in lines]
        for row, name in zip(rows, self.ids, strict=True):
            row["id"] = name  # never as a number
        return data_frame(rows, "id")

    def to_csv(self) -> str:
        """Return the predictions as the text of a csv file.

        If the graphs were read from a table: all of its rows in their order, its columns, then
        ``prediction``, ``probability``, ``spread`` and ``status``: ``ok``, or why there is no
        prediction. Else a row per prediction, with its labels last.
        """
        return "".join(self.csv_parts())

    def csv_parts(self) -> Iterator[str]:
        """Yield the text of the csv file, some rows at a time: there may be millions of them."""
        rows = self.csv_rows() if self.table is None else self._table_rows(self.table)
        while some := list(itertools.islice(rows, _ROWS_AT_ONCE)):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(some)
            yield text.getvalue()

    def csv_rows(self) -> Iterator[list[str]]:
        """Yield the header and the rows of a csv file without a table beside it."""
        labelled = [f"label_{name}" for name in self.target_names]
        columns = prediction_columns(self.task, self.target_names)
        if self.spread is not None:
            columns += spread_columns(self.task, self.target_names)
        named = ["id"] if self.smiles is None else ["id", "smiles"]
        yield [*named, *columns, *(labelled if self.labels is not None else ())]
        for start in range(0, len(self), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            cells = prediction_cells(self.task, self.outputs[some])
            if self.spread is not None:
                pairs = zip(cells, number_cells(self.spread[some]), strict=True)
                cells = [[*predicted, *spread] for predicted, spread in pairs]
            for row, (name, predicted) in enumerate(zip(self.ids[some], cells, strict=True), start):
                molecule = [] if self.smiles is None else [self.smiles[row]]
                truth = () if self.labels is None else self.labels[row]
                known = ["" if value != value else f"{value:g}" for value in truth]
                yield [name, *molecule, *predicted, *known]

    def _table_rows(self, table: Table) -> Iterator[list[str]]:
        names = list(self._some(np.arange(0))._added())
        status = _free("status", table.header)
        yield [*table.header, *(_free(name, table.header) for name in names), status]
        nothing = ("",) * len(names)
        places = np.full(len(table.columns[0]), -1)  # of the prediction of each row of the table
        places[self.rows] = np.arange(len(self.rows))
        for start in range(0, len(places), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            here = places[some]  # [rows]
            added = zip(*self._some(here[here >= 0])._added().values(), strict=True)
            given = zip(*(column[some] for column in table.columns), strict=True)
            for row, (place, cells) in enumerate(zip(here, given, strict=True), start):
                problem = table.problems.get(row, "ok" if place >= 0 else "not predicted")
                yield [*cells, *(next(added) if place >= 0 else nothing), problem]

    def _some(self, which: np.ndarray) -> Predictions:
        """Return the predictions of some rows."""
        spread = None if self.spread is None else self.spread[which]
        return replace(self, outputs=self.outputs[which], spread=spread)

    def _added(self) -> dict[str, list[str]]:
        """Return the columns that are added to a table, by name."""
        values = number_cells(self.probabilities.T)  # [columns, rows]
        several = self.task.kind == "multilabel" or (
            self.task.kind == "regression" and len(self.target_names) > 1
        )
        ends = [f"_{name}" for name in self.target_names] if several else [""]
        added: dict[str, list[str]] = {}
        if self.classes is not None:
            added["prediction"] = [f"{value:g}" for value in self.classes]
        if self.task.kind == "binary":
            added["probability"] = values[0]
        elif self.task.kind == "multiclass":
            added["probability"] = number_cells(self.probabilities.max(axis=1)[None])[0]
            for value, column in zip(self.task.classes, values, strict=True):
                added[f"probability_{value:g}"] = column
        elif self.task.kind == "multilabel":
            chosen = (self.probabilities > 0.5).astype(int).T  # [targets, rows]
            for end, column, row in zip(ends, values, chosen.tolist(), strict=True):
                added |= {f"prediction{end}": [str(c) for c in row], f"probability{end}": column}
        else:
            added |= {f"prediction{end}": column for end, column in zip(ends, values, strict=True)}
        # A single head has no spread: its column is empty, so that the columns stay the same.
        empty = [[""] * len(self.outputs)] * len(ends)
        spreads = empty if self.spread is None else number_cells(self.spread.T)  # [columns, rows]
        return added | {f"spread{end}": cells for end, cells in zip(ends, spreads, strict=True)}


def _value(cell: str) -> float | str | None:
    """Return the value of a cell of the csv file."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


def _free(name: str, taken: Sequence[str]) -> str:
    """Return a column name that a table does not have yet."""
    numbered = (f"{name}_{number}" for number in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)


# --- calibration: predictions with a probability of 80 % should be right four times in five
#
# Logits are divided by a temperature, which changes no order and no predicted class. It is fitted
# on validation rows, never on test rows, and stays close to 1 if there are few.

#: The lowest and the highest temperature. A small validation part that is all correct would give
#: 0, certainty, and one that is all wrong infinity.
TEMPERATURES = (0.25, 20.0)

#: Standard deviation of the prior on the logarithm of a temperature. Without a prior, temperatures
#: from fewer than a hundred validation rows mostly do harm; see docs/results.md.
EXPECTED_SPREAD = 0.3


def fit_temperature(
    task: Task, outputs: np.ndarray, labels: np.ndarray, *, spread: float = EXPECTED_SPREAD
) -> float:
    """Return the likeliest temperature given these labels; 1 where nothing can be fitted.

    It minimises the loss, summed over the rows, plus ``log(temperature)^2 / (2 spread^2)``.

    Args:
        task: A regression has no probabilities, and temperature 1.
        outputs: Logits of validation rows, ``[rows, out_dim]``.
        labels: NaN where missing, ``[rows, targets]``.
        spread: See :data:`EXPECTED_SPREAD`; infinity is no prior.
    """
    if task.kind == "regression" or not has_labels(labels):
        return 1.0
    rows = int((~np.isnan(labels)).any(axis=1).sum())
    logits, targets = torch.from_numpy(outputs).double(), task.targets(labels)
    if targets.is_floating_point():
        targets = targets.double()

    def loss(logarithm: float) -> float:
        penalty = logarithm**2 / (2 * spread**2)
        return rows * float(task.loss(logits / np.exp(logarithm), targets)) + penalty

    found = minimize_scalar(loss, bounds=np.log(TEMPERATURES), method="bounded")
    return float(np.exp(found.x)) if found.fun < loss(0.0) else 1.0


def confidences(
    task: Task, probabilities: np.ndarray, labels: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the confidence of each prediction and whether it is correct, for every target.

    Args:
        task: What is predicted: binary, multi-class or multi-label.
        probabilities: ``[rows, out_dim]``.
        labels: NaN where missing, ``[rows, targets]``; rows without a label are left out.
    """
    found = []
    for target in range(labels.shape[1]):
        present = ~np.isnan(labels[:, target])
        truth = labels[present, target]
        if task.kind == "multiclass":
            sure, chosen = probabilities[present].max(axis=1), probabilities[present].argmax(axis=1)
        else:
            second = probabilities[present, target]  # [rows]
            sure, chosen = np.maximum(second, 1 - second), (second > 0.5).astype(int)
        classes = np.array(task.classes or (0.0, 1.0))
        found.append((sure, classes[chosen] == truth))
    return found


def calibration_error(task: Task, probabilities: np.ndarray, labels: np.ndarray) -> float | None:
    """Return the expected calibration error, the mean over targets; None without labels."""
    pairs: Sequence[tuple[np.ndarray, np.ndarray]] = confidences(task, probabilities, labels)
    errors = [expected_calibration_error(sure, right) for sure, right in pairs if len(sure)]
    return float(np.mean(errors)) if errors else None
