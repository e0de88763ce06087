"""How much the history holds: the score of a linear map of the last 1, 2, ... layers.

A report does not train heads. A linear map is solved within seconds, and shows what each earlier
layer adds that later layers have lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..caches import Cache
from ..experiments.workers import limited_threads
from ..heads.base import Readout
from ..runs.run import Run
from ..splits import Split
from ..tasks import Task, has_labels
from ..training.solving import solve_linear
from ..utils.text import metric_name, number, plural
from .figures import CHOSEN, DASHES, RIVAL, Chart, Figure
from .layer_analysis import cache_of, owners_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Rows of each part that are used at most; of more, a random sample is drawn.
MAX_ROWS: Mapping[str, int] = {"train": 1000, "valid": 500, "test": 1000}

#: Numbers of layers that are tried at most, and folds.
_MAX_DEPTHS = 7
_MAX_FOLDS = 3

#: Penalties, strongest first: four are enough to see a trend.
_STRENGTHS = (1.0, 0.1, 0.01, 0.001)

#: Nodes that are read at a time, about.
_NODES_AT_ONCE = 50_000

_SEED = 0


@dataclass(frozen=True)
class DepthScores:
    """Validation and test score by number of layers, means over folds."""

    #: How many of the last layers.
    depths: tuple[int, ...]
    valid: tuple[float, ...]
    test: tuple[float, ...]
    num_folds: int
    #: Whether all rows of these folds were used.
    is_whole: bool


def depths_of(num_layers: int) -> tuple[int, ...]:
    """Return the numbers of layers to try, from 1 to all, denser where they are few."""
    if num_layers <= _MAX_DEPTHS:
        return tuple(range(1, num_layers + 1))
    spread = np.geomspace(1, num_layers, _MAX_DEPTHS)
    return tuple(int(value) for value in np.unique(np.round(spread).astype(int)))


def score_depths(run: Run, caches: Sequence[Cache]) -> DepthScores | None:
    """Solve a linear map of the last 1, 2, ... layers on some folds; None if it has no score."""
    task = run.task
    folds = [
        (fold, cache_of(caches, number))
        for number, fold in enumerate(run.splits.folds)
        if len(caches) in (1, len(run.splits.folds))
    ][:_MAX_FOLDS]
    if task.level == "link" or not folds or len(caches[0].widths) < 2:
        return None
    depths, found, whole = depths_of(len(caches[0].widths)), [], True
    for fold, cache in folds:
        chosen = {part: _sampled(getattr(fold, part), most) for part, most in MAX_ROWS.items()}
        whole &= all(len(chosen[part]) == len(getattr(fold, part)) for part in chosen)
        with limited_threads(1):
            scores = _score(task, cache, Split(**chosen), depths)
        if scores is None:
            return None
        found.append(scores)
    valid, test = np.mean(found, axis=0).T  # [depths] each
    return DepthScores(depths, tuple(valid.tolist()), tuple(test.tolist()), len(folds), whole)


def _sampled(rows: np.ndarray, most: int) -> np.ndarray:
    if len(rows) <= most:
        return rows
    return np.sort(np.random.default_rng(_SEED).choice(rows, most, replace=False))


def _score(
    task: Task, cache: Cache, split: Split, depths: Sequence[int]
) -> list[tuple[float, float]] | None:
    """Return the validation and test score of each number of layers on one fold."""
    rows = np.concatenate([split.train, split.valid, split.test])
    labels = cache.labels()[rows]  # [rows, targets]
    ends = np.cumsum([len(split.train), len(split.valid), len(split.test)])
    train, valid, test = np.split(np.arange(len(rows)), ends[:-1])
    if not all(len(part) and has_labels(labels[part]) for part in (train, valid, test)):
        return None
    layers, targets = layer_rows(cache, rows), task.targets(labels)
    found = []
    for depth in depths:
        kept = layers[-depth:]
        features = torch.cat(kept, dim=1)  # [rows, sum of D_l]
        widths = [layer.size(1) for layer in kept]
        solution = solve_linear(
            features, targets, task, train, valid, strengths=_STRENGTHS, widths=widths
        )
        outputs = solution(features[torch.from_numpy(test)])
        scores = task.scores(solution.scale.undo(outputs.double().numpy()), labels[test])
        best = solution.path[solution.chosen].valid_scores
        if task.metric not in scores or task.metric not in best:
            return None
        found.append((best[task.metric], scores[task.metric]))
    return found


def layer_rows(cache: Cache, rows: np.ndarray) -> list[Tensor]:
    """Return the features of label rows in each layer: means over a graph's nodes, or a node's own.

    Args:
        cache: Of level graph or node.
        rows: Label rows, in any order.

    Returns:
        A tensor ``[rows, D_l]`` per layer, single precision.
    """
    graphs, place = np.unique(owners_of(cache, rows), return_inverse=True)  # [graphs], [rows]
    if cache.manifest.layout.level == "node":
        found = [torch.empty(len(rows), width) for width in cache.widths]
        for number, graph in enumerate(graphs):
            members = np.flatnonzero(place == number)
            within = torch.from_numpy(rows[members] - cache.label_ptr[graph])
            layers = Readout.layers(cache[int(graph)].history)
            for layer, values in zip(layers, found, strict=True):
                values[torch.from_numpy(members)] = layer[within].float()
        return found
    means: list[list[Tensor]] = []
    blocks = np.cumsum(cache.num_nodes[graphs]) // _NODES_AT_ONCE  # [graphs]
    for block in np.unique(blocks):
        batch = cache.gather(graphs[blocks == block])
        lengths = batch.ptr.diff()  # [graphs of the block]
        means.append(
            [
                torch.segment_reduce(layer.float(), "mean", lengths=lengths)
                for layer in Readout.layers(batch.history)
            ]
        )
    return [torch.cat(parts)[torch.from_numpy(place)] for parts in zip(*means, strict=True)]


def depth_figure(run: Run, found: DepthScores) -> Figure:
    """Draw the score against the number of layers that are kept."""
    metric = metric_name(run.results["metric"])

    def draw(axes: Axes) -> None:
        lines = {"test": found.test, "validation": found.valid}
        for at, (name, values) in enumerate(lines.items()):
            colour, marker = (CHOSEN, RIVAL)[at], "os"[at]
            axes.plot(
                found.depths, values, color=colour, linestyle=DASHES[at], marker=marker, label=name
            )
        if found.depths[-1] > len(found.depths):
            axes.set_xscale("log")
        axes.set_xticks(found.depths, [str(depth) for depth in found.depths])
        axes.minorticks_off()
        axes.set_xlabel("layers kept, counted from the last")
        axes.set_ylabel(metric)
        axes.legend(loc="best")

    what = "means of a graph's nodes" if run.task.level == "graph" else "activations of a node"
    sampled = "" if found.is_whole else "; large parts by a random sample of their rows"
    shown = ", ".join(
        f"{plural(depth, 'layer')} {number(value)}"
        for depth, value in zip(found.depths, found.test, strict=True)
    )
    return Figure(
        name="depth",
        title=f"{metric[0].upper()}{metric[1:]} against number of layers kept",
        caption=f"Fitted anew for each number of layers: a linear map of the {what} in the last 1, "
        f"2, ... layers; {plural(found.num_folds, 'fold')}{sampled}. A flat line means that the "
        "last layer alone holds all that such a map can use.",
        alternative=f"Test {metric} of a linear map of the last layers: {shown}.",
        picture=Chart(draw),
    )
