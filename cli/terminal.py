"""What the user sees: tables on stdout, notes and progress on stderr, JSON when asked."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from histograph_post.errors import MissingExtraError

from .formatting import duration as duration
from .formatting import is_number, printable
from .formatting import metric as metric
from .formatting import size as size
from .progress import FitWatch, advance_bar, log_lines, make_bar

if TYPE_CHECKING:
    from rich.progress import Progress

    from histograph_post.runs.fits import Fit

#: Width of tables that do not go to a terminal: wide enough that no cell is cut.
_FILE_WIDTH = 160


class Terminal:
    """Where a command prints: its result, and what a user should know meanwhile.

    Args:
        options: The options of the command, resolved.
        json: Print one JSON object instead of tables.
        quiet: Print nothing but the result.
        verbose: Print details, too, such as every epoch.
        events: Writes what every epoch measured, too.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, Any],
        json: bool = False,
        quiet: bool = False,
        verbose: bool = False,
        events: EventFiles | None = None,
    ) -> None:
        self.options = dict(options)
        self.json = json
        self.quiet = quiet
        self.verbose = verbose
        self._events = events
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

    def info(self, text: str) -> None:
        """Print a line that is not the result (stderr)."""
        if not self.quiet:
            self._err.print(printable(text), markup=False)

    def detail(self, text: str) -> None:
        """Print a line for those who asked for details (stderr)."""
        if self.verbose:
            self.info(text)

    def say(self, text: str) -> None:
        """Print a sentence that is part of the result (stdout), unless JSON was asked for."""
        if not self.json:
            self._out.print(
                Text(printable(text)), style="bold", soft_wrap=not self._out.is_terminal
            )

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[object]],
        *,
        bold: int | None = None,
    ) -> None:
        """Print a small table (stdout), unless JSON was asked for. Numbers are right-aligned.

        Cells wrap at words; a table that would have to break words is turned on its side.

        Args:
            title: Stands above it.
            columns: Headings; empty ones for a list of facts.
            rows: Cells.
            bold: The row to stress.
        """
        if self.json:
            return
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        room = self._out.width
        turned = [list(column) for column in zip(columns, *cells, strict=True)]
        if any(columns) and _least_width([columns, *cells]) > room >= _least_width(turned):
            (columns, *cells), bold = turned, None
        table = Table(header_style="", show_header=any(columns))
        for index, column in enumerate(columns):
            numeric = bool(cells) and all(is_number(row[index]) for row in cells)
            table.add_column(
                printable(column),
                justify="right" if numeric else "left",
                overflow="fold",
                min_width=min(_longest_word(row[index] for row in [columns, *cells]), room // 2),
            )
        for at, row in enumerate(cells):
            # Text: brackets are no markup
            table.add_row(*map(Text, row), style="bold" if at == bold else None)
        # Not the table's own title, which is cut to the width of the table.
        self._out.print(Text(printable(title), style="bold"), soft_wrap=True)
        self._out.print(table)

    def result(self, value: Mapping[str, Any], *, next_command: str | None = None) -> None:
        """End a command: the JSON object when asked for, else the next command to run."""
        if self.json:
            print(json.dumps(value, indent=1, ensure_ascii=False), file=self._out.file)
        elif next_command is not None and not self.quiet:
            self._out.print(f"next: {printable(next_command)}", markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str, *, at_once: bool = True) -> Iterator[Callable[[int, int], None]]:
        """Yield ``update(done, total)``: a bar on a terminal, now and then a line in a log.

        The bar is there from the beginning, or (``at_once=False``) from the first update.
        """
        if self.quiet:
            yield lambda done, total: None
        elif self._err.is_terminal:
            with make_bar(self._err) as bar:
                task = bar.add_task(what, total=None, visible=at_once, start=False)
                yield functools.partial(advance_bar, bar, task)
        else:
            yield log_lines(what, self.info)

    def note(self, text: str) -> None:
        """Print a note: what is good to know before the work begins (stderr)."""
        self.info(f"note: {text}")

    @contextmanager
    def watch_experiment(self) -> Iterator[ExperimentWatch]:
        """Yield what an experiment reports to: a line per fit, and a bar on a terminal."""
        bar = make_bar(self._err) if self._err.is_terminal and not self.quiet else None
        with bar if bar is not None else nullcontext():
            yield ExperimentWatch(self, bar)

    def epoch_done(self, name: str, measured: Mapping[str, float]) -> None:
        """Record an epoch: in event files if asked for, and as a detail."""
        if self._events is not None:
            self._events.write(name, measured)
        numbers = (f"{key} {value:.4g}" for key, value in measured.items() if key != "epoch")
        self.detail(f"{name}, epoch {measured['epoch']}: {', '.join(numbers)}")


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a table is that breaks lines at spaces only."""
    columns = list(zip(*rows, strict=True))
    return 1 + sum(3 + _longest_word(column) for column in columns)


class ExperimentWatch(FitWatch):
    """Prints what an experiment reports: its notes, a line per fit, how far it is.

    Args:
        terminal: Where to print.
        bar: The bar, on a terminal.
    """

    def __init__(self, terminal: Terminal, bar: Progress | None) -> None:
        super().__init__("", terminal.info, terminal.epoch_done, bar)
        self._terminal = terminal
        self._seconds: dict[str, list[float]] = {}

    @property
    def metric(self) -> str:
        """The metric that is tracked."""
        return self._metric

    def started(self, metric_name: str, notes: Sequence[str]) -> None:
        """Print the notes; the lines to come are about this metric."""
        self._metric = metric_name
        for note in notes:
            self._terminal.note(note)

    def fit_done(self, fit: Fit, done: int, total: int) -> None:
        """Print the fit's line, and record how long its epochs took."""
        self._seconds.setdefault(fit.spec.name, []).append(fit.seconds_per_epoch)
        super().fit_done(fit, done, total)

    def seconds_per_epoch(self) -> dict[str, float]:
        """Return the median over the fits of each readout."""
        return {name: median(values) for name, values in self._seconds.items()}


# --- TensorBoard

#: Seconds until what was written can be looked at.
_FLUSH_EVERY = 10


class EventFiles:
    """Writes what every epoch measured, a folder per fit (extra ``tensorboard``).

    Args:
        folder: Where they go; made with the first measurement.
    """

    def __init__(self, folder: str | Path) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("--tensorboard", extra="tensorboard")
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def write(self, name: str, measured: Mapping[str, float]) -> None:
        """Write the measurements of one epoch of the fit ``name``, such as ``mean/fold-0``."""
        from torch.utils.tensorboard import SummaryWriter

        epoch = int(measured["epoch"])
        if name not in self._writers:
            # A fit that goes on may repeat its last epochs: what was written of them is void.
            self._writers[name] = SummaryWriter(
                str(self._folder / name), purge_step=epoch, flush_secs=_FLUSH_EVERY
            )
        for key, value in measured.items():
            if key != "epoch":
                self._writers[name].add_scalar(key, value, epoch)

    def close(self) -> None:
        """Write out what is left."""
        for writer in self._writers.values():
            writer.close()
