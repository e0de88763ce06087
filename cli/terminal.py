"""What the user sees: tables on stdout, notes and progress on stderr, JSON when asked."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

#: Where nobody watches, a progress line this often (seconds) is enough.
_LOG_INTERVAL = 10.0
#: Width of tables that do not go to a terminal: wide enough that no cell is cut.
_FILE_WIDTH = 160


class Terminal:
    """The command line's voice."""

    def __init__(self, *, json: bool, quiet: bool, options: Mapping[str, Any]) -> None:
        self.json = json
        self.quiet = quiet
        self.options = dict(options)
        self._out = Console(
            file=sys.stdout,
            force_terminal=sys.stdout.isatty(),
            width=None if sys.stdout.isatty() else _FILE_WIDTH,
            highlight=False,
        )
        self._err = Console(
            file=sys.stderr, force_terminal=sys.stderr.isatty(), highlight=False, soft_wrap=True
        )

    @property
    def stdout(self) -> TextIO:
        """Where results go: standard output as it was before user code could print to it."""
        stream: TextIO = self._out.file  # type: ignore[assignment]
        return stream

    def say(self, text: str) -> None:
        """Tell the user something that is not the result (stderr)."""
        if not self.quiet:
            self._err.print(printable(text), markup=False)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a small table (stdout), unless JSON was asked for. Numbers are right-aligned."""
        if self.json:
            return
        table = Table(header_style="", show_header=any(columns))
        for index, column in enumerate(columns):
            numeric = bool(rows) and all(_is_number(row[index]) for row in rows)
            table.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(
                *(Text(printable(str(cell))) for cell in row)
            )  # Text: brackets are no markup
        # Not the table's own title, which is cut to the width of the table.
        self._out.print(Text(printable(title), style="bold"), soft_wrap=True)
        self._out.print(table)

    def result(self, value: Mapping[str, Any], *, next_command: str | None = None) -> None:
        """End a command: the JSON object when asked for, else the next command to run."""
        if self.json:
            print(json.dumps(value, indent=1, ensure_ascii=False), file=self._out.file)
        elif next_command is not None and not self.quiet:
            self._out.print(f"next: {next_command}", markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yield ``update(done, total)``: a bar on a terminal, now and then a line in a log."""
        if self.quiet:
            yield lambda done, total: None
        elif self._err.is_terminal:
            with self._bar() as bar:
                task = bar.add_task(what, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
        else:
            yield self._log_lines(what)

    @contextmanager
    def fit_progress(self, metric_name: str) -> Iterator[FitWatch]:
        """Yield a watcher of an experiment: a line per fit, and a bar on a terminal."""
        bar = self._bar() if self._err.is_terminal and not self.quiet else None
        with bar if bar is not None else nullcontext():
            yield FitWatch(self, metric_name, bar)

    def _bar(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._err,
        )

    def _log_lines(self, what: str) -> Callable[[int, int], None]:
        started = last = time.monotonic()
        first: int | None = None

        def update(done: int, total: int) -> None:
            nonlocal last, first
            now = time.monotonic()
            first = done if first is None else first
            if now - last < _LOG_INTERVAL and done < total:
                return
            last = now
            elapsed = now - started
            rate = (done - first) / elapsed if elapsed > 0 else 0.0
            left = f", {(total - done) / rate:.0f} s left" if rate > 0 and done < total else ""
            self.say(f"{what}: {done}/{total} ({100 * done / max(total, 1):.0f} %){left}")

        return update


class FitWatch:
    """Tells how an experiment goes: a line after each fit, with the time that is left."""

    def __init__(self, terminal: Terminal, metric_name: str, bar: Progress | None) -> None:
        self._terminal = terminal
        self._metric = metric_name
        self._bar = bar
        self._task = None if bar is None else bar.add_task("training", total=None)
        self._started = time.monotonic()

    def epoch_done(self, progress: Any) -> None:
        """Move the bar: a fit counts by the share of its epochs that are over."""
        if self._bar is None or self._task is None:
            return
        trainer = progress.trainer
        share = trainer.progress.epoch / trainer.options.epochs
        self._bar.update(
            self._task,
            completed=progress.done + min(share, 1.0),
            total=progress.total,
            description=f"{progress.head}, fold {progress.fold}, seed {progress.seed}",
        )

    def fit_done(self, fit: Any, done: int, total: int) -> None:
        """Print the fit's line."""
        left = (time.monotonic() - self._started) / done * (total - done)
        valid = fit.scores.get("valid", {}).get(self._metric)
        self._terminal.say(
            f"[{done}/{total}] {fit.spec.name}, fold {fit.spec.fold}, seed {fit.spec.seed}: "
            f"valid {self._metric} {metric(valid)} at epoch {fit.best_epoch}"
            + (f", {duration(left)} left" if done < total else "")
        )


def _is_number(cell: object) -> bool:
    text = str(cell).replace(",", "").replace("±", "").replace(" ", "").rstrip("%")
    if text in ("", "-"):
        return text == "-"
    try:
        float(text)
    except ValueError:
        return text.replace(".", "").replace("-", "").replace("+", "").isdigit()
    return True


def printable(text: str) -> str:
    """Return text from anywhere without the characters that steer a terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text)


def size(num_bytes: float) -> str:
    """Return a number of bytes as people write it."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def metric(value: float | None) -> str:
    """Return a metric with four digits; a missing one as a dash."""
    return "-" if value is None or value != value else f"{value:.4f}"
