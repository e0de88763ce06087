"""Fits of heads on a cache: built, trained together where they can be, and saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from .fits import FIT_NAME, Fit, FitSpec, load_fit, save_fit
from .head_batches import HeadBatches, HeadInputs, LoadedCache
from .heads.base import Readout
from .heads.registry import build_head, head_info
from .heads.standardize import Standardizer
from .history_rows import HistoryRows
from .resuming import drop_states, train_resumably
from .splits import Split
from .stacking import most_together
from .target_scale import TargetScale
from .tasks import Task
from .training import Trainer
from .warm_start import own_classifier


class HeadNetwork(nn.Module):
    """A readout as the training loop calls it: on rows that are standardised already."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def aux_loss(self) -> Tensor | None:
        """What the last forward pass adds to the loss, for readouts that have such a term."""
        return getattr(self.head, "aux_loss", None)

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        outputs: Tensor = self.head(
            inputs.history,
            inputs.batch,
            num_graphs=inputs.num_graphs,
            edge_index=inputs.edge_index,
        )
        if inputs.pairs is not None:
            scores: Tensor = self.head.score(outputs, inputs.pairs)  # type: ignore[operator]
            return scores.unsqueeze(-1)  # [rows, 1]
        return outputs if inputs.positions is None else outputs[inputs.positions]


@dataclass(frozen=True)
class FreshHead:
    """An untrained head, with what its rows go through before it."""

    head: nn.Module
    standardizer: Standardizer | None


def make_head(spec: FitSpec, loaded: LoadedCache, split: Split, task: Task) -> FreshHead:
    """Build the head of a fit: the same for every stage that starts from this cache."""
    standardizer = loaded.standardizer(split.train) if spec.standardize else None
    torch.manual_seed(spec.seed)
    head = build_head(spec.head, loaded.cache.widths, task.out_dim, task.level, **spec.options)
    if spec.warm_start and head_info(spec.head).warm_starts:
        classifier = own_classifier(loaded, task, TargetScale.of(task, loaded.labels[split.train]))
        if standardizer is not None:
            classifier = standardizer.fold_into(*classifier)
        head.warm_start(*classifier)  # type: ignore[operator]
    return FreshHead(head, standardizer)


def fit_heads(
    specs: Sequence[FitSpec],
    loaded: LoadedCache,
    split: Split,
    task: Task,
    folder: Path,
    *,
    device: torch.device,
    on_epoch: Callable[[Trainer], None] | None = None,
) -> list[Fit]:
    """Train one readout on one fold, or go on with it, or return it where it is done.

    Args:
        specs: Of different seeds; they are trained as one if the readout can be.
        loaded: The cache.
        split: Of the fold.
        task: What is predicted.
        folder: The run.
        device: Where to train.
        on_epoch: Told of every fit after each of its epochs.
    """
    first = specs[0]
    if all((folder / spec.folder / FIT_NAME).exists() for spec in specs):
        drop_states(folder / first.states_folder, [spec.seed for spec in specs])
        return [load_fit(spec, folder / spec.folder) for spec in specs]
    head = build_head(first.head, loaded.cache.widths, task.out_dim, task.level, **first.options)
    history = _history(head, loaded, split.train if first.standardize else None)
    needs_edges = head_info(first.head).needs_edge_index
    source = HeadBatches(loaded, history, task, device, edges=needs_edges)

    def prepare(spec: FitSpec) -> tuple[FreshHead, Trainer]:
        made = make_head(spec, loaded, split, task)
        network = HeadNetwork(made.head).to(device)
        return made, Trainer(network, source, split, task, spec.training, seed=spec.seed)

    together = 1
    if not history.read_ahead:  # memory is short where a history is read batch by batch
        largest = np.sort(np.diff(history.ptr))[-first.training.batch_size :]
        together = most_together(head, first.training, num_nodes=int(largest.sum()))
    fits = []
    for start in range(0, len(specs), together):
        chosen = specs[start : start + together]
        fits += _fit_together(chosen, prepare, folder, on_epoch)
    return fits


def _history(head: nn.Module, loaded: LoadedCache, rows: np.ndarray | None) -> HistoryRows:
    """Return what a head has to read: all nodes, or of each graph just their mean."""
    if loaded.level == "graph" and isinstance(head, Readout) and head.reads_means:
        means = loaded.means(rows)
        if means is not None:
            return means
    return loaded.history(rows)


def _fit_together(
    specs: Sequence[FitSpec],
    prepare: Callable[[FitSpec], tuple[FreshHead, Trainer]],
    folder: Path,
    on_epoch: Callable[[Trainer], None] | None,
) -> list[Fit]:
    """Train heads as one and save each; until then their states are in a folder of all seeds."""
    states_folder = folder / specs[0].states_folder
    states_folder.mkdir(parents=True, exist_ok=True)
    missing = [spec for spec in specs if not (folder / spec.folder / FIT_NAME).exists()]
    prepared = {spec.seed: prepare(spec) for spec in missing}
    trainers = [trainer for _, trainer in prepared.values()]
    seconds = train_resumably(trainers, states_folder, on_epoch=on_epoch)
    fits: dict[int, Fit] = {}
    for spec in specs:
        own = folder / spec.folder
        if spec.seed not in prepared:
            fits[spec.seed] = load_fit(spec, own)
            continue
        made, trainer = prepared[spec.seed]
        fits[spec.seed] = save_fit(
            spec, trainer, own, seconds=seconds, head=made.head, standardizer=made.standardizer
        )
    drop_states(states_folder, [spec.seed for spec in specs])
    return list(fits.values())
