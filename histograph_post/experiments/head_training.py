"""The head stage: train readouts on a cache, over folds and seeds, and say what they gained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..caches import Cache
from ..errors import ConfigError
from ..heads.registry import build_head, head_info, head_names
from ..metrics import Key
from ..runs.fits import Fit, FitSpec
from ..runs.predictions import LabelRows, row_names
from ..runs.run import Run
from ..runs.saved_backbone import describe_backbone
from ..tasks import TargetScale, infer_task
from ..training.loop import Trainer
from ..training.options import TrainingOptions, suggested_lr
from .folds import Fold, make_folds, open_caches
from .head_fits import fit_head, own_classifier
from .results import BASELINES
from .stage import FitProgress, Stage
from .stage import run_experiment as run_experiment


@dataclass(frozen=True)
class HeadSpec:
    """A readout by name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment(Stage):
    """Readouts, folds and seeds: everything a run on a cache does."""

    caches: tuple[Cache, ...]
    folds: tuple[Fold, ...]
    heads: tuple[HeadSpec, ...]
    training: TrainingOptions
    standardize: bool = True
    warm_start: bool = False

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            "weights": [cache.weights_sha256 for cache in self.caches],
            "data": self.caches[0].manifest.data.fingerprint,
            "layers": list(self.caches[0].layer_names),
            "dtype": self.caches[0].manifest.layout.dtype,
            "task": self.task.to_json(),
            "splits": self.splits.to_json(),
            "heads": [asdict(head) for head in self.heads],
            "seeds": list(self.seeds),
            "training": asdict(self.training),
            "standardize": self.standardize,
            "warm_start": self.warm_start,
        }

    def fits(self) -> list[FitSpec]:
        """Return every fit, a fold at a time: what is known early is known of all readouts.

        The readout to beat comes last: it is fast, and says little of the time that is left.
        """
        heads = sorted(self.heads, key=lambda head: head.name in BASELINES)
        return [
            self.fit_spec(head, fold.number, seed)
            for fold in self.folds
            for head in heads
            for seed in self.seeds
        ]

    def fit_spec(self, head: HeadSpec, fold: int, seed: int) -> FitSpec:
        """Return the fit of one readout on one fold with one seed."""
        return FitSpec(
            head=head.name,
            options=head.options,
            training=self.training,
            fold=fold,
            seed=seed,
            standardize=self.standardize,
            warm_start=self.warm_start,
        )

    def fit(
        self,
        spec: FitSpec,
        folder: Path,
        *,
        device: torch.device,
        on_epoch: Callable[[Trainer], None] | None = None,
    ) -> Fit:
        """Train one readout on the cached activations of one fold."""
        fold = self.folds[spec.fold]
        for other in self.folds:
            if other.loaded is not fold.loaded:
                other.loaded.forget()
        return fit_head(
            spec, fold.loaded, fold.split, self.task, folder, device=device, on_epoch=on_epoch
        )

    def own_scores(self, fits: Sequence[Fit]) -> dict[Key, float]:
        """Return the test score of the checkpoint's own readout, for every fold and seed."""
        found: dict[Key, float] = {}
        for fold in self.folds:
            logits = fold.loaded.own_logits(self.task)
            if logits is None or not len(fold.split.test):
                continue
            rows = fold.split.test
            score = self.task.score(logits[rows], fold.loaded.labels[rows])
            if score == score:
                found |= {(fold.number, seed): score for seed in self.seeds}
        return found

    def label_rows(self) -> LabelRows:
        """Return the label rows of the cached data."""
        cache, loaded = self.caches[0], self.folds[0].loaded
        pairs = None
        if loaded.pairs is not None:
            first = np.repeat(loaded.ptr[:-1], np.diff(cache.label_ptr))  # [rows]
            pairs = loaded.pairs - torch.from_numpy(first)  # [2, rows]
        return LabelRows(
            names=row_names(cache.ids(), cache.label_ptr, self.task.level, pairs),
            labels=loaded.labels,
            target_names=cache.manifest.layout.target_names,
        )

    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return what the cache of a fit's fold says of its backbone."""
        return describe_backbone(self.folds[fit.spec.fold].loaded.cache, folder)


def plan_experiment(
    cache: str | Path | Cache,
    heads: Sequence[HeadSpec],
    *,
    training: TrainingOptions | None = None,
    seeds: Sequence[int] = (0,),
    split: str | None = None,
    split_seed: int = 0,
    task: str = "auto",
    metric: str | None = None,
    standardize: bool = True,
    warm_start: bool = False,
    memory_limit: int | None = None,
) -> Experiment:
    """Read a cache (or a folder of per-fold caches) and lay out what is to be trained on it.

    The arguments are those of :func:`train_head`.
    """
    caches = tuple(open_caches(cache))
    folds, splits = make_folds(
        caches, split=split, split_seed=split_seed, memory_limit=memory_limit
    )
    found = infer_task(
        caches[0].labels(), caches[0].manifest.layout.level, kind=task, metric=metric
    )
    for head in heads:
        if found.level not in head_info(head.name).levels:
            raise ConfigError(
                f"head {head.name!r}: found a {found.level} task, expected "
                f"{' or '.join(head_info(head.name).levels)}; "
                f"for {found.level}s: {', '.join(head_names(found.level))}"
            )
    if not seeds:
        raise ConfigError("seeds: found none, expected at least one")
    # The one that is asked for comes last; the readout to beat beside it starts as it always does.
    if warm_start and not head_info(heads[-1].name).warm_starts:
        able = [name for name in head_names(found.level) if head_info(name).warm_starts]
        raise ConfigError(
            f"warm_start: found head {heads[-1].name!r}, expected one that can start at the "
            f"checkpoint's own predictions: {', '.join(able)}"
        )
    with torch.random.fork_rng(devices=[]):
        for head in heads:  # options that do not fit are refused before anything is trained
            build_head(head.name, caches[0].widths, found.out_dim, found.level, **head.options)
    if warm_start:
        scale = TargetScale.of(found, folds[0].loaded.labels[folds[0].split.train])
        own_classifier(folds[0].loaded, found, scale)
    return Experiment(
        caches=caches,
        folds=tuple(folds),
        splits=splits,
        task=found,
        heads=tuple(heads),
        seeds=tuple(seeds),
        training=training or TrainingOptions(lr=suggested_lr(len(caches[0]))),
        standardize=standardize,
        warm_start=warm_start,
    )


def train_head(
    cache: str | Path | Cache,
    out: str | Path,
    *,
    head: str = "histograph",
    seeds: Sequence[int] = (0,),
    split: str | None = None,
    split_seed: int = 0,
    task: str = "auto",
    metric: str | None = None,
    standardize: bool = True,
    warm_start: bool = False,
    memory_limit: int | None = None,
    training: TrainingOptions | None = None,
    device: str = "auto",
    overwrite: bool = False,
    on_epoch: Callable[[FitProgress], None] | None = None,
    **options: Any,
) -> Run:
    """Train a readout on a cache, and beside it the retrained mean pool it has to beat.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        out: The run folder.
        head: Name of the readout.
        seeds: One fit per seed and fold.
        split: Another split than the cache's own: a file, ``kfold:10``, ...
        split_seed: Seed of a split that is made.
        task: Overrides the task that is found from the labels.
        metric: Overrides the tracked metric.
        standardize: Standardise every layer with the statistics of the training graphs.
        warm_start: Predict at first what the checkpoint predicts (``histograph`` only).
        memory_limit: Bytes that training may take beyond its libraries; a cache that needs more is
            read batch by batch. Two thirds of the machine's memory by default.
        training: Epochs, learning rate and so on.
        device: Where to train.
        overwrite: Replace another run in that folder.
        on_epoch: Told after every epoch.
        options: Options of the readout, such as ``dim=64, heads=4``.
    """
    caches = open_caches(cache)
    level = caches[0].manifest.layout.level
    experiment = plan_experiment(
        cache,
        with_baseline(HeadSpec(head, options), level),
        training=training,
        seeds=seeds,
        split=split,
        split_seed=split_seed,
        task=task,
        metric=metric,
        standardize=standardize,
        warm_start=warm_start,
        memory_limit=memory_limit,
    )
    return run_experiment(
        experiment, out, chosen=head, device=device, overwrite=overwrite, on_epoch=on_epoch
    )


def with_baseline(head: HeadSpec, level: str) -> list[HeadSpec]:
    """Return the readout to beat, the last layer retrained, and the one that is asked for."""
    baseline = "mean" if level == "graph" else "mlp"
    width = {name: value for name, value in head.options.items() if name == "dim"}
    return [head] if head.name == baseline else [HeadSpec(baseline, width), head]
