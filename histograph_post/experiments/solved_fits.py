"""Fits of readouts that are solved: one linear map of features that nothing is learned of.

The features of all rows are collected once, through the readout's own pooling. The optimum does not
depend on a seed, so that the seeds of a fold share one solution.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..heads.base import Readout
from ..heads.standardize import Standardizer
from ..runs.fits import (
    FIT_NAME,
    HEAD_NAME,
    OUTPUTS_NAME,
    Fit,
    FitSpec,
    Trained,
    find_fit,
    load_fit,
    read_fit,
    save_fit,
)
from ..runs.folder import BrokenFitError
from ..splits import Split
from ..tasks import Task
from ..training.loop import OnEpoch, Progress, Source, Step, Trainer
from ..training.solving import STRENGTHS, PathPoint, solve_linear
from ..utils.files import copy_file, write_json

#: Share of the memory that training may take for the features of all rows, and once more for those
#: that are solved; more are kept in a file, and a part of the training rows is drawn.
FEATURES_SHARE = 1 / 4

#: Rows that are solved whatever they take: fewer would not do.
FEWEST_ROWS = 2000

#: Rows of features that are classified at a time.
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class SolvedRows:
    """What a classifier is solved on.

    Args:
        features: Gives what it reads of every label row, ``[rows, width]``.
        labels: ``[rows, targets]``.
        split: Of the fold.
        task: What is predicted.
        allowed: Bytes that training may take.
    """

    features: Callable[[], Tensor]
    labels: np.ndarray
    split: Split
    task: Task
    allowed: int


def solve_fit(
    spec: FitSpec,
    head: Readout,
    standardizer: Standardizer | None,
    given: SolvedRows,
    folder: Path,
    *,
    on_epoch: OnEpoch | None = None,
) -> Fit:
    """Solve a readout on one fold, or take over what was solved for another seed.

    Args:
        spec: What is fitted.
        head: The readout.
        standardizer: What brings the layers to one scale before it.
        given: What it is solved on.
        folder: The run.
        on_epoch: Told after every strength of the penalty.
    """
    before = fit_of_another_seed(spec, folder)
    if before is not None:
        return before
    started = time.perf_counter()
    task, labels = given.task, given.labels
    rows = FeatureRows(given.features(), labels, task.targets(labels))
    trainer = SolvedTrainer(head.cpu(), rows, given.split, task, spec)
    strength = trainer.solve(given.allowed, on_epoch)
    return save_fit(
        spec,
        Trained.of(trainer),
        folder / spec.folder,
        seconds=(time.perf_counter() - started) / trainer.progress.epoch,
        head=head,
        standardizer=standardizer,
        strength=strength,
    )


def fit_of_another_seed(spec: FitSpec, folder: Path) -> Fit | None:
    """Return a fit that does not depend on its seed, if the run has it for this one or another.

    It is copied; what says that a fit is done comes last.
    """
    place = folder / spec.folder
    seeds = sorted(place.parent.glob(f"fold-{spec.fold}-seed-*"))
    source = next((found for found in seeds if _is_done(spec, found)), None)
    if source is None:
        return None
    if source != place:
        place.mkdir(parents=True, exist_ok=True)
        for name in (HEAD_NAME, OUTPUTS_NAME):
            if (source / name).is_file():
                copy_file(source / name, place / name)
        write_json(place / FIT_NAME, {**read_fit(source), "seed": spec.seed})
    return load_fit(spec, place)


def _is_done(spec: FitSpec, place: Path) -> bool:
    """Whether there is a fit that differs in nothing but its seed."""
    try:
        return find_fit(replace(spec, seed=int(place.name.rpartition("-")[2])), place) is not None
    except (BrokenFitError, ValueError):
        return False


class FeatureRows:
    """A :class:`~histograph_post.training.loop.Source` of rows that are ready for the classifier.

    Args:
        features: Of every label row, ``[rows, width]``.
        labels: ``[rows, targets]``.
        targets: From :meth:`~histograph_post.tasks.Task.targets`.
    """

    def __init__(self, features: Tensor, labels: np.ndarray, targets: Tensor) -> None:
        self.features, self.labels, self.targets = features, labels, targets

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return -(-len(rows) // batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches, shuffled if there is a seed."""
        if seed is not None:
            rows = np.random.default_rng(seed).permutation(rows)
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size].copy()  # torch refuses one that is read-only
            yield Step(self.features[part], self.targets[part], part)


@torch.no_grad()
def collect_features(
    head: Readout, source: Source, rows: np.ndarray, *, batch_size: int, allowed: int
) -> Tensor:
    """Return what a readout's classifier reads of each of these label rows.

    Args:
        head: The readout, of level ``graph`` or ``node``.
        source: Batches of the cache, on the readout's device.
        rows: Label rows that are of interest; the others are zero.
        batch_size: Graphs at a time.
        allowed: Bytes that training may take; features that take more than their share of it are
            put into a temporary file.

    Returns:
        ``[all label rows, width]`` in single precision.
    """
    shape = (len(source.labels), head.width)
    if 4 * shape[0] * shape[1] <= FEATURES_SHARE * allowed:
        features = torch.zeros(shape)
    else:
        with tempfile.TemporaryFile() as file:  # is gone with the array that it is mapped to
            features = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))
    head.eval()
    for step in source.batches(rows, batch_size=batch_size, seed=None):
        inputs = step.inputs
        found = head.classifier_inputs(
            inputs.history,
            inputs.members,
            num_graphs=inputs.num_graphs,
            edge_index=inputs.edge_index,
        )  # [num_graphs, width] or [num_nodes, width]
        if inputs.positions is not None:
            found = found[inputs.positions]  # [rows, width]
        features[step.rows] = found.float().cpu()
    return features


def rows_that_fit(rows: np.ndarray, width: int, allowed: int) -> np.ndarray:
    """Return rows whose features take their share of memory: all, or a part drawn at random."""
    return draw_rows(rows, max(FEWEST_ROWS, int(FEATURES_SHARE * allowed) // (4 * width)))


def draw_rows(rows: np.ndarray, most: int) -> np.ndarray:
    """Return rows, or as many of them as there may be, drawn at random."""
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))


class SolvedTrainer(Trainer):
    """What a training is to everything around it, for a classifier that is solved.

    An epoch is a strength of the penalty.

    Args:
        head: The readout.
        source: Its features.
        split: Which rows train and validate.
        task: The loss and the metric.
        spec: What is fitted.
    """

    def __init__(
        self, head: Readout, source: FeatureRows, split: Split, task: Task, spec: FitSpec
    ) -> None:
        options = replace(spec.training, epochs=len(STRENGTHS), batch_size=ROWS_AT_ONCE)
        super().__init__(head.classifier, source, split, task, options, seed=spec.seed)
        self._head, self._features = head, source

    def solve(self, allowed: int, on_epoch: OnEpoch | None) -> float:
        """Solve the classifier; return the strength of the penalty that was chosen.

        Args:
            allowed: Bytes that training may take.
            on_epoch: Told after every strength.
        """
        train, valid = (
            rows_that_fit(rows, self._head.width, allowed)
            for rows in (self.split.train, self.split.valid)
        )

        def on_point(point: PathPoint) -> None:
            self.progress.log.append({"epoch": self.progress.epoch, **point.measured()})
            self.progress.epoch += 1
            if on_epoch is not None:
                on_epoch(self)

        found = solve_linear(
            self._features.features,
            self._features.targets,
            self.task,
            train,
            valid,
            widths=self._head.feature_widths,
            balance=self.options.balance,
            on_point=on_point,
        )
        self.scale = found.scale
        self.progress = Progress(
            epoch=len(found.path), best_epoch=found.chosen, log=self.progress.log
        )
        with torch.no_grad():
            self.network.weight.copy_(found.weight)  # type: ignore[operator]
            self.network.bias.copy_(found.bias)  # type: ignore[operator]
        return found.strength
