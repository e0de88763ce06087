"""Searching the options of a readout by validation, and comparing the best with the defaults.

    plan_search  which readout, on which folds, and the search space
    run_trials   (trials.py) one choice after the other, each a fit per fold
    Tuned        the baseline, the readout with its defaults and with the best options, with every
                 seed: a run like any other

The test part is not used before the search is over. Besides the files of every run, the folder
holds ``study.log``, the trials as optuna stores them, ``trials.csv``, the same as a table, and
``best.toml``, with which ``histograph train-head --config`` trains the best options anywhere.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from ..caches import Cache
from ..errors import ConfigError, NotFoundError
from ..heads.base import Readout
from ..heads.registry import head_info, head_name, is_solved
from ..runs.fits import Fit, FitSpec
from ..runs.run import BEST_NAME, FITS_NAME, RESULTS_NAME, TUNED, Run, staged_name
from ..training.options import TrainingOptions
from ..utils.decoding import read_toml_file
from ..utils.files import write_text
from ..utils.text import notebook_bar
from .folds import open_caches
from .head_training import Experiment, plan_experiment
from .options import ExperimentOptions, HeadSpec, with_baseline, with_keywords
from .results import Averages
from .stage import run_experiment
from .trials import Trial, TrialCallback, best_trial, import_optuna, run_trials

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

TRAINING_NAMES = tuple(field.name for field in fields(TrainingOptions))


@dataclass(frozen=True)
class Range:
    """Any number between two; whole numbers if both are."""

    low: float
    high: float
    #: Uniform in the logarithm.
    log: bool = False
    #: Distance between the values that may be chosen.
    step: float | None = None

    def __post_init__(self) -> None:
        if not self.low < self.high or (self.log and not self.low > 0):
            least = "0 < low < high" if self.log else "low < high"
            raise ConfigError(f"found low {self.low:g} and high {self.high:g}, expected {least}")
        if self.step is not None and (self.log or not self.step > 0):
            raise ConfigError("found a step, expected one above 0, and not together with log")

    def __contains__(self, value: object) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def distribution(self) -> BaseDistribution:
        """Return the range as optuna has it."""
        from optuna.distributions import FloatDistribution, IntDistribution

        if isinstance(self.low, int) and isinstance(self.high, int):
            step = 1 if self.step is None else int(self.step)
            return IntDistribution(self.low, self.high, log=self.log, step=step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)


@dataclass(frozen=True)
class Values:
    """One of several values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigError("found no values, expected at least one")

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def distribution(self) -> BaseDistribution:
        """Return the values as optuna has them."""
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)


#: A search space by the name of the option.
Space = Mapping[str, Range | Values]

#: The search space of a readout, as far as it has the option.
_HEAD_SPACE: Space = {
    "dim": Values((16, 32, 64, 128)),
    "heads": Values((1, 2, 4, 8)),
    "layer_heads": Values((1, 2, 4)),
    "normalization": Values(("bounded", "signed", "softmax")),
    "mix": Values(("statistics", "all", "last")),
    "mlp_layers": Values((0, 1, 2)),
    "dropout": Range(0.0, 0.5, step=0.1),
}


def default_space(head: str, training: TrainingOptions) -> dict[str, Range | Values]:
    """Return the default search space; a weight decay of 0 stays 0, and the paper's form too."""
    info, decay = head_info(head), training.weight_decay
    options = info.options().keys() - info.defaults.keys()
    return {
        "lr": Range(training.lr / 10, training.lr * 10, log=True),
        **({"weight_decay": Range(decay / 100, decay * 100, log=True)} if decay / 100 else {}),
        **{name: choice for name, choice in _HEAD_SPACE.items() if name in options},
    }


def read_space(path: Path, head: str) -> dict[str, Range | Values]:
    """Read a search space from a TOML file: a table for each option.

    Such a table has ``values``, a list, or ``low`` and ``high``, with ``log`` or ``step``.
    """
    if not path.exists():
        raise NotFoundError(f"{path}: found no file, expected a search space in TOML")
    tables = read_toml_file(path)
    known = (*TRAINING_NAMES, *head_info(head).options())
    if not tables:
        raise ConfigError(f"{path}: found no option, expected some of {', '.join(known)}")
    space: dict[str, Range | Values] = {}
    for name, table in tables.items():
        if name not in known:
            raise ConfigError(f"{path}: found {name!r}, expected one of {', '.join(known)}")
        try:
            space[name] = _choice(table)
        except ConfigError as error:
            raise ConfigError(f"{path}: {name}: {error}") from None
    return space


def _choice(table: Any) -> Range | Values:
    kinds: dict[str, Any] = dict.fromkeys(("low", "high", "step"), int | float) | {"log": bool}
    given = table if isinstance(table, dict) else {}
    if given.keys() == {"values"} and isinstance(given["values"], list):
        if all(isinstance(value, str | int | float) for value in given["values"]):
            return Values(tuple(given["values"]))
    elif {"low", "high"} <= given.keys() <= kinds.keys() and all(
        isinstance(value, kinds[name]) for name, value in given.items()
    ):
        return Range(**given)
    raise ConfigError(
        f"found {table!r}, expected values = [...], or numbers low and high, with log or step"
    )


@dataclass(frozen=True)
class Search(Experiment):
    """An experiment whose last readout is tuned."""

    space: Space = field(kw_only=True)
    #: Of the fits of a trial; ``seeds`` are those of the fits after the search.
    trial_seeds: tuple[int, ...] = field(kw_only=True)
    #: Of the choices.
    search_seed: int = field(kw_only=True)
    #: Whether to stop trials that are worse than the median of the others at the same epoch.
    prune: bool = field(kw_only=True)

    def plan(self) -> dict[str, Any]:
        """Return all that the trials depend on, as plain values, without their number."""
        return {
            "stage": "tune",
            "frozen": super().plan(),
            "space": {name: asdict(choice) for name, choice in self.space.items()},
            "trial_seeds": list(self.trial_seeds),
            "search_seed": self.search_seed,
            "prune": self.prune,
        }

    def options_for(self, values: Mapping[str, Any]) -> tuple[HeadSpec, TrainingOptions]:
        """Return the readout and the training of a choice."""
        training = {name: value for name, value in values.items() if name in TRAINING_NAMES}
        options = {name: value for name, value in values.items() if name not in training}
        head = replace(self.heads[-1], options={**self.heads[-1].options, **options})
        return head, replace(self.training_of(head.name), **training)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of the searched options, as far as they are in the space."""
        head = self.heads[-1].name
        known = head_info(head).options() | asdict(self.training_of(head))
        return {name: known[name] for name, choice in self.space.items() if known[name] in choice}


def plan_search(
    cache: str | Path | Cache,
    head: HeadSpec,
    options: ExperimentOptions,
    *,
    space: Space | None = None,
    trial_seeds: Sequence[int] = (0,),
    search_seed: int = 0,
    prune: bool = True,
) -> Search:
    """Plan a search; the arguments are those of :func:`~histograph_post.tune`.

    Wrong options are refused here, before anything is trained or written.
    """
    import_optuna()  # before anything is read
    level = open_caches(cache)[0].manifest.layout.level
    experiment = plan_experiment(cache, with_baseline(head, level), options)
    fixed, solved = head.options, is_solved(head.name, level)
    every = default_space(head.name, experiment.training_of(head.name))
    names = (*TRAINING_NAMES, *head_info(head.name).options())
    if solved:  # its penalty is solved for already; the layers that it reads can be searched
        depths = Values(tuple(range(1, len(experiment.caches[0].widths) + 1)))
        every = {"history_layers": depths} if len(depths.values) > 1 else {}
        every = {name: choice for name, choice in every.items() if name in names}
        names = tuple(every)
        if not names:
            raise ConfigError(
                f"head {head.name!r}: found a readout that is solved, with nothing to search, "
                "expected one that is trained with steps"
            )
    known = ", ".join(names)
    if space is None:
        space = {name: choice for name, choice in every.items() if name not in fixed}
    for name in space:
        if name not in names:
            reason = f" ({head.name!r} is solved)" if solved else ""
            raise ConfigError(f"search space: found {name!r}, expected one of {known}{reason}")
        if name in fixed:
            raise ConfigError(f"{name}: found a value and a choice, expected one of them")
    if not space:
        raise ConfigError(f"search space: found nothing, expected some of {known}")
    if not trial_seeds:
        raise ConfigError("trial seeds: found none, expected at least one")
    for fold in experiment.folds:
        if not len(fold.split.valid):
            raise ConfigError(
                f"fold {fold.number}: found no validation part, expected one to choose options by"
            )
    return Search(
        **vars(experiment),
        space=dict(space),
        trial_seeds=tuple(trial_seeds),
        search_seed=search_seed,
        prune=prune,
    )


@dataclass(frozen=True)
class Tuned(Search):
    """A search that is over: the readout with the best options, and with the defaults."""

    trials: Sequence[Trial] = field(kw_only=True)
    best: Trial = field(kw_only=True)

    @property
    def is_default(self) -> bool:
        """Whether the best options are the defaults, which need not be trained twice."""
        defaults, best = self.defaults(), self.best.values
        return all(name in defaults and defaults[name] == best[name] for name in best)

    @property
    def chosen(self) -> str:
        """The name of the tuned readout in tables and results."""
        name = self.heads[-1].name
        return name if self.is_default else staged_name(name, TUNED)

    def fits(self) -> list[FitSpec]:
        """Return the fits of every readout, the tuned one last, a fold at a time."""
        head, training = self.options_for(self.best.values)
        found = []
        for fold in self.folds:
            for own in self.heads:
                found += [self.fit_spec(own, fold.number, seed) for seed in self.seeds]
            if not self.is_default:
                tuned = [self.fit_spec(head, fold.number, seed) for seed in self.seeds]
                found += [replace(spec, training=training, stage=TUNED) for spec in tuned]
        return found

    def write(self, folder: Path, fits: Sequence[Fit], chosen: str | None) -> dict[str, Any]:
        """Write the results of a run that predicts with the tuned readout."""
        return super().write(folder, fits, self.chosen)

    def finish(self, folder: Path, averages: Averages, chosen: str) -> dict[str, Any]:
        """Return the best options, and what they gained over the defaults on the test part."""
        return {
            "tuning": {
                "trial": self.best.number,
                "values": dict(self.best.values),
                "training": asdict(self.options_for(self.best.values)[1]),
                "trials": [asdict(trial) for trial in self.trials],
            },
            "versus_default": averages.versus(chosen, self.heads[-1].name),
        }


def _keep_best(tuned: Tuned, folder: Path) -> None:
    """Write the best options; fits of others, of a search with fewer trials, are removed."""
    head, training = tuned.options_for(tuned.best.values)
    flags = {"dim": "dim", "heads": "attention_heads"}  # of `train-head`
    others = {name: value for name, value in head.options.items() if name not in flags}
    text = tomli_w.dumps(
        {
            "head": head_info(head.name).code or head.name,
            **{flag: head.options[name] for name, flag in flags.items() if name in head.options},
            "head_args": [f"{name}={value}" for name, value in others.items()],
            **asdict(training),
        }
    )
    path = folder / BEST_NAME
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        (folder / RESULTS_NAME).unlink(missing_ok=True)
        stale = folder / FITS_NAME / staged_name(tuned.heads[-1].name, TUNED)
        shutil.rmtree(stale, ignore_errors=True)
    write_text(path, text)


def tune(
    cache: str | Path | Cache,
    out: str | Path,
    *,
    trials: int = 30,
    head: str | type[Readout] = "histograph",
    head_options: Mapping[str, Any] | None = None,
    space: Space | str | Path | None = None,
    storage: str | None = None,
    trial_seeds: Sequence[int] = (0,),
    search_seed: int = 0,
    prune: bool = True,
    on_trial: TrialCallback | None = None,
    options: ExperimentOptions | None = None,
    **keywords: Any,
) -> Run:
    """Search the options of a readout by validation; train the best beside the defaults.

    A search that was killed resumes where it stopped; a finished one continues if more trials are
    asked for. The learning rate and the weight decay of ``training`` are what is searched around
    (a weight decay of 0 stays 0); everything else of it stays as it is.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        out: The run folder.
        trials: Choices that are tried, the defaults among them.
        head: Name of the readout; or your own, as ``my_head.py:MyHead`` or the class.
        head_options: Options of the readout that stay as they are.
        space: The search space, or a TOML file of it, see :mod:`.search`; by default learning
            rate, weight decay, and options of the readout.
        storage: URL of an optuna storage, for several processes that search together; a file in
            the run folder by default.
        trial_seeds: The score of a trial is the mean over these seeds and over folds.
        search_seed: Seed of the choices.
        prune: Stop trials that are worse than the median of the others at the same epoch.
        on_trial: Called after every trial.
        options: Seeds of the fits after the search, split, training and so on, which all
            experiments share.
        keywords: Any of those by itself, such as ``seeds=[0, 1]``, and options of the readout that
            stay as they are, such as ``dim=64``.
    """
    if trials < 1:
        raise ConfigError(f"trials: found {trials}, expected 1 or more")
    options, others = with_keywords(options, keywords)
    options.refuse("fits", reason="jobs search together in a storage, or by --backend dask")
    head = head_name(head)
    search = plan_search(
        cache,
        HeadSpec(head, {**(head_options or {}), **others}),
        replace(options, seeds=options.seeds or range(5)),
        space=read_space(Path(space), head) if isinstance(space, str | Path) else space,
        trial_seeds=trial_seeds,
        search_seed=search_seed,
        prune=prune,
    )

    def run_search(folder: Path) -> Tuned:
        with notebook_bar("trials", watched=on_trial is not None) as update:
            shown = on_trial
            if update is not None:
                shown = lambda trial, best, done, total: update(done, total)  # noqa: E731
            found = run_trials(
                search, folder, trials=trials, options=options, storage=storage, on_trial=shown
            )
        best = best_trial(search, found)
        if best is None:
            reasons = "; ".join(dict.fromkeys(trial.reason for trial in found if trial.reason))
            raise ConfigError(f"{out}: found no trial with a score ({reasons}), expected one")
        tuned = Tuned(**vars(search), trials=found, best=best)
        _keep_best(tuned, folder)
        return tuned

    return run_experiment(search, out, chosen=None, options=options, first=run_search)
