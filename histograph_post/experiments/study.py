"""The trials of a search as optuna keeps them, in a file of the run or in a storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingExtraError
from ..runs.run import STUDY_NAME
from ..utils.decoding import json_sha256
from ..utils.files import write_bytes

if TYPE_CHECKING:
    import optuna

    from .search import Search

#: Trials that are not given up, for the median of the others to mean something.
UNPRUNED_TRIALS = 5

#: Share of the epochs after which a trial may be given up.
UNPRUNED_EPOCHS = 0.2

#: Of a trial of an earlier version that took the place of one that was killed: the number of that.
_REPLACES = "replaces"

#: Of a trial that failed.
REASON = "reason"


def import_optuna() -> Any:
    """Import optuna, which is an extra, and let it say nothing but errors."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError("tuning", extra="tune") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


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


def open_study(search: Search, folder: Path, storage: str | None) -> optuna.Study:
    """Open the study of this very search."""
    optuna = import_optuna()
    kept: Any = storage
    if storage is None:
        path = folder / STUDY_NAME
        _drop_torn_line(path)
        path.with_name(f"{STUDY_NAME}.lock").unlink(missing_ok=True)  # of an earlier version
        # Nobody else writes the run's folder. Optuna's own lock would outlive a process.
        backend = optuna.storages.journal.JournalFileBackend(str(path), lock_obj=_NoLock())
        kept = optuna.storages.JournalStorage(backend)
    try:
        return make_study(search, kept, json_sha256(search.plan(), "search")[:16])
    except Exception as error:  # whatever the database raises
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"storage {storage}: cannot be used ({reason}), "
            "expected a URL such as sqlite:///study.db"
        ) from None


def _drop_torn_line(path: Path) -> None:
    """Remove what a killed process had written of the last line of a log."""
    if not path.is_file():
        return
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        write_bytes(path, whole)


class _NoLock:
    """Stands for a lock where none is needed."""

    def acquire(self) -> bool:
        """Take it."""
        return True

    def release(self) -> None:
        """Give it back."""


def make_study(search: Search, storage: Any = None, name: str | None = None) -> optuna.Study:
    """Return the study of that name, a new one in memory without a storage."""
    optuna = import_optuna()
    warmup = math.ceil(UNPRUNED_EPOCHS * search.experiment.training.epochs)
    median = optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=warmup)
    return optuna.create_study(
        storage=storage,
        study_name=name,
        direction="maximize" if search.experiment.task.higher_is_better else "minimize",
        pruner=median if search.prune else optuna.pruners.NopPruner(),
        load_if_exists=True,
    )


def finished(study: optuna.Study) -> dict[int, optuna.trial.FrozenTrial]:
    """Return the trials that are over, without those that were killed, by optuna's number."""
    known = study.get_trials(deepcopy=False)
    killed = {trial.user_attrs.get(_REPLACES) for trial in known}
    over = [trial for trial in known if trial.state.is_finished() and trial.number not in killed]
    return {trial.number: trial for trial in over}


def trials_over(study: optuna.Study) -> dict[int, Trial]:
    """Return the trials that are over by optuna's number; their own numbers have no gaps."""
    return {
        trial.number: Trial(
            number,
            trial.params,
            trial.state.name.lower(),
            trial.value if trial.state.name == "COMPLETE" else None,
            trial.user_attrs.get(REASON),
        )
        for number, trial in enumerate(finished(study).values())
    }
