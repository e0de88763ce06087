"""Tuning: search the options of a readout by validation, and compare the best with the defaults.

    plan_search  (search.py) which readout, on which folds, and between what is chosen
    run_trials   (trials.py) one choice after the other, each a fit per fold
    Tuned        the last layer retrained, the readout as it comes, and as the best trial had it,
                 with every seed: a run like any other

The test part is not looked at before the search is over. Besides what every run has, the folder
holds ``study.log``, the trials as optuna keeps them, ``trials.csv``, the same as a table, and
``best.toml``, with which ``histograph train-head --config`` trains the best options anywhere.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from ..caches import Cache
from ..errors import ConfigError
from ..heads.base import Readout
from ..heads.registry import head_name
from ..runs.fits import Fit, FitSpec
from ..runs.folder import open_run_folder
from ..runs.run import BEST_NAME, FITS_NAME, RESULTS_NAME, Run
from ..utils.files import write_text
from ..utils.text import notebook_bar
from .head_training import Experiment
from .options import ExperimentOptions, HeadSpec, with_keywords
from .results import versus
from .running import finish_experiment
from .search import Search, Space, best_trial, plan_search, read_space
from .study import Trial
from .trials import TrialCallback, run_trials

#: What the tuned readout is called after its name.
STAGE = "tuned"

#: Trials by default.
TRIALS = 30

#: Seeds of the fits after the search, by default.
SEEDS = (0, 1, 2, 3, 4)

#: Options of a readout that `train-head` has flags for.
_FLAGS = {"dim": "dim", "heads": "attention_heads"}


@dataclass(frozen=True)
class Tuned(Experiment):
    """The readout as the best trial had it, beside the one with its defaults."""

    search: Search = field(kw_only=True)
    trials: Sequence[Trial] = field(kw_only=True)
    best: Trial = field(kw_only=True)

    @property
    def is_default(self) -> bool:
        """Whether the best options are the defaults, which need not be trained twice."""
        defaults, best = self.search.defaults(), self.best.values
        return all(name in defaults and defaults[name] == best[name] for name in best)

    @property
    def chosen(self) -> str:
        """What the tuned readout is called in tables and results."""
        name = self.heads[-1].name
        return name if self.is_default else f"{name}-{STAGE}"

    def plan(self) -> dict[str, Any]:
        """Return what the search depends on, as plain values: the rest follows from it."""
        return self.search.plan()

    def fits(self) -> list[FitSpec]:
        """Return the fits of every readout, the tuned one last, a fold at a time."""
        head, training = self.search.chosen(self.best.values)
        found = []
        for fold in self.folds:
            specs = [
                self.fit_spec(own, fold.number, seed) for own in self.heads for seed in self.seeds
            ]
            tuned = [self.fit_spec(head, fold.number, seed) for seed in self.seeds]
            if self.is_default:
                tuned = []
            found += [*specs, *(replace(spec, training=training, stage=STAGE) for spec in tuned)]
        return found

    def finish(self, folder: Path, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
        """Return the best options, and what they gained over the defaults on the test part."""
        _, training = self.search.chosen(self.best.values)
        return {
            "tuning": {
                "trial": self.best.number,
                "values": dict(self.best.values),
                "training": asdict(training),
                "trials": [asdict(trial) for trial in self.trials],
            },
            "versus_default": versus(fits, chosen, self.heads[-1].name, self.task.metric),
        }


def _keep_best(tuned: Tuned, folder: Path) -> None:
    """Write the best options down; fits of other ones, from a search with fewer trials, go."""
    head, training = tuned.search.chosen(tuned.best.values)
    others = {name: value for name, value in head.options.items() if name not in _FLAGS}
    text = tomli_w.dumps(
        {
            "head": head.name,
            **{flag: head.options[name] for name, flag in _FLAGS.items() if name in head.options},
            "head_args": [f"{name}={value}" for name, value in others.items()],
            **asdict(training),
        }
    )
    path = folder / BEST_NAME
    if path.is_file() and path.read_text(encoding="utf-8") != text:
        (folder / RESULTS_NAME).unlink(missing_ok=True)
        place = folder / FITS_NAME / f"{tuned.heads[-1].name}-{STAGE}"
        shutil.rmtree(place, ignore_errors=True)
    write_text(path, text)


def tune(
    cache: str | Path | Cache,
    out: str | Path,
    *,
    trials: int = TRIALS,
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

    A search that was killed goes on where it stopped; one that is over goes on if more trials are
    asked for. The learning rate and the weight decay of ``training`` are what is searched around
    (a weight decay of 0 stays 0); everything else of it stays as it is.

    Args:
        cache: A cache, its folder, or a folder of per-fold caches.
        out: The run folder.
        trials: Choices that are tried, the defaults among them.
        head: Name of the readout; or your own, as ``my_head.py:MyHead`` or the class.
        head_options: Options of the readout that stay as they are.
        space: What is searched, or a TOML file that says so, see :mod:`.search`; by default
            learning rate, weight decay, and what the readout is made of.
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
        replace(options, seeds=options.seeds or SEEDS),
        space=read_space(Path(space), head) if isinstance(space, str | Path) else space,
        trial_seeds=trial_seeds,
        search_seed=search_seed,
        prune=prune,
    )
    experiment = search.experiment
    options.start(experiment)
    with (
        open_run_folder(
            out, search.plan(), config=options.config, overwrite=options.overwrite
        ) as output,
        notebook_bar("trials", watched=on_trial is not None) as update,
    ):
        if update is not None:
            on_trial = lambda trial, best, done, total: update(done, total)  # noqa: E731
        found = run_trials(
            search,
            output.folder,
            trials=trials,
            options=options,
            storage=storage,
            on_trial=on_trial,
        )
        best = best_trial(search, found)
        if best is None:
            reasons = "; ".join(dict.fromkeys(trial.reason for trial in found if trial.reason))
            raise ConfigError(f"{out}: found no trial with a score ({reasons}), expected one")
        given = {field.name: getattr(experiment, field.name) for field in fields(Experiment)}
        tuned = Tuned(**given, search=search, trials=found, best=best)
        _keep_best(tuned, output.folder)
        return finish_experiment(tuned, output, chosen=tuned.chosen, options=options)
