"""Data arguments: ``k=v`` from the command line (text) or from Python (any value)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from ..errors import DataError
from .labels import LEVELS, Level

#: Arguments that every source of possibly featureless graphs takes.
FEATURE_ARGS = ("features", "max_degree")

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def check_names(args: Mapping[str, Any], valid: Collection[str], *, spec: str) -> None:
    """Raise :class:`DataError` for an argument that this kind of data does not take."""
    for name in args:
        if name not in valid:
            known = f"expected one of {', '.join(sorted(valid))}" if valid else "expected none"
            raise DataError(f"{spec}: unknown data argument {name!r}, {known}")


def as_bool(args: Mapping[str, Any], name: str, *, default: bool, spec: str) -> bool:
    """Return a true/false argument."""
    value = args.get(name, default)
    truth = _TRUTH.get(str(value).lower())
    if truth is None:
        raise DataError(f"{spec}: {name}={value}, expected true or false")
    return truth


def as_int(args: Mapping[str, Any], name: str, *, default: int | None, spec: str) -> int | None:
    """Return a whole-number argument."""
    value = args.get(name, default)
    if value is None or type(value) is int:
        return value
    try:
        return int(str(value))
    except ValueError:
        raise DataError(f"{spec}: {name}={value}, expected a whole number") from None


def as_choice(
    args: Mapping[str, Any], name: str, choices: Collection[str], *, default: str, spec: str
) -> str:
    """Return an argument that is one of a few words."""
    value = str(args.get(name, default))
    if value not in choices:
        raise DataError(f"{spec}: {name}={value}, expected one of {', '.join(choices)}")
    return value


def as_level(args: Mapping[str, Any], *, spec: str) -> Level | None:
    """Return the ``level`` argument, ``None`` when it is not given."""
    if "level" not in args:
        return None
    return cast(Level, as_choice(args, "level", LEVELS, default="graph", spec=spec))


def feature_options(args: Mapping[str, Any], *, spec: str) -> dict[str, Any]:
    """Return the options of :func:`.dataset.from_graphs` on featureless graphs."""
    return {
        "features": str(args.get("features", "auto")),
        "max_degree": as_int(args, "max_degree", default=None, spec=spec),
    }
