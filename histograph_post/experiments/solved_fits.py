"""Fits of solved readouts: one linear map of features without trainable parameters.

The features of all rows are computed once, by the readout's own pooling. The optimum does not
depend on a seed, so that the seeds of a fold share one solution.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..heads.base import Readout
from ..heads.standardize import LimitedLinear, Standardizer
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
from ..tasks import Task
from ..training.loop import OnEpoch, Progress, Source
from ..training.solving import STRENGTHS, PathPoint, solve_linear
from ..utils.files import copy_file, write_json
from .folds import Fold

#: Share of the memory of training for the features of all rows, and once more for those that are
#: solved; larger features are kept in a file, and a part of the training rows is drawn.
FEATURES_SHARE = 1 / 4

#: Rows that are solved however much memory they take.
FEWEST_ROWS = 2000

#: Rows of features that are classified at a time.
ROWS_AT_ONCE = 4096


def solve_fit(
    spec: FitSpec,
    head: Readout,
    standardizer: Standardizer | None,
    features: Callable[[], Tensor],
    fold: Fold,
    task: Task,
    folder: Path,
    *,
    on_epoch: OnEpoch | None = None,
) -> Fit:
    """Solve a readout on one fold; an epoch is a strength of the penalty.

    Args:
        features: Computes the inputs of its classifier for all label rows, ``[rows, width]``.
    """
    loaded, split, started = fold.loaded, fold.split, time.perf_counter()
    labels, progress = loaded.labels, Progress()
    known = features()
    classifier: Any = head.cpu().classifier

    def on_point(point: PathPoint) -> None:
        progress.log.append({"epoch": progress.epoch, **point.measured()})
        progress.epoch += 1
        progress.share_done = progress.epoch / len(STRENGTHS)
        if on_epoch is not None:
            on_epoch(progress)

    found = solve_linear(
        known,
        task.targets(labels),
        task,
        *(rows_that_fit(rows, head.width, loaded.memory.allowed) for rows in split.parts[:2]),
        widths=head.feature_widths,
        balance=spec.training.balance,
        on_point=on_point,
    )
    log = [{"epoch": epoch, **point.measured()} for epoch, point in enumerate(found.path)]
    with torch.no_grad():
        classifier.weight.copy_(found.weight)
        classifier.bias.copy_(found.bias)
    classifier.limits = found.limits

    @torch.no_grad()
    def predict(rows: np.ndarray) -> np.ndarray:
        parts = np.array_split(rows, range(ROWS_AT_ONCE, len(rows), ROWS_AT_ONCE))
        outputs = torch.cat([classifier(known[part.copy()]).double() for part in parts])
        return found.scale.undo(outputs.numpy())  # [rows, out_dim]

    trained = Trained(
        task=task,
        split=split,
        labels=labels,
        scale=found.scale,
        progress=Progress(len(log), best_epoch=found.chosen, log=log),
        num_parameters=sum(each.numel() for each in classifier.parameters()),
        predict=predict,
    )
    return save_fit(
        spec,
        trained,
        folder / spec.folder,
        seconds=(time.perf_counter() - started) / len(found.path),
        head=head,
        standardizer=standardizer,
        strength=found.strength,
    )


def fit_of_another_seed(spec: FitSpec, folder: Path) -> Fit | None:
    """Return a fit that does not depend on its seed, if the run has it for this seed or another.

    It is copied, ``fit.json`` last, which marks a fit as done.
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
    """Whether there is a fit that differs only in its seed."""
    try:
        return find_fit(replace(spec, seed=int(place.name.rpartition("-")[2])), place) is not None
    except (BrokenFitError, ValueError):
        return False


@torch.no_grad()
def collect_features(
    head: Readout, source: Source, rows: np.ndarray, *, batch_size: int, allowed: int
) -> Tensor:
    """Return the inputs of a readout's classifier for these label rows.

    Args:
        rows: Label rows to compute; the others are zero.
        allowed: Bytes that training may take; features that exceed their share of it are kept in
            a temporary file.

    Returns:
        ``[all label rows, width]`` in single precision.
    """
    shape = (len(source.labels), head.width)
    if 4 * shape[0] * shape[1] <= FEATURES_SHARE * allowed:
        features = torch.zeros(shape)
    else:
        with tempfile.TemporaryFile() as file:  # deleted with the array that maps it
            features = torch.from_numpy(np.memmap(file, np.float32, "w+", shape=shape))
    for places, found in _feature_batches(head, source, rows, batch_size):
        features[places] = found.float().cpu()
    return features


def limit(head: Readout, source: Source, rows: np.ndarray, *, batch_size: int) -> None:
    """Limit what the classifier of a readout reads to its range in these training rows."""
    limited = [module.limits for module in head.modules() if isinstance(module, LimitedLinear)]
    for _, found in _feature_batches(head, source, rows, batch_size):
        for limits in limited:
            limits.include(found)


@torch.no_grad()
def _feature_batches(
    head: Readout, source: Source, rows: np.ndarray, batch_size: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield label rows, and the inputs of the classifier for them: ``[rows, width]``."""
    head.eval()
    for step in source.batches(rows, batch_size=batch_size, seed=None):
        inputs = step.inputs
        found = head.classifier_inputs(
            inputs.history,
            inputs.batch,
            num_graphs=inputs.num_graphs,
            edge_index=inputs.edge_index,
        )  # [num_graphs, width] or [num_nodes, width]
        if inputs.positions is not None:
            found = found[inputs.positions]  # [rows, width]
        yield step.rows, found


def rows_that_fit(rows: np.ndarray, width: int, allowed: int) -> np.ndarray:
    """Return rows whose features fit into their share of memory, drawn at random if too many."""
    return draw_rows(rows, max(FEWEST_ROWS, int(FEATURES_SHARE * allowed) // (4 * width)))


def draw_rows(rows: np.ndarray, most: int) -> np.ndarray:
    """Return rows, at most so many, drawn at random."""
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(0).choice(rows, most, replace=False))
