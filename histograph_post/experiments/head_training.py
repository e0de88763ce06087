"""Readouts on a cache: train one beside its baseline, or compare several, over folds and seeds."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..caches import Cache
from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.option_checks import own_code
from ..heads.registry import (
    RIVALS,
    build_reader,
    head_info,
    head_name,
    head_names,
    is_solved,
    refuse_rivals,
)
from ..runs.fits import Fit, FitSpec
from ..runs.predictions import LabelRows, row_names
from ..runs.run import Run
from ..runs.saved_backbone import SavedBackbone
from ..tasks import infer_task
from ..training.loaded_cache import SharedRows
from ..training.loop import OnEpoch
from ..training.node_batches import attention_note, goes_by_nodes, most_steps
from ..training.options import TrainingOptions, suggested_lr
from .folds import Fold, make_folds, open_caches, seen_note
from .head_fits import fit_head, own_classifier, share_rows
from .options import DEFAULT_SEEDS, ExperimentOptions, HeadSpec, with_baseline, with_keywords
from .results import BASELINES
from .stage import ReadoutStage, run_experiment


@dataclass(frozen=True)
class Experiment(ReadoutStage):
    """Readouts, folds and seeds: everything a run on a cache does."""

    caches: tuple[Cache, ...]
    folds: tuple[Fold, ...]
    heads: tuple[HeadSpec, ...]
    training: TrainingOptions
    standardize: bool = True
    warm_start: bool = False
    #: Readout -> its learning rate, where it has another one than ``training``.
    lrs: Mapping[str, float] = field(default_factory=dict)

    def plan(self) -> dict[str, Any]:
        """Return all that the result depends on, as plain values."""
        return {
            "weights": [cache.weights_sha256 for cache in self.caches],
            "data": self.caches[0].manifest.data.fingerprint,
            "layers": list(self.caches[0].layer_names),
            "dtype": self.caches[0].manifest.layout.dtype,
            "task": self.task.to_json(),
            "splits": self.splits.to_json(),
            "heads": [head.to_json() for head in self.heads],
            "seeds": list(self.seeds),
            "training": asdict(self.training),
            "lrs": dict(self.lrs),
            "standardize": self.standardize,
            "warm_start": self.warm_start,
            "calibrate": self.calibrate,
        }

    def fits(self) -> list[FitSpec]:
        """Return every fit, a fold at a time, so that early results compare all readouts.

        The baseline comes last: it is fast, and would spoil the estimate of the time left. So do
        the other seeds of a solved readout, which reuse the solution of the first one.
        """
        heads = sorted(self.heads, key=lambda head: head.name in BASELINES)
        solved = {head.name for head in heads if is_solved(head.name, self.task.level)}
        found: list[FitSpec] = []
        for fold in self.folds:
            specs = [
                self.fit_spec(head, fold.number, seed) for head in heads for seed in self.seeds
            ]
            specs.sort(key=lambda spec: spec.head in solved and spec.seed != self.seeds[0])
            found += specs
        return found

    def fit_spec(self, head: HeadSpec, fold: int, seed: int) -> FitSpec:
        """Return the fit of one readout on one fold with one seed."""
        return FitSpec(
            head=head.name,
            options=head.options,
            training=self.training_of(head.name),
            fold=fold,
            seed=seed,
            standardize=self.standardize,
            warm_start=self.warm_start,
        )

    def training_of(self, head: str) -> TrainingOptions:
        """Return how a readout is trained: all alike, except for its learning rate."""
        return replace(self.training, lr=self.lrs.get(head, self.training.lr))

    def fit(
        self, spec: FitSpec, folder: Path, *, device: torch.device, on_epoch: OnEpoch | None = None
    ) -> Fit:
        """Train one readout on the cached activations of one fold."""
        fold = self._only_fold(spec.fold)
        with own_code(head_info(spec.head).load()):
            return fit_head(spec, fold, self.task, folder, device=device, on_epoch=on_epoch)

    def _only_fold(self, number: int) -> Fold:
        """Return a fold, releasing the activations of all others."""
        fold = self.folds[number]
        for other in self.folds:
            if other.loaded is not fold.loaded:
                other.loaded.forget()
        return fold

    def fits_at_once(self) -> int:
        """Return how many fits fit into memory: each has its own batches, of the same rows."""
        size = self.training.batch_size
        return min(fold.loaded.memory.batches_that_fit(size) for fold in self.folds)

    def folds_at_once(self) -> int:
        """Return how many folds fit into memory; any number if batches are read from the cache."""
        return min(fold.loaded.memory.histories_that_fit() for fold in self.folds) or sys.maxsize

    def share(self, spec: FitSpec) -> SharedRows:
        """Return the activations of a fold, standardised, in shared memory."""
        return share_rows(spec, self._only_fold(spec.fold), self.task)

    @contextmanager
    def using(self, spec: FitSpec, shared: SharedRows | None) -> Iterator[None]:
        """Use the activations that another process shares."""
        loaded = self.folds[spec.fold].loaded
        if shared is not None:
            loaded.use(shared)
        try:
            yield
        finally:
            loaded.forget()

    def own_outputs(self, fits: Sequence[Fit]) -> dict[int, np.ndarray]:
        """Return the outputs of the checkpoint's own readout for the test rows of each fold."""
        found = {}
        for fold in self.folds:
            logits = fold.loaded.own_logits(self.task)  # [rows, width]
            if logits is not None and len(fold.split.test):
                found[fold.number] = logits[fold.split.test]
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
        """Return how the cache of a fit's fold describes its backbone."""
        saved = SavedBackbone.of_cache(self.folds[fit.spec.fold].loaded.cache)
        saved.carry_canary(folder)
        return saved.to_json(folder)

    def weights_of(self, fit: Fit) -> str:
        """Return the hash of the backbone that the cache of a fit's fold was made with."""
        return self.folds[fit.spec.fold].loaded.cache.weights_sha256

    def keeps(self, fit: Fit) -> bool:
        """Whether a fit can be loaded by its name: all but rivals, which are compared only."""
        return fit.spec.name not in RIVALS

    def build_heads(self) -> list[Readout]:
        """Build every readout once, which refuses wrong options."""
        widths, task = self.caches[0].widths, self.task
        with torch.random.fork_rng(devices=[]):
            return [
                build_reader(head.name, widths, task.out_dim, task.level, **head.options)
                for head in self.heads
            ]

    def notes(self) -> list[str]:
        """Return what the user should know about memory, and what cannot be scored."""
        heads, loaded = self.build_heads(), self.folds[0].loaded
        means = self.task.level == "graph" and all(head.reads_means for head in heads)
        notes = [seen_note(self.caches, self.splits)]
        notes += [attention_note(head, loaded) for head in heads]
        if not (means or all(goes_by_nodes(head, loaded) for head in heads)):
            notes.append(loaded.memory.batch_note(self.training.batch_size))
        return [*(note for note in notes if note is not None), *super().notes()]


def plan_experiment(
    cache: str | Path | Cache,
    heads: Sequence[HeadSpec],
    options: ExperimentOptions | None = None,
    *,
    rivals: bool = False,
) -> Experiment:
    """Read a cache (or a folder of per-fold caches) and plan what is trained on it.

    Wrong options and readouts that fail are refused here, before anything is trained or written.

    Args:
        rivals: Whether some of the readouts may be rivals, which are compared only.
    """
    options = options or ExperimentOptions()
    if not rivals:
        refuse_rivals(*(head.name for head in heads))
    caches = tuple(open_caches(cache))
    folds, splits = make_folds(
        caches,
        split=options.split,
        split_seed=options.split_seed,
        memory_limit=options.memory_limit,
    )
    level = caches[0].manifest.layout.level
    task = infer_task(caches[0].labels(), level, kind=options.task, metric=options.metric)
    for head in heads:
        if task.level not in head_info(head.name).levels:
            raise ConfigError(
                f"head {head.name!r}: found a {task.level} task, expected "
                f"{' or '.join(head_info(head.name).levels)}; "
                f"for {task.level}s: {', '.join(head_names(task.level))}"
            )
    # The requested head comes last; the baseline beside it always starts from random weights.
    if options.warm_start and not head_info(heads[-1].name).warm_starts:
        able = [name for name in head_names(task.level) if head_info(name).warm_starts]
        raise ConfigError(
            f"warm_start: found head {heads[-1].name!r}, expected one that can start at the "
            f"checkpoint's own predictions: {', '.join(able)}"
        )
    steps = most_steps(folds[0].loaded, folds[0].split.train)
    training = options.training_options(suggested_lr(steps))
    suited = {
        head.name: options.training_options(suggested_lr(steps, head_info(head.name).lr)).lr
        for head in heads
    }
    experiment = Experiment(
        caches=caches,
        folds=tuple(folds),
        splits=splits,
        task=task,
        heads=tuple(heads),
        seeds=tuple(options.seeds or DEFAULT_SEEDS),
        training=training,
        lrs={name: lr for name, lr in suited.items() if lr != training.lr},
        standardize=options.standardize,
        warm_start=options.warm_start,
        calibrate=options.calibrate,
    )
    _try_own(experiment)
    if options.warm_start:
        own_classifier(folds[0].loaded, task, folds[0].split.train, standardize=False)
    return experiment


def _try_own(experiment: Experiment) -> None:
    """Build all readouts, and run the user's own on two graphs: what fails there is refused."""
    cache = experiment.caches[0]
    for spec, head in zip(experiment.heads, experiment.build_heads(), strict=True):
        if isinstance(head_info(spec.name).location, str):
            continue
        found = cache.gather(range(min(2, len(cache))), edges=head.needs_edge_index)
        sizes = found.ptr.diff()  # [num_graphs]
        batch = torch.arange(len(sizes)).repeat_interleave(sizes)  # [num_nodes]
        with own_code(head), torch.no_grad(), torch.random.fork_rng(devices=[]):
            given = {"num_graphs": len(sizes), "edge_index": found.edge_index}
            head.eval()(found.history, batch, **given)


def train_head(
    cache: str | Path | Cache,
    out: str | Path,
    *,
    head: str | type[Readout] = "histograph",
    head_options: Mapping[str, Any] | None = None,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train a readout on a cache, and beside it the retrained mean pool it has to beat.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        out: The run folder.
        head: Name of the readout; or your own, as ``my_head.py:MyHead`` or the class.
        head_options: Options of the readout; needed only for those that are named like one of
            :class:`~histograph_post.experiments.options.ExperimentOptions`.
        options: Seeds, split, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``seeds=[0, 1]``, and options of the readout, such
            as ``dim=64, heads=4``.
    """
    options, others = with_keywords(options, keywords)
    spec = HeadSpec(head_name(head), {**(head_options or {}), **others})
    level = open_caches(cache)[0].manifest.layout.level
    experiment = plan_experiment(cache, with_baseline(spec, level), options)
    return run_experiment(experiment, out, chosen=spec.name, options=options)


def compare(
    cache: str | Path | Cache,
    out: str | Path,
    *,
    heads: Sequence[str | type[Readout]] | None = None,
    head_options: Mapping[str, Any] | None = None,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Train several readouts on the same cache, each at the learning rate that suits it.

    The run predicts with the readout that is best by validation, its seeds averaged, and keeps all
    of them: ``hg.predict(run, data, head="concat")`` takes another. ``svm`` and ``boosting`` are
    compared only.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        out: The run folder.
        heads: Names of readouts, or your own as for :func:`train_head`; by default all that suit
            the labels of the cache.
        head_options: Options of the readouts that have them, such as ``{"dropout": 0.1}``, or of
            one, such as ``{"gmt.heads": 2}`` or ``{"my_head.py:MyHead.width": 2}``.
        options: Seeds, split, training and so on, which all experiments share.
        keywords: Any of those by itself, such as ``seeds=[0, 1]``, and options of the readouts that
            have them, such as ``dim=64``.
    """
    options, others = with_keywords(options, keywords)
    options.refuse("warm_start", reason="readouts are compared from random weights")
    if heads is None:
        heads = head_names(open_caches(cache)[0].manifest.layout.level, rivals=True)
    called = {head: head_name(head) for head in heads}
    names = list(dict.fromkeys(called.values()))
    _refuse_namesakes(called)
    if all(name in RIVALS for name in names):
        found = " and ".join(names)
        raise ConfigError(
            f"heads: found {f'{found}, compared only' if found else 'none'}, "
            "expected at least one readout that is saved as a head"
        )
    specs = _with_options(names, {**(head_options or {}), **others}, called)
    experiment = plan_experiment(cache, specs, options, rivals=True)
    return run_experiment(experiment, out, chosen=None, options=options)


def _refuse_namesakes(called: Mapping[str | type[Readout], str]) -> None:
    """Refuse classes of one name from several files: only the last of them would be compared."""
    for name in called.values():
        same = [
            head if isinstance(head, str) else f"{head.__module__}:{head.__name__}"
            for head, other in called.items()
            if other == name and head != name
        ]
        if len(same) > 1:
            raise ConfigError(
                f"heads: found {' and '.join(same)}, which are both called {name}, expected one, "
                "or other names"
            )


def _with_options(
    names: Sequence[str], given: Mapping[str, Any], called: Mapping[Any, str]
) -> list[HeadSpec]:
    """Return each readout with the options it has; ``NAME.option`` overrides ``option``.

    Args:
        called: The name of each readout by how the user named it, such as ``my_head.py:MyHead``.
    """
    known = {name: head_info(name).options() for name in names}
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for option in sorted(given, key=lambda option: "." in option):
        only, _, own = option.rpartition(".")
        only = called.get(only, only)
        among = [only] if only else list(names)
        if only not in ("", *names):
            raise ConfigError(
                f"head option {option!r}: found no readout {only!r}, expected one of those that "
                f"are compared: {', '.join(names)}"
            )
        having = [name for name in among if own in known[name]]
        if not having:
            every = dict.fromkeys(other for name in among for other in known[name])
            raise ConfigError(
                f"head option {option!r}: found no such option of {', '.join(among)}, expected "
                f"one of {', '.join(every)}"
            )
        for name in having:
            found[name][own] = given[option]
    return [HeadSpec(name, options) for name, options in found.items()]
