"""How far a command is: a bar where somebody watches, now and then a line in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

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

from .formatting import about, duration, metric, rate

#: Where nobody watches, a line this often (seconds) is enough.
_LOG_INTERVAL = 10.0

#: Columns of a terminal that has room for counts and rates, too.
_WIDE = 110


class _RateColumn(ProgressColumn):
    """How fast it goes."""

    def render(self, task: Task) -> Text:
        return Text(rate(task.finished_speed or task.speed or 0.0))


class _TimesColumn(ProgressColumn):
    """The time that it took so far, and that is left."""

    def render(self, task: Task) -> Text:
        parts = [f"{about(task.elapsed or 0.0)} elapsed"]
        if task.time_remaining:
            parts.append(f"{about(task.time_remaining)} left")
        return Text(", ".join(parts), no_wrap=True)


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
        pace = f", {rate(speed)}" if speed > 0 else ""
        left = f", {duration((total - done) / speed)} left" if pace and done < total else ""
        write(f"{what}: {done}/{total} ({100 * done / max(total, 1):.0f} %){pace}{left}")

    return update


class FitWatch:
    """Shows how an experiment goes: a line after each fit, with the time that is left.

    Args:
        metric_name: The metric that is tracked.
        write: Writes a line.
        epoch_done: Called after every epoch with the name of its fit and what was measured.
        bar: The bar, where somebody watches.
    """

    def __init__(
        self,
        metric_name: str,
        write: Callable[[str], None],
        epoch_done: Callable[[str, Mapping[str, float]], None],
        bar: Progress | None,
    ) -> None:
        self._metric = metric_name
        self._write = write
        self._record_epoch = epoch_done
        self._bar = bar
        self._task = None if bar is None else bar.add_task("training", total=None)
        self.restart()

    def restart(self) -> None:
        """Estimate the time that is left from here on: what follows is other work."""
        self._started = time.monotonic()
        #: The share of its epochs that are over, of every fit that is trained.
        self._trained: dict[tuple[str, int, int], float] = {}
        self._found = 0

    def epoch_done(self, progress: Any) -> None:
        """Advance the bar: a fit counts by the share of its epochs that are over."""
        fit = (progress.head, progress.fold, progress.seed)
        self._trained[fit] = progress.share_done
        self._record_epoch(
            f"{progress.head}/fold-{progress.fold}-seed-{progress.seed}", progress.measured
        )
        if self._bar is None or self._task is None:
            return
        self._bar.update(
            self._task,
            completed=progress.done,
            total=progress.total,
            description=f"{progress.head}, fold {progress.fold}, seed {progress.seed}",
        )

    def fit_done(self, fit: Any, done: int, total: int) -> None:
        """Print the fit's line."""
        key = (fit.spec.name, fit.spec.fold, fit.spec.seed)
        if key in self._trained:
            self._trained[key] = 1.0
        else:
            self._found += 1  # from a run before this one: it took no time
        trained = sum(self._trained.values())
        rest = total - self._found - trained
        left = (time.monotonic() - self._started) / trained * rest if trained else 0.0
        valid = fit.scores.get("valid", {}).get(self._metric)
        place = f"at epoch {fit.best_epoch}"
        if fit.strength is not None:
            place = f"at penalty {fit.strength:.2g}"
        elif fit.best_epoch < 0:  # HistoGraph starts at a solved probe, which may stay the best
            place = "before training"
        place += ", then diverged" * fit.diverged
        # A bar shows the time that is left by itself.
        ending = f", {duration(left)} left" if left and self._bar is None else ""
        self._write(
            f"[{done}/{total}] {fit.spec.label}: "
            f"valid {self._metric} {metric(valid)} {place}{ending}"
        )
