"""Pretraining: train a backbone from random weights with its own readout, a checkpoint per fold.

config.toml, run.json, splits.json   as in every run (see run.py), over all folds
results.json                         scores per fold, means and deviations
fold-0/ ...                          checkpoints that need nothing else (see checkpoints.py)
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ..data import DataSpec, GraphDataset
from ..errors import ConfigError, ModelError
from ..metrics import summarize
from ..models import BUILT_IN, ModelSpec
from ..models.builtin_models import GNN
from ..models.checkpoints import weights_sha256
from ..runs.fits import Fit, FitSpec
from ..runs.folder import SEAL, check_seal
from ..runs.predictions import LabelRows, row_names
from ..runs.run import MODEL_NAME, RESULTS_NAME, read_json
from ..runs.verdict import OWN
from ..splits import PARTS, Splits, resolve_splits
from ..tasks import TargetScale, infer_task
from ..training.loop import STATE_NAME, OnEpoch, Trainer, train_resumably
from ..training.networks import BackboneNetwork, GraphBatches
from ..training.options import TrainingOptions
from ..training.ranks import current_ranks
from ..utils.files import save_tensors
from .backbones import output_width, untrained_model
from .checkpoints import fold_folders, fold_name, load_fold, read_fold, save_fold
from .options import ExperimentOptions
from .stage import Stage


@dataclass(frozen=True)
class Pretraining(Stage):
    """A backbone, the data and the folds: everything that a pretraining does."""

    trains_backbone: ClassVar[bool] = True

    #: Model and data as the user names them.
    model_spec: ModelSpec
    data_spec: DataSpec
    #: The untrained backbone; every fold trains a copy of it.
    model: nn.Module
    dataset: GraphDataset
    training: TrainingOptions
    #: The folds that are trained; the others are left to other calls.
    folds: tuple[int, ...]

    @property
    def seed(self) -> int:
        """Of initial weights, batches and dropout; the same for every fold."""
        return self.seeds[0]

    @property
    def labels_width(self) -> int:
        """The number of outputs that a model is built for, whatever its own readout has."""
        return infer_task(self.dataset.labels(), self.dataset.level).out_dim

    # Another process rebuilds the model: a class from a user's file cannot be imported there.
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "model": self.model.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        model = untrained_model(self.model_spec, self.dataset, self.labels_width, seed=self.seed)
        model.load_state_dict(state["model"])
        vars(self)["model"] = model

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            "stage": "pretrain",
            "model": self.model_spec.spec,
            "model_args": dict(self.model_spec.args),
            "data": self.dataset.fingerprint(),
            "task": self.task.to_json(),
            "splits": self.splits.to_json(),
            "training": asdict(self.training),
            "seed": self.seed,
            # Changes with the code of a user's model, as far as initial weights can tell.
            "untrained_weights": weights_sha256(self.model.state_dict()),
        }

    @property
    def num_planned(self) -> int:
        """The number of folds, whichever this call trains."""
        return len(self.splits.folds)

    def fits(self) -> list[FitSpec]:
        """Return a fit for each fold that is asked for."""
        return [
            FitSpec(OWN, {}, self.training, fold, self.seed, standardize=False)
            for fold in self.folds
        ]

    def place(self, spec: FitSpec) -> Path:
        """Return the folder of a fold inside the run's."""
        return Path(fold_name(spec.fold))

    def find(self, spec: FitSpec, folder: Path) -> Fit | None:
        """Return the fit of a fold if it is done."""
        place = folder / self.place(spec)
        if not (place / RESULTS_NAME).is_file():
            return None
        check_seal(place, read_json(place, RESULTS_NAME), spec.plan)
        (place / STATE_NAME).unlink(missing_ok=True)  # of a run killed at its very end
        return load_fold(spec, place)

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train the backbone on one fold."""
        folder = folder / self.place(spec)
        folder.mkdir(parents=True, exist_ok=True)
        model = copy.deepcopy(self.model)
        trainer = self.trainer(model, spec, device)
        if not isinstance(model, GNN):
            # The checkpoint has to predict in the units of the labels, and a user's model has no
            # known layer that could undo a scale: it is trained without one.
            trainer.scale = TargetScale()
        seconds = train_resumably(trainer, folder, plan=spec.plan, on_epoch=on_epoch)
        if isinstance(model, GNN):
            _undo_scale(model, trainer.scale)
            trainer.scale = TargetScale()
        fit = Fit(
            spec=spec,
            scores={
                part: self.task.scores(trainer.predict(rows), trainer.source.labels[rows])
                for part, rows in zip(PARTS, trainer.split.parts, strict=True)
                if len(rows)
            },
            best_epoch=trainer.progress.best_epoch,
            num_epochs=trainer.progress.epoch,
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            seconds_per_epoch=seconds,
            log=trainer.progress.log,
            diverged=trainer.progress.diverged,
            backbone={"weights_sha256": weights_sha256(model.state_dict())},
        )
        save_tensors(folder / MODEL_NAME, model.state_dict())
        save_fold(folder, fit, None, self.model_spec, self.data_spec, self.splits)
        (folder / STATE_NAME).unlink(missing_ok=True)
        return fit

    def trainer(self, model: nn.Module, spec: FitSpec, device: torch.device) -> Trainer:
        """Return what trains a model with its own readout on the fold of a fit."""
        source = GraphBatches(self.dataset, self.task, device, current_ranks())
        network, split = BackboneNetwork(model).to(device), self.splits.folds[spec.fold]
        return Trainer(network, source, split, self.task, spec.training, seed=spec.seed)

    def notes(self) -> list[str]:
        """Return what the user should know about the data."""
        return list(self.dataset.notes)

    def label_rows(self) -> LabelRows:
        """Return the label rows of the data."""
        dataset = self.dataset
        return LabelRows(
            names=row_names(dataset.ids, dataset.label_ptr, self.task.level),
            labels=dataset.labels(),
            target_names=tuple(dataset.target_names),
        )

    def write(self, folder: Path, fits: Sequence[Fit], chosen: str | None) -> dict[str, Any]:
        """Return the scores of all folds that are done, by this call or others."""
        metric = self.task.metric
        done = [path for path in fold_folders(folder) if (path / RESULTS_NAME).is_file()]
        folds = [read_fold(path) for path in done]
        summaries = {}
        for part in ("test", "valid"):
            found = [scores for fold in folds if metric in (scores := fold["scores"].get(part, {}))]
            summary = summarize([scores[metric] for scores in found])
            summaries[part] = None if summary is None else summary.to_json()
        return {
            "model": self.model_spec.spec,
            "data": self.data_spec.spec,
            "task": self.task.to_json(),
            "metric": metric,
            "higher_is_better": self.task.higher_is_better,
            **summaries,
            "folds": [
                {name: value for name, value in fold.items() if name not in SEAL} for fold in folds
            ],
        }


@torch.no_grad()
def _undo_scale(model: GNN, scale: TargetScale) -> None:
    """Scale the last linear map of a built-in model to the units of the labels."""
    if not scale.mean:
        return
    last = [module for module in model.classifier.modules() if isinstance(module, nn.Linear)][-1]
    deviation = last.weight.new_tensor(scale.deviation)  # [targets]
    last.weight.mul_(deviation.unsqueeze(-1))  # [targets, hidden]
    last.bias.mul_(deviation).add_(last.bias.new_tensor(scale.mean))  # [targets]


def plan_pretraining(
    model: str,
    data: str,
    options: ExperimentOptions,
    *,
    model_args: Mapping[str, Any] | None = None,
    data_args: Mapping[str, Any] | None = None,
    data_root: str | Path | None = None,
    own_readout: bool = True,
    only: Collection[int] = (),
) -> Pretraining:
    """Load the data, split it, and build a backbone that predicts what the labels ask for.

    Args:
        model: A built-in name, ``file.py:Name`` or ``package.module:Name``.
        data: A data specification, such as ``tu:PROTEINS``.
        options: What all experiments share; the first seed, 0 by default, is that of initial
            weights, batches and dropout, the same for every fold.
        model_args: Arguments of the model.
        data_args: Arguments of the data.
        data_root: An offline copy of the data.
        own_readout: Whether the model has to predict by itself what the labels ask for.
        only: Train these folds and leave the others to other calls; all by default.
    """
    model_spec = ModelSpec(model, dict(model_args or {}), Path(MODEL_NAME))
    root = None if data_root is None else Path(data_root)
    data_spec = DataSpec(data, dict(data_args or {}), root)
    dataset = data_spec.load()
    if dataset.level == "link" and own_readout:
        raise ConfigError(f"{data}: found link labels, expected graph or node labels")
    if dataset.level != "graph" and model in BUILT_IN:
        model_spec = replace(model_spec, args={"pool": "none", **model_spec.args})
    metric, seeds = options.metric, tuple(options.seeds or (0,))[:1]
    task = infer_task(dataset.labels(), dataset.level, metric=metric)
    built = untrained_model(model_spec, dataset, task.out_dim, seed=seeds[0])
    width = output_width(built, dataset, task) if own_readout else task.out_dim
    if task.kind == "binary" and width == 2:
        # The other way to write a binary classifier: a column per class.
        task = infer_task(dataset.labels(), dataset.level, kind="multiclass", metric=metric)
    if width != task.out_dim:
        raise ModelError(
            f"{model}: found an output of {width} columns, expected {task.out_dim} for the "
            f"{task.kind} labels of {data}"
        )
    splits = resolve_splits(dataset, options.split, seed=options.split_seed)
    return Pretraining(
        splits=splits,
        task=task,
        seeds=seeds,
        model_spec=model_spec,
        data_spec=data_spec,
        model=built,
        dataset=dataset,
        training=options.training_options(),
        folds=_chosen_folds(splits, only),
    )


def _chosen_folds(splits: Splits, only: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of the requested folds; all by default."""
    numbers = range(len(splits.folds))
    for number in only:
        if number not in numbers:
            raise ConfigError(f"fold: found {number}, expected 0 to {len(numbers) - 1}")
    return tuple(number for number in numbers if number in only or not only)
