"""Fits of heads on a cache: built, trained and saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.histograph import HistoGraphHead
from ..heads.histograph.accelerate import threads
from ..heads.histograph.node_attention import resolve_auto
from ..heads.ragged import Graphs
from ..heads.readouts import Probe
from ..heads.registry import RIVALS, build_reader, head_info
from ..heads.standardize import Standardizer
from ..runs.fits import Fit, FitSpec, train_fit
from ..tasks import TargetScale, Task
from ..training.batches import HeadBatches, HeadNetwork
from ..training.loaded_cache import LoadedCache, SharedRows
from ..training.loop import OnEpoch, Trainer
from ..training.node_batches import NodeBatches, goes_by_nodes, whole_graph
from ..training.solving import Solution, solve_linear
from .folds import Fold
from .rivals import fit_rival
from .solved_fits import collect_features, draw_rows, fit_of_another_seed, limit, solve_fit

# --- warm start: recover the checkpoint's own classifier from a cache

#: Most training rows that a linear start is solved on, and most validation rows that choose its
#: strength. Of more, so many are drawn: still a few hundred for each of its weights.
PROBE_ROWS = 1 << 17

#: The largest error of the recovered classifier, relative to the spread of the outputs, that
#: rounding in single precision explains.
TOLERANCE = 1e-3


def own_classifier(
    loaded: LoadedCache, task: Task, train: np.ndarray, *, standardize: bool
) -> tuple[Tensor, Tensor]:
    """Return weight ``[out_dim, D_last]`` and bias ``[out_dim]`` of the checkpoint's classifier.

    They predict what the network learns, regression targets at the scale of the training rows, from
    the last layer, standardised by those rows or not.

    Raises:
        ConfigError: if the checkpoint's own readout is not a linear map of the (mean) last
            layer, or its outputs do not fit the task.
    """
    where = f"{loaded.cache.path}: warm start"
    outputs = loaded.own_logits(task)  # [rows, width]
    if outputs is None:
        raise ConfigError(f"{where}: found no outputs of the model's own that fit the task")
    rows = loaded.last_layer().double().numpy()  # [num_nodes, D_last]
    if task.level == "graph":
        sizes = np.diff(loaded.ptr)
        rows = np.add.reduceat(rows, loaded.ptr[:-1]) / sizes[:, None]  # [num_graphs, D_last]
    drawn = draw_rows(np.arange(len(rows)), PROBE_ROWS)
    rows, outputs = rows[drawn], outputs[drawn]
    padded = np.hstack([rows, np.ones((len(rows), 1))])  # [rows, D_last + 1]
    solution = np.linalg.lstsq(padded, outputs.astype(np.float64), rcond=1e-7)[0]
    error = float(np.abs(padded @ solution - outputs).max())
    spread = float(outputs.std())
    if not error <= TOLERANCE * float(np.abs(outputs).max()):
        raise ConfigError(
            f"{where}: the checkpoint's own readout is no linear map of the last layer's "
            f"{'mean' if task.level == 'graph' else 'rows'}: found an error of {error:.2g}, "
            f"expected rounding (outputs spread by {spread:.2g})"
        )
    weight, bias = solution[:-1].T, solution[-1]  # [width, D_last], [width]
    if task.kind == "binary" and len(bias) == 2:
        # The head has one logit where the checkpoint has two: their difference.
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    scale = TargetScale.of(task, loaded.labels[train])
    if scale.mean:
        weight = weight / np.array(scale.deviation)[:, None]
        bias = (bias - np.array(scale.mean)) / np.array(scale.deviation)
    found = torch.from_numpy(weight).float(), torch.from_numpy(bias).float()
    return loaded.standardizer(train).fold_into(*found) if standardize else found


@dataclass(frozen=True)
class FreshHead:
    """An untrained head, and the standardisation of its inputs."""

    head: Readout
    standardizer: Standardizer | None
    #: Whether it starts at a solved probe, so that its initial weights predict already.
    solved: bool


def make_head(spec: FitSpec, fold: Fold, task: Task) -> FreshHead:
    """Build the head of a fit: the same for every stage that starts from this cache."""
    loaded, train = fold.loaded, fold.split.train
    standardizer = loaded.standardizer(train) if spec.standardize else None
    torch.manual_seed(spec.seed)
    head = _build(spec, loaded, task)
    if spec.warm_start and head_info(spec.head).warm_starts:
        classifier = own_classifier(loaded, task, train, standardize=spec.standardize)
        head.warm_start(*classifier)  # type: ignore[operator]
    solved = _start_solved(head, spec, fold, task)
    return FreshHead(head, standardizer, solved)


def _build(spec: FitSpec, loaded: LoadedCache, task: Task) -> Readout:
    options = dict(spec.options)
    if issubclass(head_info(spec.head).load(), HistoGraphHead):
        options = resolve_auto(options, int(loaded.cache.num_nodes.min()))
    return build_reader(spec.head, loaded.cache.widths, task.out_dim, task.level, **options)


def fit_head(
    spec: FitSpec,
    fold: Fold,
    task: Task,
    folder: Path,
    *,
    device: torch.device,
    on_epoch: OnEpoch | None = None,
) -> Fit:
    """Train one readout on one fold, or resume that; or solve it, or fit a rival.

    A solution does not depend on the seed: it is copied from another seed that has it.
    """
    loaded, split, made = fold.loaded, fold.split, make_head(spec, fold, task)
    rows = split.train if spec.standardize else None
    network = HeadNetwork(made.head).to(device)

    def batches(**given: Any) -> HeadBatches | NodeBatches:
        means = loaded.means(rows) if _reads_means(made.head, loaded) else None
        history, edges = means or loaded.history(rows), made.head.needs_edge_index
        if goes_by_nodes(made.head, loaded):
            whole = whole_graph(made.head, loaded, rows, history)
            return NodeBatches(loaded, history, task, device, edges=edges, whole=whole)
        return HeadBatches(loaded, history, task, device, edges=edges, **given)

    def features() -> Tensor:
        found = _known_features(made.head, loaded, rows)
        if found is not None:
            return found
        parts, size = np.concatenate(split.parts), spec.training.batch_size
        allowed = loaded.memory.allowed
        return collect_features(made.head, batches(), parts, batch_size=size, allowed=allowed)

    if made.head.is_solved:
        before = fit_of_another_seed(spec, folder)
        if before is not None:
            return before
        if spec.head in RIVALS:
            return fit_rival(spec, made.head, features, fold, task, folder)
        given = (features, fold, task, folder)
        return solve_fit(spec, made.head, made.standardizer, *given, on_epoch=on_epoch)
    source = batches(statistics=loaded.statistics(rows) if _reads_statistics(made.head) else None)
    if made.head.is_fixed and task.level == "graph":
        limit(made.head, source, split.train, batch_size=spec.training.batch_size)
    trainer = Trainer(
        network, source, split, task, spec.training, seed=spec.seed, starts_solved=made.solved
    )
    with threads(made.head):
        return train_fit(
            spec,
            trainer,
            folder / spec.folder,
            head=made.head,
            standardizer=made.standardizer,
            on_epoch=on_epoch,
        )


def _start_solved(head: nn.Module, spec: FitSpec, fold: Fold, task: Task) -> bool:
    """Start a HistoGraph head at the solved probe of its statistics; return whether it does.

    For nodes, at the checkpoint's own classifier unless the probe has the better validation score.
    Not with a warm start, which is another one, and not for links.
    """
    if not isinstance(head, HistoGraphHead):
        return False
    loaded, split, options = fold.loaded, fold.split, head.options
    rows = split.train if spec.standardize else None
    statistics, balance = head.statistics, spec.training.balance

    def scaling() -> dict[str, Tensor]:
        assert statistics is not None
        kept = sum(head.kept_dims)
        graphs = np.unique(np.searchsorted(loaded.label_ptr, split.train, side="right") - 1)
        pieces = loaded.statistics_pieces(rows, graphs)
        statistics.fit((values[..., -kept:], sizes) for values, sizes in pieces)
        return statistics.state_dict()

    def solve() -> tuple[Tensor, Tensor] | None:
        described = _describe(head, loaded, rows)  # [rows, described_dim]
        if described is None:
            return None
        targets = task.targets(loaded.labels)
        parts = [draw_rows(part, PROBE_ROWS) for part in (split.train, split.valid)]
        found = solve_linear(described, targets, task, *parts, balance=balance, scaled=True)
        own = _own_start(head, fold, task, found, standardize=rows is not None)
        return own or (found.weight, found.bias)

    if statistics is not None:
        key: Any = ("scaling", options.statistics, options.history_layers)
        statistics.load_state_dict(loaded.once(rows, key, scaling))
    if not options.probe or spec.warm_start or task.level == "link":
        return False
    key = ("probe", options.mix, options.statistics, options.history_layers, balance)
    found = loaded.once(rows, key, solve)
    if found is not None:
        head.start_at(*found)
    return found is not None


def _own_start(
    head: HistoGraphHead, fold: Fold, task: Task, probe: Solution, *, standardize: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the checkpoint's own classifier of nodes as a map of their description.

    It was trained together with the layers; a probe is solved on nodes that these were fitted to.
    None where the probe has the better validation score, or where there is no linear classifier.
    """
    loaded, split = fold.loaded, fold.split
    outputs = loaded.own_logits(task) if task.level == "node" else None  # [rows, width]
    if outputs is None:
        return None
    score = task.score(outputs[split.valid], loaded.labels[split.valid])
    solved = probe.path[probe.chosen].valid_scores.get(task.metric, math.nan)
    if not (score >= solved if task.higher_is_better else score <= solved):
        return None
    try:
        last, bias = own_classifier(loaded, task, split.train, standardize=standardize)
    except ConfigError:
        return None
    weight = torch.zeros_like(probe.weight)
    weight[:, head.last_columns] = last
    return weight, bias


def _describe(head: HistoGraphHead, loaded: LoadedCache, rows: np.ndarray | None) -> Tensor | None:
    """Return a head's features of every label row before attention; None if too large."""
    if loaded.level == "node":
        if not loaded.memory.histories_that_fit():
            return None
        history = loaded.history(rows).select(np.arange(len(loaded.cache)))
        layers, graphs = head.read(history, None, None)
        return torch.cat(head.describe(layers, graphs), dim=1)  # [num_nodes, described_dim]
    statistics = loaded.all_statistics(rows)  # [num_graphs, 3, sum(D_l)]
    if statistics is None:
        return None
    sizes = np.diff(loaded.ptr)
    graphs = Graphs(torch.empty(0, dtype=torch.long), torch.tensor(sizes), sizes)
    (described,), _ = head.describe_by(statistics, graphs)
    return described  # [num_graphs, described_dim]


def _known_features(head: Readout, loaded: LoadedCache, rows: np.ndarray | None) -> Tensor | None:
    """Return the inputs of a probe's classifier, from the statistics of a fold; None if unknown."""
    if not (isinstance(head, Probe) and head.level == "graph"):
        return None
    statistics = loaded.all_statistics(rows)  # [num_graphs, 3, sum(D_l)]
    return None if statistics is None else head.of_statistics(statistics)  # [num_graphs, width]


def _reads_statistics(head: nn.Module) -> bool:
    return isinstance(head, HistoGraphHead | Probe) and head.level == "graph"


def _reads_means(head: nn.Module, loaded: LoadedCache) -> bool:
    return loaded.level == "graph" and isinstance(head, Readout) and head.reads_means


def share_rows(spec: FitSpec, fold: Fold, task: Task, *, history: bool = True) -> SharedRows:
    """Return what :func:`fit_head` reads in another process.

    Args:
        history: Whether to include the activations, which :func:`make_head` alone does not read.
    """
    loaded = fold.loaded
    with torch.random.fork_rng(devices=[]):
        head = _build(spec, loaded, task)
    rows = fold.split.train if spec.standardize else None
    # A probe reads nothing else if its statistics fit into memory.
    if isinstance(head, Probe) and _reads_statistics(head):
        history = history and loaded.all_statistics(rows) is None
    shared = loaded.share(
        rows,
        history=history,
        means=_reads_means(head, loaded),
        statistics=_reads_statistics(head),
    )
    _start_solved(head, spec, fold, task)  # once, here, for all seeds
    if history and goes_by_nodes(head, loaded):
        whole_graph(head, loaded, rows, loaded.history(rows))
    return shared
