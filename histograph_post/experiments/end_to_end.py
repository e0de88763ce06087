"""End-to-end training: a backbone and a head over its history, both from random weights.

As a baseline the same backbone, with the same initial weights, is trained with its own readout.
Layers are not standardised as in the head stage, whose statistics describe a frozen network: every
row of the history is normalised by itself instead (see heads/standardize.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Batch

from ..capture import plan_capture
from ..data import DataSpec
from ..data.batching import probe_graphs
from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import build_head, head_name
from ..heads.standardize import EachLayerNorm
from ..metrics import Key
from ..runs.fits import Fit, FitSpec, named, outputs_by_fold, train_fit
from ..runs.predictions import LabelRows
from ..runs.run import END_TO_END, HEAD_CONFIG_NAME, Run
from ..runs.saved_backbone import SavedBackbone
from ..runs.verdict import OWN
from ..training.loop import OnEpoch
from ..training.networks import statistics_of
from .backbones import Backbones, BackboneStage, untrained_model
from .options import ExperimentOptions, HeadSpec, with_keywords
from .pretraining import Pretraining, plan_pretraining
from .results import scores_of
from .stage import run_experiment
from .unfreezing import BackboneOptions, check_gradients, layers_of_parameters


@dataclass(frozen=True)
class EndToEnd(BackboneStage):
    """A backbone, a head, folds and seeds: everything an end-to-end training does."""

    STAGE: ClassVar[str] = END_TO_END

    pretraining: Pretraining
    #: Whether the backbone is trained with its own readout too.
    baseline: bool
    #: Whether every row of the history is brought to one scale before the head.
    normalize: bool

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            **self.pretraining.plan(),
            "stage": self.STAGE,
            "seeds": list(self.seeds),
            "head": self.head.to_json(),
            "capture": self.backbones.capture.to_json(),
            "backbone": asdict(self.options),
            "baseline": self.baseline,
            "normalize": self.normalize,
            "folds": list(self.pretraining.folds),
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
            for fold in self.pretraining.folds
            for head, stage in ((OWN, ""), (self.head.name, self.STAGE))
            if stage or self.baseline
            for seed in self.seeds
        ]

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train the backbone with its own readout, or with the head."""
        model, _ = self.start(spec, folder)
        task = self.task
        if not spec.stage:
            trainer = self.pretraining.trainer(model, spec, device)
            return train_fit(spec, trainer, folder / spec.folder, head=None, on_epoch=on_epoch)
        torch.manual_seed(spec.seed)
        head = build_head(
            spec.head, self.backbones.capture.widths, task.out_dim, task.level, **spec.options
        )
        norm = EachLayerNorm(self.backbones.capture.widths) if self.normalize else None
        return self.fit_network(spec, model, head, norm, folder, device=device, on_epoch=on_epoch)

    def notes(self) -> list[str]:
        """Return notes on the data and the layers, and what cannot be scored."""
        return [*self.backbones.dataset.notes, *self.backbones.capture.notes, *super().notes()]

    def own_scores(self, fits: Sequence[Fit], labels: np.ndarray) -> dict[Key, float]:
        """Return the test score of each backbone that was trained with its own readout."""
        return scores_of(named(fits, OWN), "test", self.task.metric)

    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return the outputs of the backbones with their own readout, seeds averaged."""
        return {found.fold: found.mean for found in outputs_by_fold(named(fits, OWN))}

    def label_rows(self) -> LabelRows:
        """Return the label rows of the data."""
        return self.pretraining.label_rows()

    def start(self, spec: FitSpec, folder: Path) -> tuple[nn.Module, SavedBackbone]:
        """Return a backbone with random weights, and how to build it again."""
        width, filled = self.pretraining.labels_width, dict[str, Any]()
        model = untrained_model(
            self.backbones.model, self.backbones.dataset, width, seed=spec.seed, filled=filled
        )
        saved = SavedBackbone(
            file=folder / HEAD_CONFIG_NAME,
            model=replace(
                self.backbones.model,
                out_dim=None if self.task.level == "link" else width,
                filled=filled,
            ),
            data=DataSpec.of(self.backbones.dataset, self.backbones.data.args),
            capture=self.backbones.capture,
            cache=folder,
        )
        return model, saved


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
    """Load the data, build the backbone, find its layers, and plan what is trained.

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
        options=backbone,
        backbones=Backbones((), given.dataset, given.model_spec, given.data_spec, capture),
        layers=reached,
        baseline=baseline,
        normalize=normalize,
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
        reason="it does not apply to a backbone that is trained from random weights",
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
