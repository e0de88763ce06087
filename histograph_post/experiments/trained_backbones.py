"""What the stages that train a backbone with its head share: a fit, and a checkpoint per fold."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..capture import CapturePlan
from ..data import DataSpec, GraphDataset
from ..errors import ConfigError
from ..models import ModelSpec
from ..models.checkpoints import save_weights, weights_sha256
from ..runs.fits import Fit, FitSpec
from ..runs.run import MODEL_NAME
from ..splits import Split, Splits
from ..tasks import Task
from ..training.graph_batches import GraphBatches
from ..training.loop import Trainer
from ..training.networks import HistoryNetwork, checkpoint_layers
from ..utils.files import atomic_path
from .fits import train_fit
from .results import choose_fit, named
from .trained_folds import TrainedFold, fold_name, save_fold
from .unfreezing import BackboneOptions, Movement, Unfreezing, parameters_of


@dataclass(frozen=True)
class NetworkParts:
    """A backbone and a head that are to be trained together."""

    backbone: nn.Module
    capture: CapturePlan
    #: Layer of each parameter, from :func:`~.gradients.layers_of_parameters`.
    layers: Mapping[str, int]
    head: nn.Module
    standardizer: nn.Module | None


def fit_network(
    spec: FitSpec,
    parts: NetworkParts,
    options: BackboneOptions,
    dataset: GraphDataset,
    split: Split,
    task: Task,
    folder: Path,
    *,
    device: torch.device,
    before: nn.Module,
    on_epoch: Callable[[Trainer], None] | None = None,
) -> Fit:
    """Train a backbone and its head on one fold, or go on with it.

    Args:
        spec: What is fitted.
        parts: Backbone and head as they start.
        options: What moves of the backbone, and how.
        dataset: The graphs.
        split: Which label rows train, validate and test.
        task: The loss and the tracked metric.
        folder: Of the fit.
        device: Where to train.
        before: The backbone as it starts, which this leaves alone, to say what moved.
        on_epoch: Told after every epoch.
    """
    unfreezing = Unfreezing(parts.backbone, parts.layers, len(parts.capture.points), options)
    if options.checkpoint_layers:
        checkpoint_layers(parts.backbone, parts.capture)
    network = HistoryNetwork(
        parts.backbone,
        parts.capture,
        parts.head,
        parts.standardizer,
        statistics=options.bn,
        autocast=options.autocast,
    ).to(device)
    asked = Movement.asked(parts.backbone, [*unfreezing.layers, *unfreezing.statistics], parts.head)
    head_before = parameters_of(parts.head)
    head_parameters = [p for p in parts.head.parameters() if p.requires_grad]
    if not head_parameters:
        raise ConfigError(f"head {spec.head!r}: found no trainable parameters, expected some")
    trainer = Trainer(
        network,
        GraphBatches(dataset, task, device),
        split,
        task,
        spec.training,
        seed=spec.seed,
        parameters=[
            {"params": head_parameters, "lr": spec.training.lr},
            {"params": unfreezing.parameters, "lr": options.lr},
        ],
        before_epoch=unfreezing.enter,
    )

    def save_backbone(folder: Path) -> dict[str, Any]:
        state = parts.backbone.state_dict()
        save_weights(state, folder / MODEL_NAME)
        done = Movement.done(parts.backbone, before, parts.head, head_before)
        return {
            "weights_sha256": weights_sha256(state),
            "asked": asked.to_json(),
            "moved": done.to_json(),
        }

    return train_fit(
        spec,
        trainer,
        folder,
        head=parts.head,
        standardizer=parts.standardizer,
        on_epoch=on_epoch,
        save_backbone=save_backbone,
    )


def write_folds(
    folder: Path,
    fits: Sequence[Fit],
    chosen: str,
    task: Task,
    splits: Splits,
    model: ModelSpec,
    data: DataSpec,
) -> None:
    """Write the best backbone of every fold (of its seeds, by validation) as a checkpoint.

    Args:
        folder: The run.
        fits: Its fits.
        chosen: The name of those that trained a backbone.
        task: Ranks them.
        splits: Of all folds.
        model: The model as the user names it.
        data: The data as the user names them.
    """
    tuned = named(fits, chosen)
    for number in dict.fromkeys(fit.spec.fold for fit in tuned):
        members = [fit for fit in tuned if fit.spec.fold == number]
        best = choose_fit(members, chosen, task)
        assert best.backbone is not None  # of fits of that name
        place = folder / fold_name(number)
        place.mkdir(exist_ok=True)
        with atomic_path(place / MODEL_NAME) as partial:
            shutil.copyfile(folder / best.spec.folder / MODEL_NAME, partial)
        trained = TrainedFold(
            fold=number,
            seed=best.spec.seed,
            best_epoch=best.best_epoch,
            epochs=best.num_epochs,
            scores=best.scores,
            num_parameters=best.num_parameters,
            weights_sha256=best.backbone["weights_sha256"],
            head=best.spec.head,
        )
        own_split = replace(splits, folds=(splits.folds[number],))
        save_fold(place, trained, model, data, own_split, best.log)
