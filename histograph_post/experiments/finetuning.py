"""Fine-tuning: train a cached backbone together with its head, through the captured activations.

The source is a cache (the head starts fresh) or a run on one (every fold and seed continues its own
trained head: another fold's has seen this one's test rows). The results compare the fine-tuned
network with the checkpoint's own readout and with the heads on the frozen backbone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch_geometric.data import Batch, Data

from ..caches import Cache
from ..data import GraphDataset
from ..data.batching import probe_graphs
from ..errors import CacheError, ConfigError, NotFoundError
from ..heads.base import Readout
from ..heads.registry import build_head, head_name
from ..runs.fits import HEAD_NAME, Fit, FitSpec, load_fit, named
from ..runs.folder import require_apart
from ..runs.predictions import LabelRows
from ..runs.run import BEST_NAME, FINETUNED, RUN_NAME, Run
from ..runs.saved_backbone import SavedBackbone
from ..runs.saved_head import own_name
from ..training.loaded_cache import SharedRows
from ..training.loop import OnEpoch
from ..utils.files import sha256_file
from .backbones import BackboneStage, load_backbones
from .folds import load_folds, open_caches
from .head_fits import make_head, share_rows
from .head_training import Experiment, plan_experiment
from .options import ExperimentOptions, HeadSpec, with_baseline, with_keywords
from .results import Averages
from .stage import run_experiment
from .unfreezing import (
    BackboneOptions,
    ParameterCounts,
    Unfreezing,
    check_gradients,
    layers_of_parameters,
)


def open_source(source: str | Path | Run | Cache) -> Run | None:
    """Return the run on a cache that fine-tuning starts from; None for a cache."""
    if isinstance(source, Cache):
        return None
    folder = source.folder if isinstance(source, Run) else Path(source)
    if not folder.is_dir():
        raise NotFoundError(f"{folder}: found no folder, expected a run, a cache or several caches")
    if not (folder / RUN_NAME).is_file():
        return None
    run = Run.of(source)
    if run.backbone.in_run:
        raise ConfigError(
            f"{folder}: found a run that trained its backbone; cache that first: "
            f"histograph cache {folder} -o CACHES"
        )
    if "heads" not in run.plan:
        raise ConfigError(
            f"{folder}: found a run of tune, expected one of train-head; train its best options "
            f"first: histograph train-head {run.backbone.cache} --config {folder / BEST_NAME}"
        )
    return run


def source_experiment(
    run: Run, options: ExperimentOptions, *, cache: str | Path | None
) -> Experiment:
    """Return the experiment of a run, on its caches and splits.

    Args:
        options: How to train; the seeds are some of the run's, all by default.
        cache: Where the cache, or the folder of caches, is now, if it was moved.
    """
    plan, place = run.plan, run.backbone.cache
    known = tuple(plan["seeds"])
    for seed in options.seeds or ():
        if seed not in known:
            raise ConfigError(f"seeds: found {seed}, expected some of the run's, {list(known)}")
    weights = plan["weights"]
    caches = open_caches(cache or (place.parent if len(weights) > 1 else place))
    found = [member.weights_sha256 for member in caches]
    if found != weights:
        raise CacheError(
            f"{caches[0].path}: found weights {', '.join(w[:12] for w in found)}, expected "
            f"{', '.join(w[:12] for w in weights)}, on which {run.folder} was trained"
        )
    return Experiment(
        splits=run.splits,
        task=run.saved_head.task,
        seeds=tuple(options.seeds or known),
        caches=tuple(caches),
        folds=tuple(load_folds(caches, run.splits, memory_limit=options.memory_limit)),
        heads=tuple(HeadSpec(entry["name"], entry["options"]) for entry in plan["heads"]),
        training=options.training_options(),
        standardize=plan["standardize"],
        warm_start=plan["warm_start"],
        calibrate=plan.get("calibrate", True),
    )


@dataclass(frozen=True)
class Finetuning(BackboneStage):
    """Backbones, heads, folds and seeds: everything a fine-tuning does."""

    STAGE: ClassVar[str] = FINETUNED

    #: The head stage on the same caches: its folds, and the baselines on the frozen backbone.
    frozen: Experiment
    #: The run whose heads are trained further; None for fresh ones.
    source: Run | None
    #: Notes on what is not trained.
    layer_notes: tuple[str, ...] = ()

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            "stage": "finetune",
            "frozen": self.frozen.plan(),
            "head": self.head.to_json(),
            "backbone": asdict(self.options),
            "calibrate": self.calibrate,
            "start": None if self.source is None else self._head_hashes(self.source),
        }

    def _head_hashes(self, source: Run) -> list[str]:
        specs = [spec for spec in self.fits() if spec.stage]
        folders = [source.fit_folder(spec.head, spec.fold, spec.seed) for spec in specs]
        return [sha256_file(folder / HEAD_NAME) for folder in folders]

    def fits(self) -> list[FitSpec]:
        """Return the fine-tuned networks and, without a run, the frozen heads, fold by fold."""
        frozen = () if self.source is not None else self.frozen.heads
        heads = [*((head, "") for head in frozen), (self.head, self.STAGE)]
        return [
            replace(self.frozen.fit_spec(head, fold.number, seed), stage=stage)
            for fold in self.frozen.folds
            for head, stage in heads
            for seed in self.seeds
        ]

    def earlier_fits(self) -> list[Fit]:
        """Return the frozen heads of the run that this continues."""
        if self.source is None:
            return []
        return [load_fit(spec, self.source.folder / spec.folder) for spec in self.frozen.fits()]

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train a head on the frozen backbone, or backbone and head together."""
        if not spec.stage:
            return self.frozen.fit(spec, folder, device=device, on_epoch=on_epoch)
        fold = self.frozen.folds[spec.fold]
        if self.source is not None:
            head, standardizer = self.source.load_head(spec.fold, spec.seed)
        else:
            made = make_head(spec, fold, self.task)
            head, standardizer = made.head, made.standardizer
        before, _ = self.start(spec, folder)
        return self.fit_network(
            spec, before, head, standardizer, folder, device=device, on_epoch=on_epoch
        )

    def share(self, spec: FitSpec) -> SharedRows | None:
        """Return the activations for a frozen head, and their statistics for a fresh one."""
        if not spec.stage:
            return self.frozen.share(spec)
        if self.source is not None:
            return None
        return share_rows(spec, self.frozen.folds[spec.fold], self.task, history=False)

    def using(self, spec: FitSpec, shared: SharedRows | None) -> AbstractContextManager[None]:
        """Use the activations that another process shares."""
        return self.frozen.using(spec, shared)

    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return the outputs of the checkpoint's own readout for the test rows of each fold."""
        return self.frozen.own_outputs(fits)

    def label_rows(self) -> LabelRows:
        """Return the label rows of the cached data."""
        return self.frozen.label_rows()

    def start(self, spec: FitSpec, folder: Path) -> tuple[nn.Module, SavedBackbone]:
        """Return the cached backbone, and how the cache describes it."""
        saved = SavedBackbone.of_cache(self.frozen.folds[spec.fold].loaded.cache)
        return self.backbones.models[spec.fold % len(self.backbones.models)], saved

    def trainable(self) -> ParameterCounts:
        """Count what training may change, refusing what cannot be trained."""
        backbone = copy.deepcopy(self.backbones.models[0])
        unfreezing = Unfreezing(
            backbone, self.layers, len(self.backbones.capture.points), self.options
        )
        if self.source is not None:
            head, _ = self.source.load_head()
        else:
            widths, task = self.backbones.capture.widths, self.task
            head = build_head(self.head.name, widths, task.out_dim, task.level, **self.head.options)
        return ParameterCounts.trainable(backbone, unfreezing, head)

    def notes(self) -> list[str]:
        """Return what is trained, and what cannot be scored."""
        return [*self.layer_notes, f"training may change {self.trainable()}", *super().notes()]

    def finish(self, folder: Path, averages: Averages, chosen: str) -> dict[str, Any]:
        """Write a checkpoint per fold; return what was trained and gained over the frozen head."""
        first = named(averages.fits, chosen)[0].backbone
        return {
            **super().finish(folder, averages, chosen),
            "versus_frozen": averages.versus(chosen, self.head.name),
            "moves": None if first is None else first["asked"],
        }


def plan_finetuning(
    source: str | Path | Run | Cache,
    options: ExperimentOptions,
    *,
    head: HeadSpec | None = None,
    backbone: BackboneOptions | None = None,
    cache: str | Path | None = None,
    data: str | Path | GraphDataset | Iterable[Data] | None = None,
    data_root: Path | None = None,
    model: nn.Module | str | None = None,
    checkpoint: Path | None = None,
    key_map: Path | None = None,
    trust: bool = False,
) -> Finetuning:
    """Rebuild the backbone of a run or a cache, and plan what is trained.

    Args:
        source: A run on a cache, a cache, or a folder of per-fold caches.
        options: What all experiments share. Layers are standardised with the cached statistics of
            the training graphs, which stay as they are while the backbone is trained.
        head: A new head, for a cache; a run brings its own.
        backbone: What is trained of the backbone, and how.
        cache: Where the run's cache is now, if it was moved.
        data: The cached data, or their specification; needed if they come from code of yours, were
            handed over in memory or were moved.
        data_root: Folder with a local copy of benchmark data.
        model: The backbone itself, for one that was handed over in memory, or its specification,
            such as ``my_model.py:Net``; not needed for a built-in model.
        checkpoint: The backbone's weights, or a folder with those of every fold.
        key_map: Old weight names to new ones.
        trust: Unpickle a checkpoint that can run code.
    """
    run = open_source(source)
    options = replace(options, training=options.training_options())
    if run is not None:
        reason = f"the run {run.folder} brings its own"
        if head is not None and (head.options or head.name != run.head):
            raise ConfigError(f"head: found {head.name!r}, but {reason}, {run.head!r}")
        decided = ("split", "split_seed", "task", "metric", "standardize", "warm_start")
        options.refuse(*decided, reason=reason)
        frozen = source_experiment(run, options, cache=cache)
        with run.reading_head():  # which may name another readout than the run's
            chosen = next(head for head in frozen.heads if head.name == run.saved_head.name)
    else:
        if cache is not None:
            raise ConfigError(
                f"cache: found {cache}, but {source} is no run: give it as the source"
            )
        place = source if isinstance(source, (str, Path, Cache)) else source.folder
        chosen = head or HeadSpec("histograph")
        options = replace(options, seeds=options.seeds or (0,))  # a backbone per seed is costly
        wanted = plan_experiment(place, [chosen], options)
        baseline = [other for other in with_baseline(chosen, wanted.task.level) if other != chosen]
        frozen = replace(wanted, heads=tuple(baseline))
    backbones = load_backbones(
        frozen.caches,
        data=data,
        data_root=data_root,
        model=model,
        checkpoint=checkpoint,
        key_map=key_map,
        trust=trust,
    )
    probe = Batch.from_data_list(probe_graphs(backbones.dataset))
    asked, first = backbone or BackboneOptions(), backbones.models[0]
    layers = layers_of_parameters(first, backbones.capture, probe)
    notes = check_gradients(first, backbones.capture, probe, layers, asked)
    planned = Finetuning(
        splits=frozen.splits,
        task=frozen.task,
        seeds=frozen.seeds,
        frozen=frozen,
        head=chosen,
        backbones=backbones,
        options=asked,
        layers=layers,
        source=run,
        calibrate=options.calibrate,
        layer_notes=tuple(notes),
    )
    planned.trainable()  # refuses before anything is trained or written
    return planned


def finetune(
    source: str | Path | Run | Cache,
    out: str | Path,
    *,
    head: str | type[Readout] | None = None,
    head_options: Mapping[str, Any] | None = None,
    backbone_lr: float = 1e-4,
    unfreeze: Sequence[str] | None = None,
    unfreeze_last: int | None = None,
    unfreeze_every: int = 0,
    bn: str = "frozen",
    checkpoint_layers: bool = False,
    amp: bool = False,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train a cached backbone and its head together, and compare that with the frozen head.

    Args:
        source: A run on a cache, a cache, or a folder of per-fold caches.
        out: The run folder.
        head: Name of a new readout, for a cache; ``histograph`` by default. Of a run, only a
            readout that is code of yours has to be named again.
        head_options: Options of a new readout, such as ``dim`` and ``heads``.
        backbone_lr: Highest learning rate of the backbone; the head's is ``training``'s.
        unfreeze: Names and globs of the modules or parameters of the backbone that are trained; all
            by default, an empty list for none.
        unfreeze_last: Train only the last so many layers of the backbone.
        unfreeze_every: Train the head alone at first, and one more layer after each so many epochs,
            the last one first.
        bn: ``train`` updates the running statistics of batch norms that are trained, ``frozen``
            leaves them as they are.
        checkpoint_layers: Save memory: compute the inside of layers again in the backward pass.
        amp: Mixed precision of the backbone (CUDA).
        options: Seeds, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``seeds=[0, 1]``, and any other argument of
            :func:`plan_finetuning`, such as ``model`` and ``data``.
    """
    options, planning = with_keywords(options, keywords)
    run, new = open_source(source), None
    if head is not None or head_options:
        asked = head or "histograph"
        name = head_name(asked) if run is None else own_name(run, asked)
        new = HeadSpec(name, head_options or {})
    backbone = BackboneOptions(
        lr=backbone_lr,
        unfreeze=None if unfreeze is None else tuple(unfreeze),
        unfreeze_last=unfreeze_last,
        unfreeze_every=unfreeze_every,
        bn=bn,  # type: ignore[arg-type]  # checked there
        checkpoint_layers=checkpoint_layers,
        autocast=amp,
    )
    if not isinstance(source, Cache):
        require_apart(out, source.folder if isinstance(source, Run) else source, is_folder=True)
    planned = plan_finetuning(run or source, options, head=new, backbone=backbone, **planning)
    return run_experiment(planned, out, chosen=planned.name, options=options)
