"""Pretraining: a backbone from random weights, with its own readout or end to end with a head.

With its own readout the folder has, beside ``config.toml``, ``run.json`` and ``splits.json`` as in
every run, ``results.json`` with the scores of all folds and ``fold-0/`` ..., checkpoints that need
nothing else (see folds.py).

End to end, the same backbone, with the same initial weights, is trained with its own readout
beside the head. The standardisation of the head stage has no place here: its statistics describe a
network that stands still. Every row of the history is normalised by itself instead (see
heads/standardize.py).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Batch

from ..capture import CapturePlan, plan_capture
from ..data import DataSpec, GraphDataset
from ..data.batching import probe_graphs
from ..errors import ConfigError, ModelError
from ..heads.base import Readout
from ..heads.registry import build_head, head_name
from ..heads.standardize import EachLayerNorm
from ..metrics import Key, summarize
from ..models import BUILT_IN, ModelSpec
from ..models.builtin_models import GNN
from ..models.checkpoints import weights_sha256
from ..runs.fits import Fit, FitSpec, train_fit
from ..runs.folder import check_seal
from ..runs.predictions import LabelRows, row_names
from ..runs.run import HEAD_CONFIG_NAME, MODEL_NAME, RESULTS_NAME, Run, read_json
from ..runs.saved_backbone import SavedBackbone, write_provenance
from ..splits import PARTS, Splits, resolve_splits
from ..tasks import TargetScale, infer_task
from ..training.graph_batches import GraphBatches
from ..training.loop import STATE_NAME, OnEpoch, Trainer, train_resumably
from ..training.networks import BackboneNetwork, statistics_of
from ..training.options import TrainingOptions
from ..training.ranks import current_ranks
from ..utils.tensors import save_tensors
from .backbones import BackboneStage, NetworkParts, output_width, untrained_model
from .folds import (
    TrainedFold,
    fold_folders,
    fold_name,
    is_finished,
    load_fold,
    load_log,
    save_fold,
)
from .options import ExperimentOptions, HeadSpec, with_keywords
from .results import OWN, named, outputs_on_test, scores_of
from .stage import Stage, run_experiment
from .unfreezing import BackboneOptions, check_gradients, layers_of_parameters


@dataclass(frozen=True)
class Pretraining(Stage):
    """A backbone, the data and the folds to train it on: everything that decides the result."""

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
        """The number of outputs a model is built for, whatever its own readout gives."""
        return infer_task(self.dataset.labels(), self.dataset.level).out_dim

    # Another process builds the model anew: a class from a user's file cannot be imported there.
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
            # Says whether the code of a user's model is still the same, as far as weights tell.
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
        """Return a fold that is done."""
        place = folder / self.place(spec)
        if not is_finished(place):
            return None
        check_seal(place, read_json(place, RESULTS_NAME), spec.plan)
        (place / STATE_NAME).unlink(missing_ok=True)  # of a run killed at its very end
        return self._as_fit(spec, load_fold(place), load_log(place))

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train the backbone on one fold."""
        folder = folder / self.place(spec)
        folder.mkdir(parents=True, exist_ok=True)
        task, split = self.task, self.splits.folds[spec.fold]
        model = copy.deepcopy(self.model)
        source = GraphBatches(self.dataset, task, device, current_ranks())
        network = BackboneNetwork(model).to(device)
        trainer = Trainer(network, source, split, task, spec.training, seed=spec.seed)
        if not isinstance(model, GNN):
            # The checkpoint has to predict in the units of the labels, and where a user's model
            # could undo a scale is not known: it learns them as they are.
            trainer.scale = TargetScale()
        seconds = train_resumably(trainer, folder, plan=spec.plan, on_epoch=on_epoch)
        if isinstance(model, GNN):
            _undo_scale(model, trainer.scale)
            trainer.scale = TargetScale()
        trained = TrainedFold(
            fold=spec.fold,
            seed=spec.seed,
            best_epoch=trainer.progress.best_epoch,
            epochs=trainer.progress.epoch,
            scores={
                part: task.scores(trainer.predict(rows), source.labels[rows])
                for part, rows in zip(PARTS, split.parts, strict=True)
                if len(rows)
            },
            num_parameters=sum(parameter.numel() for parameter in model.parameters()),
            weights_sha256=weights_sha256(model.state_dict()),
            diverged=trainer.progress.diverged,
        )
        own_split = replace(self.splits, folds=(split,))
        save_tensors(folder / MODEL_NAME, model.state_dict())
        named = (self.model_spec, self.data_spec)
        save_fold(folder, trained, *named, own_split, trainer.progress.log, plan=spec.plan)
        (folder / STATE_NAME).unlink(missing_ok=True)
        return self._as_fit(spec, trained, trainer.progress.log, seconds)

    def _as_fit(
        self,
        spec: FitSpec,
        trained: TrainedFold,
        log: Sequence[Mapping[str, float]],
        seconds_per_epoch: float = 0.0,
    ) -> Fit:
        """Return a fold as the fit of a run; outputs for its test rows are not kept."""
        return Fit(
            spec=spec,
            scores=trained.scores,
            best_epoch=trained.best_epoch,
            num_epochs=trained.epochs,
            num_parameters=trained.num_parameters,
            seconds_per_epoch=seconds_per_epoch,
            test_rows=np.empty(0, dtype=np.int64),
            test_outputs=np.empty((0, self.task.out_dim)),
            valid_rows=np.empty(0, dtype=np.int64),
            valid_outputs=np.empty((0, self.task.out_dim)),
            log=log,
            diverged=trained.diverged,
            backbone={"weights_sha256": trained.weights_sha256},
        )

    def notes(self) -> list[str]:
        """Return what the user should know of the data."""
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
        """Return the scores of all folds that are done, those of other calls, too."""
        metric = self.task.metric
        folds = [load_fold(path) for path in fold_folders(folder) if is_finished(path)]
        summaries = {}
        for part in ("test", "valid"):
            found = [fold.scores[part] for fold in folds if metric in fold.scores.get(part, {})]
            summary = summarize([scores[metric] for scores in found])
            summaries[part] = None if summary is None else summary.to_json()
        return {
            "model": self.model_spec.spec,
            "data": self.data_spec.spec,
            "task": self.task.to_json(),
            "metric": metric,
            "higher_is_better": self.task.higher_is_better,
            **summaries,
            "folds": [fold.to_json() for fold in folds],
        }


@torch.no_grad()
def _undo_scale(model: GNN, scale: TargetScale) -> None:
    """Let the last map of a built-in model give the units of the labels."""
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
    """Return the numbers of the folds that are asked for; all by default."""
    numbers = range(len(splits.folds))
    for number in only:
        if number not in numbers:
            raise ConfigError(f"fold: found {number}, expected 0 to {len(numbers) - 1}")
    return tuple(number for number in numbers if number in only or not only)


@dataclass(frozen=True)
class EndToEnd(BackboneStage):
    """A backbone, a head, folds and seeds: everything an end-to-end training does."""

    STAGE: ClassVar[str] = "end-to-end"

    pretraining: Pretraining
    capture: CapturePlan
    #: Whether the backbone is trained with its own readout too.
    baseline: bool
    #: Whether every row of the history is brought to one scale before the head.
    normalize: bool
    #: The folds that are trained.
    folds: tuple[int, ...]

    @property
    def named_as(self) -> tuple[ModelSpec, DataSpec]:
        """The model and the data as the user names them."""
        return self.pretraining.model_spec, self.pretraining.data_spec

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            **self.pretraining.plan(),
            "stage": self.STAGE,
            "seeds": list(self.seeds),
            "head": asdict(self.head),
            "capture": self.capture.to_json(),
            "backbone": asdict(self.options),
            "baseline": self.baseline,
            "normalize": self.normalize,
            "folds": list(self.folds),
            "calibrate": self.calibrate,
        }

    def fits(self) -> list[FitSpec]:
        """Return every fit, a fold at a time."""
        return [
            FitSpec(
                head=head,
                options=self.head.options if stage else {},
                training=self.pretraining.training,
                fold=fold,
                seed=seed,
                standardize=False,
                stage=stage,
            )
            for fold in self.folds
            for head, stage in ((OWN, ""), (self.head.name, self.STAGE))
            if stage or self.baseline
            for seed in self.seeds
        ]

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train the backbone with its own readout, or with the head."""
        given, task = self.pretraining, self.task
        model = untrained_model(given.model_spec, given.dataset, given.labels_width, seed=spec.seed)
        if not spec.stage:
            source = GraphBatches(given.dataset, task, device, current_ranks())
            network = BackboneNetwork(model).to(device)
            split = self.splits.folds[spec.fold]
            trainer = Trainer(network, source, split, task, spec.training, seed=spec.seed)
            return train_fit(spec, trainer, folder / spec.folder, head=None, on_epoch=on_epoch)
        layers = layers_of_parameters(model, self.capture, self._probe())
        torch.manual_seed(spec.seed)
        head = build_head(spec.head, self.capture.widths, task.out_dim, task.level, **spec.options)
        norm = EachLayerNorm(self.capture.widths) if self.normalize else None
        return self.fit_network(
            spec,
            NetworkParts(model, self.capture, layers, head, norm),
            given.dataset,
            folder,
            device=device,
            before=copy.deepcopy(model),
            on_epoch=on_epoch,
        )

    def _probe(self) -> Batch:
        return Batch.from_data_list(probe_graphs(self.pretraining.dataset))

    def notes(self) -> list[str]:
        """Return what the user should know: of the data, of the layers, what cannot be scored."""
        about = (*self.pretraining.dataset.notes, *self.capture.notes)
        return [*about, *super().notes()]

    def own_scores(self, fits: Sequence[Fit]) -> dict[Key, float]:
        """Return the test score of the backbone that was trained with its own readout."""
        return scores_of(named(fits, OWN), "test", self.task.metric)

    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return what the backbones with their own readout say together, their seeds averaged."""
        return {found.fold: found.mean for found in outputs_on_test(named(fits, OWN))}

    def label_rows(self) -> LabelRows:
        """Return the label rows of the data."""
        return self.pretraining.label_rows()

    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return how to build the backbone of a fit again; its weights are in the run."""
        assert fit.backbone is not None  # of a fit with a head
        given, filled, seed = self.pretraining, dict[str, Any](), fit.spec.seed
        sizes = (given.dataset, given.labels_width)
        model = untrained_model(given.model_spec, *sizes, seed=seed, filled=filled)
        weights = folder / fit.spec.folder / MODEL_NAME
        saved = SavedBackbone(
            file=folder / HEAD_CONFIG_NAME,
            model=replace(
                given.model_spec,
                checkpoint=Path(MODEL_NAME),
                out_dim=None if self.task.level == "link" else given.labels_width,
                weights_sha256=fit.backbone["weights_sha256"],
                filled=filled,
            ),
            data=DataSpec.of(given.dataset, given.data_spec.args),
            capture=self.capture,
            cache=folder,
            in_run=True,
            provenance=write_provenance(folder, model, weights, self.capture, given.dataset),
        )
        return saved.to_json()


def plan_end_to_end(
    model: str,
    data: str,
    head: HeadSpec,
    options: ExperimentOptions,
    *,
    layers: str | Sequence[str] = "auto",
    baseline: bool = True,
    normalize: bool = True,
    checkpoint_layers: bool = False,
    amp: bool = False,
    **pretraining: Any,
) -> EndToEnd:
    """Load the data, build the backbone, find its layers, and lay out what is to be trained.

    Args:
        model: A built-in name, ``file.py:Name`` or ``package.module:Name``.
        data: A data specification, such as ``tu:PROTEINS``.
        head: The readout over the history.
        options: What all experiments share.
        layers: ``auto``, or names, globs and indices of the layers that make up the history.
        baseline: Train the backbone with its own readout too.
        normalize: Normalise the activations of every node in every layer before the head.
        checkpoint_layers: Save memory: compute the inside of layers again in the backward pass.
        amp: Mixed precision (CUDA).
        pretraining: Any other argument of
            :func:`~histograph_post.experiments.pretraining.plan_pretraining`.
    """
    seeds = tuple(options.seeds or (0,))
    given = plan_pretraining(model, data, options, own_readout=baseline, **pretraining)
    probe = Batch.from_data_list(probe_graphs(given.dataset))
    capture = plan_capture(given.model.eval(), probe, layers=layers)
    counted = any(statistics_of(module) for module in given.model.modules())
    task = given.task
    build_head(head.name, capture.widths, task.out_dim, task.level, **head.options)  # refuses
    backbone = BackboneOptions(
        lr=given.training.lr,
        bn="train" if counted else "frozen",
        checkpoint_layers=checkpoint_layers,
        autocast=amp,
    )
    reached = layers_of_parameters(given.model, capture, probe)
    check_gradients(given.model, capture, probe, reached, backbone)
    return EndToEnd(
        splits=given.splits,
        task=task,
        seeds=seeds,
        pretraining=given,
        head=head,
        capture=capture,
        options=backbone,
        baseline=baseline,
        normalize=normalize,
        folds=given.folds,
        calibrate=options.calibrate,
    )


def pretrain(
    model: str,
    data: str,
    out: str | Path,
    *,
    head: str | type[Readout] | None = None,
    head_options: Mapping[str, Any] | None = None,
    seed: int = 0,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train a backbone from random weights: with its own readout, or end to end with a head.

    Args:
        model: A built-in name, ``file.py:Name`` or ``package.module:Name``.
        data: A data specification, such as ``tu:PROTEINS``.
        out: Folder to write, with a checkpoint per fold.
        head: A readout over the history, such as ``histograph``, to train it with.
        head_options: Options of that readout, such as ``dim`` and ``heads``.
        seed: Seed of initial weights, batches and dropout; with a head, ``seeds`` can be several.
        options: Split, metric, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``split="kfold:10"``; any other argument of
            :func:`~histograph_post.experiments.pretraining.plan_pretraining`, such as
            ``model_args`` and ``only``; and with a head any of :func:`plan_end_to_end`.
    """
    options, planning = with_keywords(options, keywords)
    options.refuse(
        *("task", "warm_start", "memory_limit", *(() if head is not None else ("standardize",))),
        reason="a backbone that is trained from random weights has no such choice",
    )
    if head is not None:
        planning = {"normalize": options.standardize, **planning}
        stage = plan_end_to_end(
            model,
            data,
            HeadSpec(head_name(head), head_options or {}),
            replace(options, seeds=options.seeds or (seed,)),
            **planning,
        )
        return run_experiment(stage, out, chosen=stage.name, options=options)
    if head_options:
        raise ConfigError(f"head_options: found {dict(head_options)}, but no head")
    options.refuse("seeds", reason="only a training with a head has several; give seed")
    planned = plan_pretraining(model, data, replace(options, seeds=(seed,)), **planning)
    return run_experiment(planned, out, chosen=OWN, options=options)
