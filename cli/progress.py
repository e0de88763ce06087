"""How far a command is: a bar where somebody watches, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from histograph_post.utils.text import duration, score

if TYPE_CHECKING:
    from histograph_post.experiments.options import FitProgress
    from histograph_post.runs.fits import Fit

    from .terminal import Terminal


#: Where nobody watches, a line this often (seconds) is enough.
_LOG_INTERVAL = 10.0

#: Columns of a terminal that has room for counts and rates, too.
_WIDE = 110


class _RateColumn(ProgressColumn):
    """How fast it goes."""

    def render(self, task: Task) -> Text:
        return Text(_rate(task.finished_speed or task.speed or 0.0))


def _rate(per_second: float) -> str:
    """Return how fast something goes: so many a second, or the time each takes."""
    if per_second <= 0:
        return ""
    return f"{per_second:,.0f}/s" if per_second >= 10 else f"{duration(1 / per_second)} each"


class _TimesColumn(ProgressColumn):
    """The time that it took so far, and that is left."""

    def render(self, task: Task) -> Text:
        parts = [f"{_about(task.elapsed or 0.0)} elapsed"]
        time_left = f"{_about(task.time_remaining)} left" if task.time_remaining else ""
        parts.append(task.fields.get("left", time_left))  # an experiment knows better
        return Text(", ".join(filter(None, parts)), no_wrap=True)


def _about(seconds: float) -> str:
    """Return a time in short form: without the seconds from a minute on."""
    return duration(seconds).partition(" min")[0] + " min" if seconds >= 60 else f"{seconds:.0f} s"


def make_bar(console: Console) -> Progress:
    """Return a bar with what is done and the time that is left; it goes when the work is over."""
    counts = [MofNCompleteColumn(), _RateColumn()] if console.width >= _WIDE else []
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(max_width=14)),  # gives way to the words
        TaskProgressColumn(),
        *counts,
        _TimesColumn(table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
    )


def advance_bar(bar: Progress, task: TaskID, done: int, total: int) -> None:
    """Move a bar; its clock starts with the first call, which tells what was there before."""
    if not bar.tasks[task].started:
        bar.start_task(task)
    bar.update(task, completed=done, total=total, visible=True)


def log_lines(what: str, write: Callable[[str], None]) -> Callable[[int, int], None]:
    """Return ``update(done, total)``, which writes a line now, every few seconds and at the end.

    The first call tells what was there before: the clock of the rate starts with it.
    """
    started = last = 0.0
    first: int | None = None

    def update(done: int, total: int) -> None:
        nonlocal started, last, first
        now = time.monotonic()
        if first is None:
            started = last = now
            first = done
        elif now - last < _LOG_INTERVAL and done < total:
            return
        last = now
        speed = (done - first) / (now - started) if now > started else 0.0
        pace = f", {_rate(speed)}" if speed > 0 else ""
        left = f", {duration((total - done) / speed)} left" if pace and done < total else ""
        write(f"{what}: {done}/{total} ({100 * done / max(total, 1):.0f} %){pace}{left}")

    return update


class ExperimentWatch:
    """Shows how an experiment goes: notes, a line after each fit, the time that is left."""

    def __init__(self, terminal: Terminal, bar: Progress | None) -> None:
        self._terminal = terminal
        self._bar = bar
        self._task = None if bar is None else bar.add_task("training", total=None, left="")
        self._seconds: dict[str, list[float]] = {}
        #: The metric that is tracked.
        self.metric = ""
        self._started = time.monotonic()
        self._last: float | None = None
        #: Of each readout, the seconds that its fits took, and the fits done in them.
        self._spent: dict[str, tuple[float, float]] = {}
        #: The share of its epochs that are over, of every fit that is trained.
        self._trained: dict[tuple[str, int, int], float] = {}
        self._left: dict[str, float] = {}

    def started(self, metric: str, notes: Sequence[str]) -> None:
        """Print the notes; the lines to come are about this metric."""
        self.metric = metric
        for note in notes:
            self._terminal.note(note)

    def epoch_done(self, progress: FitProgress) -> None:
        """Advance the bar: a fit counts by the share of its epochs that are over."""
        head, fold, seed = progress.head, progress.fold, progress.seed
        self._left = dict(progress.left)
        self._advance((head, fold, seed), progress.share_done)
        self._terminal.epoch_done(f"{head}/fold-{fold}-seed-{seed}", progress.measured)
        if self._bar is not None and self._task is not None:
            self._bar.update(
                self._task,
                completed=progress.done,
                total=progress.total,
                description=f"{head}, fold {fold}, seed {seed}",
                left=self._time_left(_about),
            )

    def _advance(self, key: tuple[str, int, int], share: float) -> None:
        """Record how much of a fit is done: the time since the last call was spent on it."""
        now, before = time.monotonic(), self._trained.get(key, 0.0)
        # A first epoch also has to compile and to load, so that it tells nothing of others.
        if self._last is not None or share == 1:
            name = key[0] if key[0] in self._left else next(iter(self._left))
            since = self._started if self._last is None else self._last
            seconds, fits = self._spent.get(name, (0.0, 0.0))
            self._spent[name] = seconds + now - since, fits + share - before
        self._trained[key], self._last = share, now

    def _time_left(self, text: Callable[[float], str]) -> str:
        """Return how long the rest takes; of readouts that have not begun, nothing is known."""
        paces = {name: seconds / fits for name, (seconds, fits) in self._spent.items() if fits > 0}
        left = sum(paces.get(name, 0.0) * fits for name, fits in self._left.items())
        known = paces.keys() | self._seconds.keys()  # solutions are copied from seed to seed
        more = any(fits > 0 and name not in known for name, fits in self._left.items())
        return f"{'at least ' * more}{text(left)} left" if left > 0 else ""

    def fit_done(self, fit: Fit, done: int, total: int) -> None:
        """Print the fit's line, and record how long its epochs took."""
        self._seconds.setdefault(fit.spec.name, []).append(fit.seconds_per_epoch)
        key = (fit.spec.name, fit.spec.fold, fit.spec.seed)
        if fit.spec.name in self._left:
            self._left[fit.spec.name] -= 1 - self._trained.get(key, 0.0)
        if key in self._trained:  # else it is from an earlier run, and took no time
            self._advance(key, 1.0)
        place = f"at epoch {fit.best_epoch}"
        if fit.strength is not None:
            place = f"at penalty {fit.strength:.2g}"
        elif fit.best_epoch < 0:  # HistoGraph starts at a solved probe, which may stay the best
            place = "before training"
        place += ", then diverged" * fit.diverged
        # A bar shows the time that is left by itself.
        left = self._time_left(duration) if self._bar is None else ""
        valid = score(fit.scores.get("valid", {}).get(self.metric))
        self._terminal.info(
            f"[{done}/{total}] {fit.spec.label}: valid {self.metric} {valid} {place}"
            f"{', ' * bool(left)}{left}"
        )

    def seconds_per_epoch(self) -> dict[str, float]:
        """Return the median over the fits of each readout."""
        return {name: median(values) for name, values in self._seconds.items()}
