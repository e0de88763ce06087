"""Fits of heads on a cache: built, trained and saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.histograph.accelerate import threads
from ..heads.registry import RIVALS, build_reader, head_info
from ..heads.standardize import Standardizer
from ..runs.fits import Fit, FitSpec
from ..splits import Split
from ..tasks import TargetScale, Task
from ..training.head_batches import HeadBatches, LentRows, LoadedCache
from ..training.history_rows import HistoryRows
from ..training.loop import Trainer
from ..training.networks import HeadNetwork
from .fits import train_fit
from .rivals import fit_rival
from .solved_fits import solve_fit

# --- start a head where the checkpoint stands: recover the checkpoint's own classifier from a cache

#: The largest error of the recovered classifier, relative to the spread of the outputs, that
#: rounding in single precision explains.
TOLERANCE = 1e-3


def own_classifier(loaded: LoadedCache, task: Task, scale: TargetScale) -> tuple[Tensor, Tensor]:
    """Return weight ``[out_dim, D_last]`` and bias ``[out_dim]`` of the checkpoint's classifier.

    They give what the network learns: regression targets at their training ``scale``.

    Raises:
        ConfigError: where the checkpoint's own readout is not a linear map of the (mean) last
            layer, or gives no outputs that fit the task.
    """
    where = f"{loaded.cache.path}: warm start"
    outputs = loaded.own_logits(task)  # [rows, width]
    if outputs is None:
        raise ConfigError(f"{where}: found no outputs of the model's own that fit the task")
    rows = loaded.last_layer().double().numpy()  # [num_nodes, D_last]
    if task.level == "graph":
        sizes = np.diff(loaded.ptr)
        rows = np.add.reduceat(rows, loaded.ptr[:-1]) / sizes[:, None]  # [num_graphs, D_last]
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
    if scale.mean:
        weight = weight / np.array(scale.deviation)[:, None]
        bias = (bias - np.array(scale.mean)) / np.array(scale.deviation)
    return torch.from_numpy(weight).float(), torch.from_numpy(bias).float()


@dataclass(frozen=True)
class FreshHead:
    """An untrained head, with what its rows go through before it."""

    head: Readout
    standardizer: Standardizer | None


def make_head(spec: FitSpec, loaded: LoadedCache, split: Split, task: Task) -> FreshHead:
    """Build the head of a fit: the same for every stage that starts from this cache."""
    standardizer = loaded.standardizer(split.train) if spec.standardize else None
    torch.manual_seed(spec.seed)
    head = build_reader(spec.head, loaded.cache.widths, task.out_dim, task.level, **spec.options)
    if spec.warm_start and head_info(spec.head).warm_starts:
        classifier = own_classifier(loaded, task, TargetScale.of(task, loaded.labels[split.train]))
        if standardizer is not None:
            classifier = standardizer.fold_into(*classifier)
        head.warm_start(*classifier)  # type: ignore[operator]
    return FreshHead(head, standardizer)


def fit_head(
    spec: FitSpec,
    loaded: LoadedCache,
    split: Split,
    task: Task,
    folder: Path,
    *,
    device: torch.device,
    on_epoch: Callable[[Trainer], None] | None = None,
) -> Fit:
    """Train one readout on one fold, or go on with it; or solve it, or fit a rival.

    Args:
        spec: What is fitted.
        loaded: The cache.
        split: Of the fold.
        task: What is predicted.
        folder: The run.
        device: Where to train.
        on_epoch: Told after every epoch.
    """
    made = make_head(spec, loaded, split, task)
    history = _history(made.head, loaded, split.train if spec.standardize else None)
    needs_edges = head_info(spec.head).needs_edge_index
    source = HeadBatches(loaded, history, task, device, edges=needs_edges)
    network = HeadNetwork(made.head).to(device)
    if spec.head in RIVALS:
        allowed = loaded.allowed_memory()
        return fit_rival(spec, made.head, source, split, task, folder, allowed=allowed)
    if made.head.is_solved:
        return solve_fit(
            spec,
            made.head,
            made.standardizer,
            source,
            split,
            task,
            folder,
            allowed=loaded.allowed_memory(),
            on_epoch=on_epoch,
        )
    trainer = Trainer(network, source, split, task, spec.training, seed=spec.seed)
    with threads(made.head):
        return train_fit(
            spec,
            trainer,
            folder / spec.folder,
            head=made.head,
            standardizer=made.standardizer,
            on_epoch=on_epoch,
        )


def _history(head: nn.Module, loaded: LoadedCache, rows: np.ndarray | None) -> HistoryRows:
    """Return what a head has to read: all nodes, or of each graph just their mean."""
    means = loaded.means(rows) if _reads_means(head, loaded) else None
    return loaded.history(rows) if means is None else means


def _reads_means(head: nn.Module, loaded: LoadedCache) -> bool:
    return loaded.level == "graph" and isinstance(head, Readout) and head.reads_means


def lend_rows(spec: FitSpec, loaded: LoadedCache, split: Split, task: Task) -> LentRows:
    """Return what :func:`fit_head` reads in another process."""
    with torch.random.fork_rng(devices=[]):
        head = build_reader(
            spec.head, loaded.cache.widths, task.out_dim, task.level, **spec.options
        )
    rows = split.train if spec.standardize else None
    return loaded.lend(rows, means=_reads_means(head, loaded))
