"""Numbers that a user gives: of the right type, finite, and within what can be meant.

One place for all of them, so that ``--lr inf`` and ``--dim 1000000000`` are refused alike, in one
line, before anything is allocated.
"""

from __future__ import annotations

import math
from typing import Any

from ..errors import ConfigError

#: Widths and counts of a network beyond this are slips of the finger; layers cost time to build.
MOST = 2**20
MOST_LAYERS = 1000

#: Seeds of one command, and epochs.
MOST_SEEDS = 10_000
MOST_EPOCHS = 10**7


def require_number(
    name: str,
    value: Any,
    *,
    low: float,
    high: float = math.inf,
    whole: bool = False,
    above: bool = False,
) -> None:
    """Refuse what is not a finite number in a range.

    Args:
        name: Of the option.
        value: What was given, of any type.
        low: The smallest that is allowed.
        high: The largest.
        whole: Whether it must be a whole number.
        above: Whether ``low`` itself is too small.
    """
    types: tuple[type, ...] = (int,) if whole else (int, float)
    right = isinstance(value, types) and not isinstance(value, bool)
    if right and math.isfinite(value) and low <= value <= high and not (above and value == low):
        return
    kind = "a whole number" if whole else "a finite number"
    start = f"above {low:g}" if above else f"from {low:g}"
    end = "" if high == math.inf else f" to {high:g}"
    raise ConfigError(f"{name}: found {value!r}, expected {kind} {start}{end}")


def require_like(name: str, value: Any, default: Any) -> None:
    """Refuse a value that is not of the type of an option's default, or no number to build with.

    A default of None says nothing of the type: a number must be finite then, too.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{name}: found {value!r}, expected a finite number")
        most = MOST_LAYERS if name.endswith("layers") else MOST
        if isinstance(value, int) and abs(value) > most:
            raise ConfigError(f"{name}: found {value}, expected at most {most}")
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    kind = type(default)
    if kind not in expected or value is None:
        return
    fits = {
        bool: isinstance(value, bool),
        int: isinstance(value, int) and not isinstance(value, bool),
        float: isinstance(value, int | float) and not isinstance(value, bool),
        str: isinstance(value, str | bool),  # switches that have become words
    }
    if not fits[kind]:
        raise ConfigError(f"{name}: found {value!r}, expected {expected[kind]}")
