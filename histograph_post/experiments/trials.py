"""The trials of a search: choices of options, each scored by its validation part.

What to try next is up to optuna, which keeps the trials as well. A search that was killed goes on
with the trial it was at, and chooses what it would have chosen.
"""

from __future__ import annotations

import csv
import io
import math
import shutil
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..errors import ConfigError
from ..runs.run import STUDY_NAME, TRIAL_FITS_NAME, TRIALS_NAME
from ..training.loop import Trainer
from ..utils.decoding import json_sha256
from ..utils.devices import resolve_device
from ..utils.files import write_text
from .search import Search, Trial, best_trial, import_optuna
from .stage import FitProgress

if TYPE_CHECKING:
    import optuna

#: Trials that are not given up, for the median of the others to mean something.
UNPRUNED_TRIALS = 5

#: Share of the epochs after which a trial may be given up.
UNPRUNED_EPOCHS = 0.2

#: Of a trial that takes the place of one that was killed: the number of that.
_REPLACES = "replaces"

#: Of a trial that failed.
_REASON = "reason"

#: Told of a trial that is over, the best so far, the number over and the number in all.
TrialCallback = Callable[[Trial, Trial | None, int, int], None]


def run_trials(
    search: Search,
    folder: Path,
    *,
    trials: int,
    storage: str | None = None,
    device: str = "auto",
    on_epoch: Callable[[FitProgress], None] | None = None,
    on_trial: TrialCallback | None = None,
) -> list[Trial]:
    """Run trials until as many are over as asked for, earlier ones included; return them all.

    Args:
        search: What is searched.
        folder: The run.
        trials: In all.
        storage: URL of an optuna storage; a file in the folder by default.
        device: Where to train.
        on_epoch: Told after every epoch.
        on_trial: Told of every trial that is over.
    """
    study, where = _open_study(search, folder, storage), resolve_device(device)
    distributions = {name: choice.distribution() for name, choice in search.space.items()}
    over = _trials_over(study)
    _write_table(over.values(), search, folder)
    while len(over) < trials:
        # Seeded by what is known: a search that was killed chooses what it would have chosen, and
        # those that share a storage choose differently.
        known = len(over) if storage is None else len(study.get_trials(deepcopy=False))
        seed = int(np.random.SeedSequence([search.seed, known]).generate_state(1)[0])
        study.sampler = import_optuna().samplers.TPESampler(seed=seed)
        asked = study.ask(distributions)

        def epoch_done(progress: FitProgress, done: int = len(over)) -> None:
            if on_epoch is not None:
                total = replace(
                    progress, head=f"trial {done}", done=done + progress.done, total=trials
                )
                on_epoch(total)

        _TrialRun(search, study, asked, folder, where, epoch_done).run()
        over = _trials_over(study)
        _write_table(over.values(), search, folder)
        if on_trial is not None:
            found = list(over.values())
            on_trial(over[asked.number], best_trial(search, found), len(found), trials)
    shutil.rmtree(folder / TRIAL_FITS_NAME, ignore_errors=True)
    return list(over.values())


def _open_study(search: Search, folder: Path, storage: str | None) -> Any:
    """Open the study of this very search; a trial that was killed is to be run again."""
    optuna = import_optuna()
    kept: Any = storage
    if storage is None:
        backend = optuna.storages.journal.JournalFileBackend(str(folder / STUDY_NAME))
        kept = optuna.storages.JournalStorage(backend)
    warmup = math.ceil(UNPRUNED_EPOCHS * search.experiment.training.epochs)
    median = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=warmup)
    try:
        study = optuna.create_study(
            storage=kept,
            study_name=json_sha256(search.plan(), "search")[:16],
            direction="maximize" if search.experiment.task.higher_is_better else "minimize",
            pruner=median if search.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )
    except Exception as error:  # whatever the database raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"storage {storage}: cannot be used ({reason}), "
            "expected a URL such as sqlite:///study.db"
        ) from None
    if storage is None:  # then no other process runs a trial
        for killed in study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            study.tell(killed.number, state=optuna.trial.TrialState.FAIL)
            study.enqueue_trial(killed.params, user_attrs={_REPLACES: killed.number})
    if not study.trials:
        study.enqueue_trial(search.defaults(), skip_if_exists=True)
    return study


def _trials_over(study: optuna.Study) -> dict[int, Trial]:
    """Return the trials that are over, without those that were killed, by optuna's number."""
    known = study.get_trials(deepcopy=False)
    killed = {trial.user_attrs.get(_REPLACES) for trial in known}
    over = [trial for trial in known if trial.state.is_finished() and trial.number not in killed]
    return {
        trial.number: Trial(
            number,
            trial.params,
            trial.state.name.lower(),
            trial.value if trial.state.name == "COMPLETE" else None,
            trial.user_attrs.get(_REASON),
        )
        for number, trial in enumerate(over)
    }


class _TrialRun:
    """A trial being run: a fit per fold and seed, given up early if it is worse than most.

    Args:
        search: What is searched.
        study: Told what came out.
        trial: What to try.
        folder: The run.
        device: Where to train.
        on_epoch: Told after every epoch; its ``done`` is the share of the trial that is over.
    """

    def __init__(
        self,
        search: Search,
        study: optuna.Study,
        trial: optuna.Trial,
        folder: Path,
        device: torch.device,
        on_epoch: Callable[[FitProgress], None],
    ) -> None:
        self._search, self._study, self._trial = search, study, trial
        self._device, self._on_epoch = device, on_epoch
        head, training = search.chosen(trial.params)
        self._experiment = replace(
            search.experiment, heads=(head,), training=training, seeds=search.trial_seeds
        )
        # Named by what is tried: a trial that was killed goes on with the fits it has.
        name = json_sha256(dict(trial.params), "trial")[:16]
        self._folder = folder / TRIAL_FITS_NAME / name
        #: Share of each fit that is over, by fold and seed.
        self._shares: dict[tuple[int, int], float] = {}
        self._reported = 0
        self._best: float | None = None

    def run(self) -> None:
        """Train the fits and tell the study what they gave."""
        optuna = import_optuna()
        states = optuna.trial.TrialState
        try:
            score = self._score()
        except optuna.TrialPruned:
            self._study.tell(self._trial, state=states.PRUNED)
        except ConfigError as error:  # options that do not go together
            self._fail(str(error))
        else:
            if math.isfinite(score):
                self._study.tell(self._trial, score)
            else:
                self._fail(f"validation {self._experiment.task.metric} is not finite")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fail(self, reason: str) -> None:
        self._trial.set_user_attr(_REASON, reason)
        self._study.tell(self._trial, state=import_optuna().trial.TrialState.FAIL)

    def _score(self) -> float:
        """Return the mean validation score over folds and seeds."""
        scores = []
        for spec in self._experiment.fits():

            def epoch_done(trainer: Trainer, fold: int = spec.fold) -> None:
                self._epoch_done(fold, trainer)

            fit = self._experiment.fit(spec, self._folder, device=self._device, on_epoch=epoch_done)
            self._shares[spec.fold, spec.seed] = 1.0
            scores.append(fit.scores["valid"].get(self._experiment.task.metric, math.nan))
        return statistics.fmean(scores)

    def _epoch_done(self, fold: int, trainer: Trainer) -> None:
        seeds, folds = self._experiment.seeds, self._experiment.folds
        self._shares[fold, trainer.seed] = trainer.share_done
        done = sum(self._shares.values()) / (len(folds) * len(seeds))
        head = self._experiment.heads[0].name
        self._on_epoch(FitProgress(head, fold, trainer.seed, done, 1, trainer))
        if (fold, trainer.seed) == (folds[0].number, seeds[0]):
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Report the best score after every epoch so far, also of those before a kill."""
        task = self._experiment.task
        better = max if task.higher_is_better else min
        for entry in trainer.progress.log[self._reported :]:
            score = entry.get(f"valid_{task.metric}", math.nan)
            if math.isfinite(score):
                self._best = score if self._best is None else better(self._best, score)
            if self._best is not None:
                self._trial.report(self._best, int(entry["epoch"]))
            self._reported += 1
        if self._trial.should_prune():
            raise import_optuna().TrialPruned


def _write_table(trials: Iterable[Trial], search: Search, folder: Path) -> None:
    """Write trials as a table of comma-separated values."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["trial", "state", f"valid_{search.experiment.task.metric}", *search.space])
    for trial in trials:
        values = [trial.values[name] for name in search.space]
        writer.writerow([trial.number, trial.state, trial.score, *values])
    write_text(folder / TRIALS_NAME, text.getvalue())
