"""What the user sees: tables on stdout, notes and progress on stderr, JSON when asked."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from histograph_post.errors import MissingExtraError, printable
from histograph_post.runs.run import EVENTS_NAME
from histograph_post.utils.outputs import folder_in_use
from histograph_post.utils.text import folded_command

from .progress import ExperimentWatch, advance_bar, log_lines, make_bar

#: Width of tables that do not go to a terminal: wide enough that no cell is cut.
_FILE_WIDTH = 160

#: Characters of a note; of a longer one, the rest is a detail.
_LONG_NOTE = 400


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
        # A terminal breaks lines anywhere: there they are wrapped at words. A log has them whole.
        is_terminal = sys.stderr.isatty()
        self._err = Console(
            file=sys.stderr,
            force_terminal=is_terminal,
            highlight=False,
            soft_wrap=not is_terminal,
        )

    @property
    def styled(self) -> bool:
        """Whether results are shown with styles such as bold."""
        return self._out.is_terminal

    @property
    def stdout(self) -> TextIO:
        """Where results go: standard output as it was before user code could print to it."""
        stream: TextIO = self._out.file  # type: ignore[assignment]
        return stream

    def info(self, text: str) -> None:
        """Print a line that is not the result (stderr)."""
        if not self.quiet:
            self._err.print(printable(text), markup=False)

    def command(self, text: str) -> None:
        """Print a command that is run (stderr), so that it can be copied."""
        if not self.quiet:
            self._err.print(_command(text, self._err), markup=False, soft_wrap=True)

    def load_torch(self) -> None:
        """Load PyTorch, which takes seconds, under a spinner where somebody watches."""
        if self.quiet or not self._err.is_terminal or "torch" in sys.modules:
            return
        with self._err.status("loading PyTorch"):
            import torch_geometric  # noqa: F401

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

        Cells wrap at words. A table that is too wide for that is transposed, or, if that is too
        wide as well, becomes a list with a line per cell.

        Args:
            title: Stands above it.
            columns: Headings; empty ones for a list of facts.
            rows: Cells.
            bold: The row to stress.
        """
        if self.json:
            return
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        filled = [at for at, name in enumerate(columns) if name or any(row[at] for row in cells)]
        columns, *cells = [[row[at] for at in filled] for row in [columns, *cells]]
        room, height = self._out.width, 1
        if any(columns) and _least_width([columns, *cells]) > room:
            transposed = [list(column) for column in zip(columns, *cells, strict=True)]
            if _least_width(transposed) <= room:
                (columns, *cells), bold = transposed, None
            else:
                height = len(columns)
                cells = [list(pair) for row in cells for pair in zip(columns, row, strict=True)]
                columns, bold = ["", ""], None
        table = Table(header_style="", show_header=any(columns))
        for index, column in enumerate(columns):
            numeric = bool(cells) and all(_is_number(row[index]) for row in cells)
            table.add_column(
                printable(column),
                justify="right" if numeric else "left",
                overflow="fold",
                min_width=min(_longest_word(row[index] for row in [columns, *cells]), room // 2),
            )
        for at, row in enumerate(cells):
            # Text: brackets are no markup
            ends = height > 1 and at % height == height - 1
            style = "bold" if at == bold else None
            table.add_row(*map(Text, row), style=style, end_section=ends)
        # Not the table's own title, which is cut to the width of the table.
        self._out.print(Text(printable(title), style="bold"), soft_wrap=not self._out.is_terminal)
        self._out.print(table)

    def result(self, value: Mapping[str, Any], *, next_command: str | None = None) -> None:
        """End a command: the JSON object when asked for, else the next command to run."""
        if self.json:
            text = json.dumps(value, indent=1, ensure_ascii=False)
            print(printable(text, escape="\\u{:04x}"), file=self._out.file)
        elif next_command is not None and not self.quiet:
            text = _command(f"next: {next_command}", self._out)
            self._out.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def progress(self, what: str) -> Iterator[Callable[[int, int], None]]:
        """Yield ``update(done, total)``: a bar on a terminal, now and then a line in a log."""
        with self.steps(what) as (update,):
            yield update

    @contextmanager
    def steps(self, *names: str) -> Iterator[list[Callable[[int, int], None]]]:
        """Yield an ``update(done, total)`` for each of these steps; one may never be called.

        A step is shown from its first update on, and its clock starts then.
        """
        if self.quiet:
            yield [lambda done, total: None for _ in names]
        elif self._err.is_terminal:
            with make_bar(self._err) as bar:
                tasks = [
                    bar.add_task(name, total=None, visible=False, start=False) for name in names
                ]
                yield [functools.partial(advance_bar, bar, task) for task in tasks]
        else:
            yield [log_lines(name, self.info) for name in names]

    def note(self, text: str) -> None:
        """Print a note: what is good to know before the work begins (stderr)."""
        if len(text) > _LONG_NOTE and not self.verbose:  # a list of rows or names
            text = f"{text[:_LONG_NOTE].rpartition(' ')[0]} ... (-v shows all of it)"
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


def _command(text: str, console: Console) -> str:
    """Return a command in lines of a terminal's width; in a log it is one line."""
    text = printable(text)
    return folded_command(text, console.width) if console.is_terminal else text


def _is_number(cell: str) -> bool:
    """Return whether a cell of a table reads as a number: with units of %, ± or none at all."""
    text = cell.replace(",", "").replace("±", "").replace(" ", "").rstrip("%")
    if text in ("", "-"):
        return text == "-"
    try:
        float(text)
    except ValueError:
        return text.replace(".", "").replace("-", "").replace("+", "").isdigit()
    return True


def _longest_word(texts: Iterable[str]) -> int:
    return max((len(word) for text in texts for word in text.split()), default=0)


def _least_width(rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a table is that breaks lines at spaces only."""
    columns = list(zip(*rows, strict=True))
    return 1 + sum(3 + _longest_word(column) for column in columns)


# --- TensorBoard

#: Seconds until what was written can be looked at.
_FLUSH_EVERY = 10


class EventFiles:
    """Writes what every epoch measured, a folder per fit (extra ``tensorboard``).

    Args:
        run: The run they go into, which is there when something is measured.
    """

    def __init__(self, run: Path) -> None:
        if find_spec("tensorboard") is None:
            raise MissingExtraError("--tensorboard", extra="tensorboard")
        self._run = run
        self._writers: dict[str, Any] = {}

    def write(self, name: str, measured: Mapping[str, float]) -> None:
        """Write the measurements of one epoch of the fit ``name``, such as ``mean/fold-0``."""
        from torch.utils.tensorboard import SummaryWriter

        epoch = int(measured["epoch"])
        if name not in self._writers:
            # A fit that is resumed may repeat its last epochs: what was written of them is void.
            folder = folder_in_use(self._run) / EVENTS_NAME / name
            self._writers[name] = SummaryWriter(
                str(folder), purge_step=epoch, flush_secs=_FLUSH_EVERY
            )
        for key, value in measured.items():
            if key != "epoch":
                self._writers[name].add_scalar(key, value, epoch)

    def close(self) -> None:
        """Write out what is left."""
        for writer in self._writers.values():
            writer.close()
