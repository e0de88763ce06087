"""Data arguments: ``k=v`` from the command line (text) or from Python (any value)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ..errors import DataError
from ..splits.making import parse_shares
from ..utils.levels import LEVELS, Level
from .links import LinkOptions

#: Arguments that every source of possibly featureless graphs takes.
FEATURE_ARGS = ("features", "max_degree")

#: Arguments on what is predicted, which every source takes.
LEVEL_ARGS = ("level", "link_seed", "link_split", "link_negatives")

_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def check_names(args: Mapping[str, Any], valid: Collection[str], *, spec: str) -> None:
    """Raise :class:`DataError` for an argument that this kind of data does not take."""
    for name in args:
        if name not in valid:
            known = ", ".join(sorted(valid))
            raise DataError(f"{spec}: unknown data argument {name!r}, expected one of {known}")


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


def level_options(
    args: Mapping[str, Any], *, own: Level | None = None, spec: str
) -> dict[str, Any]:
    """Return the options of :func:`.dataset.from_graphs` on what is predicted.

    ``own`` is the level of a source that has one; the links of its graphs can be predicted too.
    """
    choices = LEVELS if own is None else (own, "link")
    level = as_choice(args, "level", choices, default="", spec=spec) if "level" in args else own
    given = [name for name in LEVEL_ARGS[1:] if name in args]
    if given and level != "link":
        raise DataError(f"{spec}: found {given[0]} without level=link")
    return {"level": level, "links": _link_options(args, spec) if given else None}


def _link_options(args: Mapping[str, Any], spec: str) -> LinkOptions:
    defaults = LinkOptions()
    shares = args.get("link_split", defaults.shares)
    text = shares if isinstance(shares, str) else ",".join(map(str, shares))
    negatives = args.get("link_negatives", defaults.negatives)
    try:
        ratio = float(negatives)
    except (TypeError, ValueError):
        raise DataError(f"{spec}: link_negatives={negatives}, expected a number") from None
    seed = as_int(args, "link_seed", default=defaults.seed, spec=spec)
    return LinkOptions(
        shares=parse_shares(text, where=f"{spec}: link_split"),
        seed=defaults.seed if seed is None else seed,
        negatives=ratio,
    )


def feature_options(args: Mapping[str, Any], *, spec: str) -> dict[str, Any]:
    """Return the options of :func:`.dataset.from_graphs` on featureless graphs."""
    return {
        "features": str(args.get("features", "auto")),
        "max_degree": as_int(args, "max_degree", default=None, spec=spec),
    }
