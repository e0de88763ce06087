"""The predictions of a run for its test rows: by fold, as a table, and the best and worst ones."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch

from ..caches import Cache
from ..errors import ConfigError, HistographError
from ..experiments.results import BASELINES
from ..runs.fits import read_outputs
from ..runs.predictions import prediction_columns
from ..runs.run import PREDICTIONS_NAME, Run
from ..runs.verdict import OWN
from ..tasks import Task
from ..utils.files import read_regular
from ..utils.text import MISSING, number
from .layer_analysis import owners_of
from .molecules import Molecule
from .page import Section, Table


def readout_to_beat(run: Run) -> str | None:
    """Return the readout to beat: the retrained last layer, or the own one trained beside it."""
    names = (*BASELINES, OWN)
    return next((name for name in names if name in run.readouts and name != run.head), None)


#: The column with the standard deviation over heads, where that is one number per row.
SPREAD = "spread"


@dataclass(frozen=True)
class Outcome:
    """The predictions of a readout for the test rows of one fold."""

    fold: int
    #: The seeds whose outputs were averaged.
    seeds: tuple[int, ...]
    #: Label rows, ``[rows]``.
    rows: np.ndarray
    #: Name of each row.
    ids: Sequence[str]
    #: Probabilities, or values in the units of the labels: ``[rows, outputs]``.
    predicted: np.ndarray
    #: NaN where missing: ``[rows, targets]``.
    labels: np.ndarray
    #: Standard deviation over seeds, ``[rows]``; None where it is not one number per row.
    spread: np.ndarray | None = None


def chosen_outcomes(run: Run) -> list[Outcome]:
    """Return the predictions of the run's head for the test rows of every fold."""
    return outcomes_of(run, run.head)


@lru_cache(maxsize=1)  # for all figures of one report
def _written_outcomes(run: Run) -> list[Outcome]:
    """Read the stored predictions of the readout that the run predicts with.

    Runs of earlier versions have a line per seed: these are averaged.
    """
    path = run.folder / PREDICTIONS_NAME
    if not os.path.lexists(path):
        return []
    run.require_own(PREDICTIONS_NAME)
    try:
        return _parse_outcomes(run, read_regular(path).decode())
    except HistographError:
        raise
    except (ValueError, IndexError, csv.Error) as error:
        raise ConfigError(f"{path}: found no table of this run's test rows ({error})") from None


def _parse_outcomes(run: Run, text: str) -> list[Outcome]:
    columns, *lines = csv.reader(io.StringIO(text, newline=""))
    has_seeds, seeds = columns[2] == "seed", dict[int, list[int]]()
    for fit in run.results["fits"]:
        if fit["head"] == run.results["head"]:
            seeds.setdefault(fit["fold"], []).append(fit["seed"])
    groups: dict[int, dict[str, list[list[str]]]] = {}
    for line in lines:
        groups.setdefault(int(line[1]), {}).setdefault(line[2] * has_seeds, []).append(line)
    num_targets, width = run.task.num_targets, run.task.out_dim
    # id, fold, (seed,) (class,) predictions, (spread,) labels
    targets = [name.removeprefix("label_") for name in columns[-num_targets:]]
    expected = prediction_columns(run.task, targets)
    if columns[2 + has_seeds :][: len(expected)] != expected:
        raise ValueError(f"its columns are not {', '.join(expected)}, as the task has them")
    first = 2 + has_seeds + (run.task.kind in ("binary", "multiclass"))
    spread = columns.index(SPREAD) if SPREAD in columns else None
    found = []
    for fold, by_seed in groups.items():
        members, rows = next(iter(by_seed.values())), run.splits.folds[fold].test
        if len(members) != len(rows):
            raise ValueError(f"{len(members)} rows of fold {fold}, expected {len(rows)}")
        each = [_numbers([line[first : first + width] for line in own]) for own in by_seed.values()]
        found.append(
            Outcome(
                fold=fold,
                seeds=tuple(seeds.get(fold, ())),
                rows=rows,
                ids=[line[0] for line in members],
                predicted=np.mean(each, axis=0),  # [rows, outputs]
                labels=_numbers([line[-num_targets:] for line in members]),
                spread=_numbers([[line[spread]] for line in members])[:, 0] if spread else None,
            )
        )
    return found


def outcomes_of(run: Run, readout: str) -> list[Outcome]:
    """Return the predictions of a readout for the test rows of every fold, its seeds averaged.

    Those of a readout that the run does not predict with come from its fits, where these are kept.
    """
    if readout == run.results["head"]:
        return _written_outcomes(run)
    found = []
    temperature = run.results["readouts"][readout].get("temperature", 1.0)
    for outcome in _written_outcomes(run):
        each = []
        for seed in outcome.seeds:
            try:
                stored = read_outputs(run.fit_folder(readout, outcome.fold, seed))
            except (OSError, HistographError):
                continue
            wide = stored["outputs"].shape[1] == outcome.predicted.shape[1]
            if wide and np.array_equal(stored["rows"], outcome.rows):
                each.append(torch.from_numpy(stored["outputs"]).double())  # [rows, outputs]
        if each:
            mean = torch.stack(each).mean(dim=0) / temperature  # [rows, outputs]
            predicted = run.task.probabilities(mean).numpy()
            found.append(replace(outcome, predicted=predicted, spread=None))
    return found


def _numbers(cells: list[list[str]]) -> np.ndarray:
    return np.array([[float(cell) if cell else np.nan for cell in row] for row in cells])


# --- the best and the worst predictions

#: How many of the best, and how many of the worst.
NUM_SHOWN = 3

#: Larger graphs are not drawn: nodes would overlap.
MAX_DRAWN_NODES = 70

_TINY = 1e-12


@dataclass(frozen=True)
class Example:
    """A test row that is drawn."""

    #: ``best`` or ``worst``, and its place among those, from 1.
    rank: str
    place: int
    name: str
    #: The label row, and its graph.
    row: int
    graph: int
    #: The label and the prediction, in words.
    text: str


def row_losses(outcome: Outcome, task: Task) -> np.ndarray:
    """Return the loss of each row; NaN for one without a label: ``[rows]``.

    The mean log loss over its labels, or the mean absolute error.
    """
    labels, predicted = outcome.labels, outcome.predicted
    if task.kind == "multiclass":
        present = ~np.isnan(labels[:, 0])
        truth = np.searchsorted(task.classes, np.where(present, labels[:, 0], task.classes[0]))
        given = predicted[np.arange(len(truth)), truth]
        return np.where(present, -np.log(np.maximum(given, _TINY)), np.nan)
    if task.kind == "regression":
        losses = np.abs(predicted - labels)  # [rows, targets]
    else:
        truth = labels == (task.classes[1] if task.kind == "binary" else 1.0)
        given = np.where(truth, predicted, 1 - predicted)  # [rows, targets]
        losses = np.where(np.isnan(labels), np.nan, -np.log(np.maximum(given, _TINY)))
    counts = (~np.isnan(losses)).sum(axis=1)
    return np.where(counts > 0, np.nansum(losses, axis=1) / np.maximum(counts, 1), np.nan)


def choose_examples(outcome: Outcome, task: Task, cache: Cache) -> list[Example]:
    """Return the rows with the best and the worst predictions, of graphs small enough to draw."""
    losses = row_losses(outcome, task)
    graphs = owners_of(cache, outcome.rows)  # [rows]
    eligible = ~np.isnan(losses)
    if task.level == "graph":
        eligible &= cache.num_nodes[graphs] <= MAX_DRAWN_NODES
    order = np.flatnonzero(eligible)[np.argsort(losses[eligible], kind="stable")]
    count = min(NUM_SHOWN, len(order) // 2 or len(order))
    chosen = [("best", place + 1, order[place]) for place in range(count)]
    if len(order) > 1:
        chosen += [("worst", place + 1, order[-1 - place]) for place in range(count)]
    return [
        Example(
            rank=rank,
            place=place,
            name=outcome.ids[at],
            row=int(outcome.rows[at]),
            graph=int(graphs[at]),
            text=_text(outcome, task, int(at)),
        )
        for rank, place, at in chosen
    ]


def _text(outcome: Outcome, task: Task, row: int) -> str:
    labels, predicted = outcome.labels[row], outcome.predicted[row]
    if task.kind == "binary":
        return f"true {labels[0]:g}, p({task.classes[1]:g}) = {predicted[-1]:.3f}"
    if task.kind == "multiclass":
        chosen = task.classes[int(predicted.argmax())]
        return f"true {labels[0]:g}, predicted {chosen:g} (p = {predicted.max():.3f})"
    present = ~np.isnan(labels)
    if task.kind == "multilabel":
        right = int(((predicted > 0.5) == (labels == 1))[present].sum())
        return f"{right} of {int(present.sum())} labels right"
    truth = ", ".join(number(value) for value in labels[present][:3])
    values = ", ".join(number(value) for value in predicted[present][:3])
    return f"true {truth}, predicted {values}"


# --- the table of predictions

#: Rows of the table at most, the worst ones; ``predictions.csv`` has all.
MAX_ROWS = 500


def combined(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the test rows of all folds, each once; one in several test parts is averaged."""
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
    """Return the heading of a row: ``graph 7``, ``node 12``, ``nodes 3 and 8``."""
    if level == "graph":
        return f"graph {name}" if name.isdigit() else name
    graph, _, within = name.rpartition(":")
    several = f"{row_title(graph, 'graph', num_graphs)}, " if num_graphs > 1 else ""
    first, dash, second = within.partition("-")
    return f"{several}nodes {first} and {second}" if dash else f"{several}node {first}"


def worst_first(losses: np.ndarray) -> np.ndarray:
    """Return the places of the rows that have a label, those with the largest loss first."""
    labelled = np.flatnonzero(~np.isnan(losses))
    return labelled[np.argsort(-losses[labelled], kind="stable")]


def rows_section(run: Run, molecules: Mapping[int, Molecule]) -> Section:
    """Return the test rows as a sortable table, the worst predictions first.

    Args:
        molecules: Label row -> its molecule, where it is one.
    """
    section = Section("rows", "Every prediction")
    outcomes, task = chosen_outcomes(run), run.task
    if not outcomes:
        return section
    outcome = combined(outcomes)
    losses = row_losses(outcome, task)
    order = worst_first(losses)
    if not len(order):
        return section
    shown = order[:MAX_ROWS]
    found = {int(at): molecules.get(int(outcome.rows[at])) for at in shown}
    has_smiles = any(found.values())
    names = _names(outcome.ids, task)
    rows: list[dict[str, str]] = []  # column -> cell
    for at in shown.tolist():
        molecule = found[at]
        row: dict[str, str] = {"molecule" if has_smiles else task.level: names[at]}
        if molecule is not None and molecule.name:
            row["molecule"] = molecule.name
        if has_smiles:
            row["SMILES"] = MISSING if molecule is None else molecule.smiles
        row |= _cells(outcome, task, at, float(losses[at]))
        if outcome.spread is not None:
            row["spread"] = f"{outcome.spread[at]:.3f}"
        rows.append(row)
    kept = "" if len(shown) == len(order) else f"{len(shown):,} of {len(order):,} are listed; "
    table = Table(
        list(rows[0]),
        [list(row.values()) for row in rows],
        caption="Test rows, the worst predictions first. "
        + ("" if outcome.spread is None else "Spread: the standard deviation over seeds. ")
        + f"{kept}{PREDICTIONS_NAME} has all of them.",
        sortable=True,
    )
    return replace(section, tables=[table])


def _names(ids: Sequence[str], task: Task) -> Sequence[str]:
    """Return the ids of rows; those of nodes and links without their graph, if there is one."""
    graphs = {name.rpartition(":")[0] for name in ids} if task.level != "graph" else set()
    return [name.rpartition(":")[2] for name in ids] if len(graphs) == 1 else ids


def _cells(outcome: Outcome, task: Task, at: int, loss: float) -> dict[str, str]:
    """Return the cells of a row, by column."""
    labels, predicted = outcome.labels[at], outcome.predicted[at]
    if task.kind == "binary":
        likely = predicted[-1]
        chosen = f"{task.classes[int(likely > 0.5)]:g}"
        shares = {"predicted": chosen, f"p({task.classes[1]:g})": f"{likely:.3f}"}
        return {"true": f"{labels[0]:g}", **shares, "log loss": number(loss)}
    if task.kind == "multiclass":
        truth, best = int(np.searchsorted(task.classes, labels[0])), int(predicted.argmax())
        shares = {"p(predicted)": f"{predicted[best]:.3f}", "p(true)": f"{predicted[truth]:.3f}"}
        classes = {"true": f"{labels[0]:g}", "predicted": f"{task.classes[best]:g}"}
        return {**classes, **shares, "log loss": number(loss)}
    present = ~np.isnan(labels)
    if task.kind == "multilabel":
        right = int(((predicted > 0.5) == (labels == 1))[present].sum())
        counts = {"labels": str(int(present.sum())), "right": str(right)}
        return {**counts, "mean log loss": number(loss)}
    if task.num_targets > 1:
        return {"mean absolute error": number(loss)}
    error = number(predicted[0] - labels[0])
    return {"true": number(labels[0]), "predicted": number(predicted[0]), "error": error}
