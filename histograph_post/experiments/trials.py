"""The trials of a search: choices of options, each scored on the validation part.

optuna chooses what to try next, and stores the trials in a file of the run or in a storage. Trials
come in rounds, so that those of a round can run in parallel: what is chosen, and what is pruned,
depends on the trials of earlier rounds only. A search that was killed resumes its unfinished
trials, and makes the choices it would have made.
"""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, MissingExtraError
from ..runs.fits import Fit
from ..runs.run import STUDY_NAME, TRIAL_FITS_NAME, TRIALS_NAME
from ..utils.decoding import json_sha256
from ..utils.files import read_regular, write_bytes, write_text
from ..utils.text import first_line
from .options import ExperimentOptions, FitProgress
from .parallel import FitRunner
from .workers import FitJob, Watcher

if TYPE_CHECKING:
    import optuna

    from .search import Search

#: The first trials, which are not pruned, so that the median of the others means something.
UNPRUNED_TRIALS = 5

#: Share of the epochs after which a trial may be pruned.
UNPRUNED_EPOCHS = 0.2

#: The attribute of a failed trial that says why.
REASON = "reason"


def import_optuna() -> Any:
    """Import optuna, which is an extra, and let it log errors only."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("tuning", extra="tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


@dataclass(frozen=True)
class Trial:
    """One choice of options, and its outcome."""

    number: int
    values: Mapping[str, Any]
    #: ``complete``, ``pruned`` or ``fail``.
    state: str
    #: Mean validation score over folds and seeds; None unless it is complete.
    score: float | None
    #: Why it failed.
    reason: str | None = None


def open_study(search: Search, folder: Path, storage: str | None) -> optuna.Study:
    """Open the study of this search, by the hash of its plan; one of a damaged log begins again."""
    optuna = import_optuna()
    opened: Any = storage
    path = folder / STUDY_NAME
    if storage is None:
        _drop_torn_line(path)
    try:
        if storage is None:
            # The run's folder has one writer, and optuna's own lock would outlive a killed process.
            backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=Lock())
            opened = optuna.storages.JournalStorage(backend)
        study = make_study(search, opened, json_sha256(search.plan(), "search")[:16])
        math.fsum(trial.score or 0.0 for trial in trials_over(study).values())  # all are read
        return study
    except Exception as error:  # whatever the database raises
        reason = first_line(error)
        if storage is None:
            if isinstance(error, OSError) or not path.is_file():
                raise
            text = f"{path}: found a damaged log of trials ({reason}); the search begins again"
            warnings.warn(text, stacklevel=2)
            path.unlink()
            return open_study(search, folder, storage)
        raise ConfigError(
            f"storage {storage}: cannot be used ({reason}), "
            "expected a URL such as sqlite:///study.db"
        ) from None


def _drop_torn_line(path: Path) -> None:
    """Remove the last line of a log if a killed process has left it incomplete."""
    if not os.path.lexists(path):
        return
    data = read_regular(path)
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_bytes(path, whole)


def make_study(search: Search, storage: Any = None, name: str | None = None) -> optuna.Study:
    """Return the study of that name; without a storage, a new one in memory."""
    optuna = import_optuna()
    warmup = math.ceil(UNPRUNED_EPOCHS * search.training.epochs)
    median = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=warmup)
    return optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize" if search.task.higher_is_better else "minimize",
        pruner=median if search.prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


def finished(study: optuna.Study) -> list[optuna.trial.FrozenTrial]:
    """Return the trials that are over, without those that were killed."""
    return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]


def trials_over(study: optuna.Study) -> dict[int, Trial]:
    """Return the trials that are over by optuna's number, numbered without gaps."""
    return {
        trial.number: Trial(
            number,
            trial.params,
            trial.state.name.lower(),
            trial.value if trial.state.name == "COMPLETE" else None,
            trial.user_attrs.get(REASON),
        )
        for number, trial in enumerate(finished(study))
    }


def best_trial(search: Search, trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the best score, the first of equals; None if none has one."""
    sign = 1 if search.task.higher_is_better else -1
    scored = [trial for trial in trials if trial.score is not None]
    return max(scored, key=lambda trial: sign * (trial.score or 0.0), default=None)


#: Trials of a round; the same for any number of jobs, since choices depend on it.
ROUND = 4

#: Called with a trial that is over, the best so far, the number over and the number in all.
TrialCallback = Callable[[Trial, Trial | None, int, int], None]


def run_trials(
    search: Search,
    folder: Path,
    *,
    trials: int,
    options: ExperimentOptions,
    storage: str | None = None,
    on_trial: TrialCallback | None = None,
) -> list[Trial]:
    """Run trials until as many are over as asked for, earlier ones included; return them all.

    Args:
        trials: In all.
    """
    running = _Trials(search, folder, storage, trials, options.on_epoch, on_trial)
    per_trial = len(search.folds) * len(search.trial_seeds)
    planned, expected = ROUND * per_trial, running.num_left * per_trial
    with FitRunner(search, running, planned=planned, options=options, expected=expected) as runner:
        while running.num_left > 0:
            runner.run(running.next_round())
    shutil.rmtree(folder / TRIAL_FITS_NAME, ignore_errors=True)
    return list(running.over.values())


class _Trials(Watcher):
    """The trials of a search that are over, and those of the current round.

    The arguments are those of :func:`run_trials`.
    """

    def __init__(
        self,
        search: Search,
        folder: Path,
        storage: str | None,
        trials: int,
        on_epoch: Callable[[FitProgress], None] | None,
        on_trial: TrialCallback | None,
    ) -> None:
        self.search, self.folder, self._total = search, folder, trials
        self._on_epoch, self._on_trial = on_epoch, on_trial
        self._shared = storage is not None
        self._study = open_study(search, folder, storage)
        self._round: list[_TrialRun] = []
        self._run_of: dict[FitJob, _TrialRun] = {}
        #: Trials that are over, by optuna's number.
        self.over = trials_over(self._study)
        self._write_table()

    @property
    def num_left(self) -> int:
        """Trials that are left to run, 0 or less for none."""
        return self._total - len(self.over)

    def next_round(self) -> list[FitJob]:
        """Choose what is tried next; return the fits of those trials."""
        # The rest of a round that was killed, or cut short by the number of trials.
        count = min(ROUND - len(self.over) % ROUND, self.num_left)
        numbers = range(len(self.over), len(self.over) + count)
        self._round = [
            _TrialRun(self.search, self.folder, self._ask(number), number) for number in numbers
        ]
        self._run_of = {job: run for run in self._round for job in run.jobs}
        return list(self._run_of)

    def _ask(self, number: int) -> optuna.Trial:
        """Return what to try as trial ``number``.

        Searches that share a storage see all of its trials, and choose differently. A search of its
        own sees the trials of earlier rounds, in a temporary study for this one trial, from which
        the trial is copied once it is over.
        """
        search, study, known = self.search, self._study, number
        if self._shared:
            known = len(study.get_trials(deepcopy=False))
        else:
            earlier = finished(study)[: number - number % ROUND]
            study = make_study(search)
            study.add_trials(earlier)
        seed = int(np.random.SeedSequence([search.search_seed, known]).generate_state(1)[0])
        study.sampler = import_optuna().samplers.TPESampler(seed=seed)
        if known == 0:
            study.enqueue_trial(search.defaults(), skip_if_exists=True)
        return study.ask({name: choice.distribution() for name, choice in search.space.items()})

    def wanted(self, job: FitJob) -> bool:
        """Whether the trial of a fit has not ended early."""
        return not self._run_of[job].is_over

    def epoch_done(
        self, job: FitJob, share_done: float, log: Sequence[Mapping[str, float]]
    ) -> None:
        """Report an epoch; prune the trial if its first fit is worse than the median."""
        run = self._run_of[job]
        run.shares[job] = share_done
        if self._on_epoch is not None:
            done = len(self.over) + sum(other.share_done for other in self._round if not other.told)
            place = (f"trial {run.number}", job.spec.fold, job.spec.seed, done, self._total)
            left = {"trials": (self._total - done) * len(run.jobs)}
            self._on_epoch(FitProgress(*place, share_done, left, log[-1]))
        run.report(job, log)
        self._tell()

    def done(self, job: FitJob, fit: Fit) -> None:
        """Add the score of a fit."""
        run = self._run_of[job]
        run.shares[job] = 1.0
        run.report(job, fit.log)
        run.scores[job] = fit.scores["valid"].get(self.search.task.metric, math.nan)
        self._tell()

    def failed(self, job: FitJob, error: Exception) -> None:
        """Let the trial fail if its options do not go together."""
        if not isinstance(error, ConfigError):
            raise error
        self._run_of[job].reason = str(error)
        self._tell()

    def _tell(self) -> None:
        """Report trials in their order, as soon as those before them are over."""
        for run in self._round:
            if not run.is_over:
                break
            if not run.told:
                number = run.tell(self._study)
                self.over = trials_over(self._study)
                self._write_table()
                if self._on_trial is not None:
                    found = list(self.over.values())
                    best = best_trial(self.search, found)
                    self._on_trial(self.over[number], best, len(found), self._total)

    def _write_table(self) -> None:
        """Write the trials that are over as a csv file."""
        text, space = io.StringIO(), self.search.space
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["trial", "state", f"valid_{self.search.task.metric}", *space])
        for trial in self.over.values():
            values = [trial.values[name] for name in space]
            writer.writerow([trial.number, trial.state, trial.score, *values])
        write_text(self.folder / TRIALS_NAME, text.getvalue())


class _TrialRun:
    """A running trial: a fit per fold and seed, all of which end if the first one is pruned."""

    def __init__(self, search: Search, folder: Path, trial: optuna.Trial, number: int) -> None:
        self.number, self._trial, self._task = number, trial, search.task
        #: Whether the study knows its outcome.
        self.told = False
        head, training = search.options_for(trial.params)
        tried_alone = replace(
            search, heads=(head,), training=training, lrs={}, seeds=search.trial_seeds
        )
        # Named by its options, too, so that a trial that was killed resumes its own fits.
        tried = json_sha256(dict(trial.params), "trial")
        self._folder = folder / TRIAL_FITS_NAME / f"{number}-{tried[:16]}"
        plan = json_sha256([search.plan(), tried], "trial")
        self.jobs = [FitJob(replace(spec, plan=plan), self._folder) for spec in tried_alone.fits()]
        #: The share of the epochs of each fit that are over.
        self.shares = dict.fromkeys(self.jobs, 0.0)
        #: The validation scores of fits that are done.
        self.scores: dict[FitJob, float] = {}
        self._pruned = False
        #: Why it failed.
        self.reason: str | None = None
        #: Epochs of the first fit that were reported, and the best score among them.
        self._reported = 0
        self._best: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self._pruned or self.reason is not None or len(self.scores) == len(self.jobs)

    @property
    def share_done(self) -> float:
        """The share of the trial that is over."""
        return 1.0 if self.is_over else statistics.fmean(self.shares.values())

    def report(self, job: FitJob, log: Sequence[Mapping[str, float]]) -> None:
        """Report the best score of the first fit after each of these epochs, once; or prune."""
        if job is not self.jobs[0]:
            return
        better = max if self._task.higher_is_better else min
        for entry in log:
            epoch = int(entry["epoch"])
            if epoch < self._reported:
                continue
            self._reported = epoch + 1
            score = entry.get(f"valid_{self._task.metric}", math.nan)
            if math.isfinite(score):
                self._best = score if self._best is None else better(self._best, score)
            if self._best is not None:
                self._trial.report(self._best, epoch)
            if self._trial.should_prune():
                self._pruned = True
                return

    def tell(self, study: optuna.Study) -> int:
        """Tell the study the outcome; return the trial's number there."""
        states = import_optuna().trial.TrialState
        score, state = None, states.PRUNED if self._pruned else states.FAIL
        if not self._pruned and self.reason is None:
            score = statistics.fmean(self.scores.values())
            if math.isfinite(score):
                state = states.COMPLETE
            else:
                score, self.reason = None, f"validation {self._task.metric} is not finite"
        if self.reason is not None:
            self._trial.set_user_attr(REASON, self.reason)
        told = self._trial.study.tell(self._trial, score, state=state)
        self.told = True
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._trial.study is study:
            return int(told.number)
        study.add_trial(told)
        return int(study.get_trials(deepcopy=False)[-1].number)
