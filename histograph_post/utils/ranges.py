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


def require_sane(name: str, value: Any) -> None:
    """Refuse a number that nothing can be built with; of what type it is, others say."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: found {value!r}, expected a finite number")
    most = MOST_LAYERS if name.endswith("layers") else MOST
    if isinstance(value, int) and abs(value) > most:
        raise ConfigError(f"{name}: found {value}, expected at most {most}")
