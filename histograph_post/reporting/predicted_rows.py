"""The predictions row by row: each test row once, with its name, as a table to sort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..tasks import Task
from ..utils.text import MISSING, number
from .molecules import Molecule
from .outcomes import Outcome, row_losses
from .page import Table

#: Rows of the table, the worst ones; ``predictions.csv`` has all.
MAX_ROWS = 500


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the test rows of all folds, each once: of one in several test parts, the mean."""
    rows = np.concatenate([outcome.rows for outcome in outcomes])
    predicted = np.concatenate([outcome.predicted for outcome in outcomes])  # [all rows, outputs]
    labels = np.concatenate([outcome.labels for outcome in outcomes])
    names = [name for outcome in outcomes for name in outcome.ids]
    unique, first, place = np.unique(rows, return_index=True, return_inverse=True)
    spreads = [outcome.spread for outcome in outcomes if outcome.spread is not None]

    def mean(values: np.ndarray) -> np.ndarray:
        sums = np.zeros((len(unique), *values.shape[1:]))
        np.add.at(sums, place, values)
        return sums / np.bincount(place).reshape(-1, *[1] * (values.ndim - 1))

    return replace(
        outcomes[0],
        rows=unique,
        ids=[names[at] for at in first],
        predicted=mean(predicted),
        labels=labels[first],
        spread=mean(np.concatenate(spreads)) if len(spreads) == len(outcomes) else None,
    )


def row_title(name: str, level: str, num_graphs: int) -> str:
    """Return what a row is called in a heading: ``graph 7``, ``node 12``, ``nodes 3 and 8``."""
    if level == "graph":
        return f"graph {name}" if name.isdigit() else name
    graph, _, within = name.rpartition(":")
    several = f"{row_title(graph, 'graph', num_graphs)}, " if num_graphs > 1 else ""
    first, dash, second = within.partition("-")
    return f"{several}nodes {first} and {second}" if dash else f"{several}node {first}"


def predictions_table(
    outcome: Outcome, task: Task, molecules: Mapping[int, Molecule], file: str
) -> Table | None:
    """Return the test rows, those that were predicted worst first.

    Args:
        outcome: Every test row once.
        task: What is predicted.
        molecules: Row -> its molecule, where it is one.
        file: What holds all predictions.
    """
    losses = row_losses(outcome, task)
    labelled = np.flatnonzero(~np.isnan(losses))
    order = labelled[np.argsort(-losses[labelled], kind="stable")]
    if not len(order):
        return None
    shown = order[:MAX_ROWS]
    found = {int(at): molecules.get(int(outcome.rows[at])) for at in shown}
    has_smiles = any(found.values())
    columns: list[str] = ["molecule" if has_smiles else task.level]
    columns += [*(["SMILES"] if has_smiles else []), *_columns(task)]
    columns += [] if outcome.spread is None else ["spread"]
    names = _names(outcome.ids, task)
    rows = []
    for at in shown.tolist():
        molecule = found[at]
        name = names[at] if molecule is None else molecule.name or names[at]
        smiles = [MISSING if molecule is None else molecule.smiles] if has_smiles else []
        spread = [] if outcome.spread is None else [f"{outcome.spread[at]:.3f}"]
        rows.append([name, *smiles, *_cells(outcome, task, at, float(losses[at])), *spread])
    kept = "" if len(shown) == len(order) else f"{len(shown):,} of {len(order):,} are listed; "
    return Table(
        columns,
        rows,
        caption="Test rows, the worst predictions first; click a heading to sort. "
        + ("" if outcome.spread is None else "Spread: the deviation over seeds. ")
        + f"{kept}{file} has all of them.",
        sortable=True,
    )


def _names(ids: Sequence[str], task: Task) -> Sequence[str]:
    """Return the ids of rows; those of nodes and links without their graph, if there is one."""
    graphs = {name.rpartition(":")[0] for name in ids} if task.level != "graph" else set()
    return [name.rpartition(":")[2] for name in ids] if len(graphs) == 1 else ids


def _columns(task: Task) -> list[str]:
    if task.kind == "binary":
        return ["true", "predicted", f"p({task.classes[1]:g})", "log loss"]
    if task.kind == "multiclass":
        return ["true", "predicted", "p(predicted)", "p(true)", "log loss"]
    if task.kind == "multilabel":
        return ["labels", "right", "mean log loss"]
    if task.num_targets > 1:
        return ["mean absolute error"]
    return ["true", "predicted", "error"]


def _cells(outcome: Outcome, task: Task, at: int, loss: float) -> list[str]:
    labels, predicted = outcome.labels[at], outcome.predicted[at]
    if task.kind == "binary":
        chosen = task.classes[int(predicted[-1] > 0.5)]
        return [f"{labels[0]:g}", f"{chosen:g}", f"{predicted[-1]:.3f}", number(loss)]
    if task.kind == "multiclass":
        truth, chosen = int(np.searchsorted(task.classes, labels[0])), int(predicted.argmax())
        shares = [f"{predicted[chosen]:.3f}", f"{predicted[truth]:.3f}"]
        return [f"{labels[0]:g}", f"{task.classes[chosen]:g}", *shares, number(loss)]
    present = ~np.isnan(labels)
    if task.kind == "multilabel":
        right = int(((predicted > 0.5) == (labels == 1))[present].sum())
        return [str(int(present.sum())), str(right), number(loss)]
    if task.num_targets > 1:
        return [number(loss)]
    return [number(labels[0]), number(predicted[0]), number(predicted[0] - labels[0])]
