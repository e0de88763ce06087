"""Numbers, names, tables and progress for readers."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError, message_of

if TYPE_CHECKING:
    import pandas

#: A missing number, and the sign of a negative one.
MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"

_METRICS = {
    "roc_auc": "ROC-AUC",
    "ap": "average precision",
    "f1": "macro F1",
    "rmse": "RMSE",
    "mae": "MAE",
    "r2": "R²",
    "mrr": "MRR",
}


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type without a message."""
    return (message_of(error).strip().splitlines() or [type(error).__name__])[0]


def listed(names: Iterable[str], shown: int = 4) -> str:
    """Return the first few names, and how many more there are."""
    several = list(names)
    more = f" and {len(several) - shown} more" if len(several) > shown else ""
    return ", ".join(several[:shown]) + more


def metric_name(name: str) -> str:
    """Return the name of a metric as in papers."""
    return _METRICS.get(name, name.replace("_", " "))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with a few digits; a missing one as a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    if 1e-3 <= abs(value) < 10 or value == 0:
        text = f"{value:.{digits - 1}f}"
    else:
        text = f"{value:.{digits if abs(value) >= 10 else digits - 1}g}"
    return text.replace("-", MINUS)


def spread(mean: float, deviation: float) -> str:
    """Return a mean and its deviation with the same number of decimals."""
    decimals = max(0, 3 - max(0, math.floor(math.log10(abs(mean))))) if mean else 3
    return f"{mean:.{decimals}f} ± {deviation:.{decimals}f}"


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"{value:+.4f}".replace("-", MINUS)


def difference(found: Mapping[str, Any] | None) -> str:
    """Return a paired difference with its interval, if there is one."""
    if found is None:
        return MISSING
    if found["low"] is None:
        return signed(found["mean"])
    return f"{signed(found['mean'])} [{signed(found['low'])}, {signed(found['high'])}]"


def setting(value: Any) -> str:
    """Return the value of an option as text."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def plural(count: int, what: str) -> str:
    """Return a count with its noun."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def text_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as plain text, its columns aligned."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


#: A word of a command as the shell reads it: blanks in quotes do not end it.
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")


def folded_command(command: str, width: int = 80) -> str:
    """Return a command in lines that can be copied, broken before options and `&&` only."""
    parts: list[str] = []
    for word in _SHELL_WORD.findall(command):
        if not parts or word.startswith("-") or word == "&&":
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines = parts[:1]
    for part in parts[1:]:
        if len(f"{lines[-1]} {part} \\") > width:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def score(value: float | None) -> str:
    """Return a metric as the terminal shows it, with four digits; a missing one as a dash."""
    return "-" if value is None or value != value else f"{value:.4f}"


def file_size(num_bytes: float) -> str:
    """Return a number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """Return a duration with its units."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


# --- in notebooks

#: Called with how much is done, and the total.
Update = Callable[[float, float], None]


@contextmanager
def notebook_bar(what: str, *, watched: bool = False) -> Iterator[Update | None]:
    """Yield the function that advances a progress bar in a notebook; None elsewhere.

    Args:
        watched: Whether the caller shows the progress already: no bar.
    """
    if watched or "ipykernel" not in sys.modules:
        yield None
        return
    # Not tqdm.auto, which warns without widgets.
    has_widgets = importlib.util.find_spec("ipywidgets") is not None
    bars = importlib.import_module("tqdm.notebook" if has_widgets else "tqdm.std")
    with bars.tqdm(desc=what, bar_format="{l_bar}{bar}| {elapsed} so far, {remaining} left") as bar:

        def update(done: float, total: float) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        yield update
        if bar.total:  # solved readouts report no epochs
            update(bar.total, bar.total)


def data_frame(rows: Sequence[Mapping[str, Any]], index: str | None = None) -> pandas.DataFrame:
    """Return rows as a pandas frame (extra ``pandas``)."""
    try:
        import pandas
    except ImportError:
        raise MissingExtraError("a data frame", extra="pandas") from None
    frame = pandas.DataFrame(list(rows))
    return frame if index is None else frame.set_index(index)
