"""Everything this package raises on purpose.

One base, few kinds. Each message says where, what was found and what was expected; the command
line prints it as one line and exits with 1. The kinds double as the standard exceptions a Python
caller would look for.
"""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Any

_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str, escape: str = "?") -> str:
    """Return text from anywhere without characters that control a terminal or cannot be shown.

    Those are control characters, marks of writing direction, and lone surrogates.

    Args:
        escape: Replaces each of them; its code point is formatted into it.
    """
    return _UNPRINTABLE.sub(lambda found: escape.format(ord(found[0])), text)


class HistographError(Exception):
    """Base of every failure this package knows about."""

    #: A longer explanation (a table, a list) the command line prints above the one-line message.
    details: str = ""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details

    def __str__(self) -> str:
        # It may quote text from anywhere, which tracebacks show as well.
        return printable(super().__str__())

    # Errors cross processes; they are unpickled without the constructors, whose arguments differ.
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).__new__, (type(self), *self.args), vars(self)


class NotFoundError(HistographError, FileNotFoundError):
    """A file or folder that was named does not exist."""


class OutputExistsError(HistographError, FileExistsError):
    """An output would overwrite something that is already there."""


class OutputInUseError(HistographError, BlockingIOError):
    """Another process writes the same output."""


class MissingExtraError(HistographError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""

    def __init__(self, what: str, *, extra: str) -> None:
        super().__init__(
            f"{what} needs an optional dependency: pip install 'histograph-post[{extra}]'"
        )
        self.extra = extra


class ConfigError(HistographError, ValueError):
    """An option or a configuration file has a value that cannot be used."""


class CheckpointError(HistographError, ValueError):
    """A checkpoint cannot be read, or does not fit the model."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint would have to run code to be read; nothing in it has been executed."""


class ModelError(HistographError, ValueError):
    """A model specification cannot be turned into a working module."""


class DataError(HistographError, ValueError):
    """A data set cannot be read, or is not what it should be."""


class SplitError(DataError):
    """A split does not fit the data, or cannot be made."""


class CaptureError(HistographError, RuntimeError):
    """The layers of a model cannot be found, or do not behave as they did in the probe pass."""


class CacheError(HistographError, ValueError):
    """A cache is damaged, incomplete, or does not belong to what it is used with."""


class WorkerError(HistographError, RuntimeError):
    """A process that trains a fit has ended without a result."""


def message_of(error: BaseException) -> str:
    """Return the message of an exception from a user's code, whose ``__str__`` may fail as well."""
    try:
        return str(error)
    except Exception as inner:
        return f"(its message failed with {type(inner).__name__})"


def one_line(error: BaseException) -> str:
    """Return an exception from a user's code as ``Type: message`` in one line."""
    return f"{type(error).__name__}: {' '.join(message_of(error).split())}"


def raised_at(error: BaseException, file: str | None = None) -> str:
    """Return ``file.py:LINE`` of the user's line that raised an error, or of the line in ``file``.

    Lines of Python's library, of installed packages and of this one would not tell users what to
    fix. Empty if there are no others.
    """
    others = (Path(__file__).parent, Path(os.__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = {"site-packages", "dist-packages"} & set(path.parts)
        own = path.is_file() and not installed and not any(map(path.is_relative_to, others))
        if own if file is None else frame.filename == file:
            return f"{path.name}:{frame.lineno}"
    # Python replaces a StopIteration that leaves a generator.
    return "" if error.__cause__ is None else raised_at(error.__cause__, file)
