"""The head stage: train readouts on a cache, over folds and seeds, and say what they gained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .devices import resolve_device
from .errors import ConfigError
from .files import write_text
from .fits import Fit, FitSpec, fit_head
from .folds import Fold, make_folds, open_caches
from .head_results import choose_fit, results, write_chosen_head, write_predictions
from .heads.registry import head_info, head_names
from .run import METRICS_NAME, SPLITS_NAME, Run, open_run_folder, write_results
from .splits import Splits
from .storage import Cache
from .tasks import Task, infer_task, label_summary
from .training import Trainer, TrainingOptions


@dataclass(frozen=True)
class HeadSpec:
    """A readout by name, with its options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitProgress:
    """Where an experiment stands, told after every epoch."""

    head: str
    fold: int
    seed: int
    #: Fits done before this one, and fits in all.
    done: int
    total: int
    trainer: Trainer


@dataclass(frozen=True)
class Experiment:
    """Readouts, folds and seeds: everything a run does."""

    caches: tuple[Cache, ...]
    folds: tuple[Fold, ...]
    splits: Splits
    task: Task
    heads: tuple[HeadSpec, ...]
    seeds: tuple[int, ...]
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

    def fits(self) -> list[tuple[FitSpec, Fold]]:
        """Return every fit, a fold at a time: what is known early is known of all readouts."""
        return [
            (
                FitSpec(
                    head=head.name,
                    options=head.options,
                    training=self.training,
                    fold=fold.number,
                    seed=seed,
                    standardize=self.standardize,
                    warm_start=self.warm_start,
                ),
                fold,
            )
            for fold in self.folds
            for seed in self.seeds
            for head in self.heads
        ]

    def notes(self) -> list[str]:
        """Return what the user should know: target columns that cannot be scored."""
        names = self.caches[0].manifest.layout.target_names
        return label_summary(self.task, self.caches[0].labels(), names)


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
) -> Experiment:
    """Read a cache (or a folder of per-fold caches) and lay out what is to be trained on it."""
    caches = tuple(open_caches(cache))
    folds, splits = make_folds(caches, split=split, split_seed=split_seed)
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
    return Experiment(
        caches=caches,
        folds=tuple(folds),
        splits=splits,
        task=found,
        heads=tuple(heads),
        seeds=tuple(seeds),
        training=training or TrainingOptions(),
        standardize=standardize,
        warm_start=warm_start,
    )


def run_experiment(
    experiment: Experiment,
    out: str | Path,
    *,
    chosen: str,
    device: str = "auto",
    overwrite: bool = False,
    config: Mapping[str, Any] | None = None,
    on_epoch: Callable[[FitProgress], None] | None = None,
    on_fit: Callable[[Fit, int, int], None] | None = None,
) -> Run:
    """Train every readout on every fold with every seed; go on with what a killed run left.

    Args:
        experiment: From :func:`plan_experiment`.
        out: The run folder.
        chosen: The readout whose best fit (by validation) becomes the run's head.
        device: Where to train.
        overwrite: Replace another run in that folder.
        config: The options this came from, saved beside it.
        on_epoch: Told after every epoch.
        on_fit: Told after every fit, with the number done and the number in all.
    """
    folder = Path(out)
    open_run_folder(folder, experiment.plan(), config=config, overwrite=overwrite)
    experiment.splits.save(folder / SPLITS_NAME)
    where = resolve_device(device)
    planned = experiment.fits()
    fits: list[Fit] = []
    for done, (spec, fold) in enumerate(planned):

        def epoch_done(trainer: Trainer, spec: FitSpec = spec, done: int = done) -> None:
            if on_epoch is not None:
                on_epoch(FitProgress(spec.head, spec.fold, spec.seed, done, len(planned), trainer))

        fit = fit_head(
            spec,
            fold.loaded,
            fold.split,
            experiment.task,
            folder / spec.folder,
            device=where,
            on_epoch=epoch_done,
        )
        fits.append(fit)
        if on_fit is not None:
            on_fit(fit, done + 1, len(planned))
    _write_metrics(folder, fits)
    best = choose_fit(fits, chosen, experiment.task)
    write_chosen_head(folder, best, experiment)
    write_predictions(folder, fits, chosen, experiment)
    write_results(folder, results(experiment, fits, chosen))
    return Run.open(folder)


def _write_metrics(folder: Path, fits: Sequence[Fit]) -> None:
    lines = [
        json.dumps({"head": fit.spec.head, "fold": fit.spec.fold, "seed": fit.spec.seed, **entry})
        for fit in fits
        for entry in fit.log
    ]
    write_text(folder / METRICS_NAME, "\n".join(lines) + "\n")


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
    )
    return run_experiment(
        experiment, out, chosen=head, device=device, overwrite=overwrite, on_epoch=on_epoch
    )


def with_baseline(head: HeadSpec, level: str) -> list[HeadSpec]:
    """Return the readout to beat, the last layer retrained, and the one that is asked for."""
    baseline = "mean" if level == "graph" else "mlp"
    return [head] if head.name == baseline else [HeadSpec(baseline), head]
