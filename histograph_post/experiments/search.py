"""What a search is: a readout, the data, and between what is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..caches import Cache
from ..errors import ConfigError, MissingExtraError
from ..heads.registry import head_info
from ..training.options import TrainingOptions
from .folds import open_caches
from .head_training import Experiment, HeadSpec, plan_experiment, with_baseline
from .search_space import TRAINING_NAMES, Space, default_space, space_json


@dataclass(frozen=True)
class Trial:
    """One choice of options, and what it gave."""

    number: int
    values: Mapping[str, Any]
    #: ``complete``, ``pruned`` (given up early) or ``fail``.
    state: str
    #: Mean validation score over folds and seeds; None if it is not complete.
    score: float | None
    #: Why it failed.
    reason: str | None = None


@dataclass(frozen=True)
class Search:
    """What is searched, and on what."""

    #: With the seeds of the fits after the search; its last readout is the one that is tuned.
    experiment: Experiment
    space: Space
    #: Of the fits of a trial.
    trial_seeds: tuple[int, ...]
    #: Of the choices.
    seed: int
    #: Give up trials that are worse than the median of the others at the same epoch.
    prune: bool

    @property
    def head(self) -> HeadSpec:
        """The readout that is tuned, with the options that stay as they are."""
        return self.experiment.heads[-1]

    def plan(self) -> dict[str, Any]:
        """Return all that the trials depend on, as plain values; not how many there are."""
        return {
            "stage": "tune",
            "frozen": self.experiment.plan(),
            "space": space_json(self.space),
            "trial_seeds": list(self.trial_seeds),
            "search_seed": self.seed,
            "prune": self.prune,
        }

    def chosen(self, values: Mapping[str, Any]) -> tuple[HeadSpec, TrainingOptions]:
        """Return the readout and the training that a choice stands for."""
        training = {name: value for name, value in values.items() if name in TRAINING_NAMES}
        options = {name: value for name, value in values.items() if name not in training}
        head = replace(self.head, options={**self.head.options, **options})
        return head, replace(self.experiment.training, **training)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the options that are searched, as far as they may be chosen."""
        known = head_info(self.head.name).options() | asdict(self.experiment.training)
        return {name: known[name] for name, choice in self.space.items() if known[name] in choice}


def best_trial(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the best score, the first of equals; None if none has one."""
    sign = 1 if search.experiment.task.higher_is_better else -1
    scored = [trial for trial in trials if trial.score is not None]
    return max(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)


def import_optuna() -> Any:
    """Import optuna, which is an extra, and let it say nothing but errors."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("tuning", extra="tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def plan_search(
    cache: str | Path | Cache,
    *,
    head: str = "histograph",
    options: Mapping[str, Any] | None = None,
    space: Space | None = None,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    trial_seeds: Sequence[int] = (0,),
    search_seed: int = 0,
    prune: bool = True,
    **settings: Any,
) -> Search:
    """Lay out a search; the arguments are those of :func:`tune`.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        head: Name of the readout.
        options: Options of the readout that stay as they are.
        space: What is searched.
        seeds: Of the fits after the search.
        trial_seeds: Of the fits of a trial.
        search_seed: Of the choices.
        prune: Give up trials early.
        settings: Of :func:`~histograph_post.experiments.head_training.plan_experiment`.
    """
    import_optuna()  # before anything is read
    fixed = dict(options or {})
    level = open_caches(cache)[0].manifest.layout.level
    heads = with_baseline(HeadSpec(head, fixed), level)
    experiment = plan_experiment(cache, heads, seeds=seeds, **settings)
    if space is None:
        every = default_space(head, experiment.training)
        space = {name: choice for name, choice in every.items() if name not in fixed}
    known = (*TRAINING_NAMES, *head_info(head).options())
    for name in space:
        if name not in known:
            raise ConfigError(f"search space: found {name!r}, expected one of {', '.join(known)}")
        if name in fixed:
            raise ConfigError(f"{name}: found a value and a choice, expected one of them")
    if not space:
        raise ConfigError(f"search space: found nothing, expected some of {', '.join(known)}")
    if not trial_seeds:
        raise ConfigError("trial seeds: found none, expected at least one")
    for fold in experiment.folds:
        if not len(fold.split.valid):
            raise ConfigError(
                f"fold {fold.number}: found no validation part, expected one to choose options by"
            )
    return Search(experiment, dict(space), tuple(trial_seeds), search_seed, prune)
