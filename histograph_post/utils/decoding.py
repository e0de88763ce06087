"""Strict reading of values: JSON and TOML from files, numbers from options.

The annotations of a dataclass describe a JSON object, and :func:`decode` turns such an object into
the dataclass. Files may come from anybody, so nothing is converted, guessed or ignored: duplicate,
missing and unknown fields and values of other types are refused. Numbers from options must be
finite and in a sensible range, before anything is allocated for them.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from ..errors import CacheError, ConfigError, HistographError
from .files import read_limited, read_regular, real_path

T = TypeVar("T")


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON text, refusing duplicate keys, NaN, infinity and deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a key appears twice in one object")
        return value

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    def finite(text: str) -> float:
        value = float(text)
        if math.isinf(value):
            raise ValueError(f"{text[:20]} is too large for a float")
        return value

    try:
        # A truncated UTF-8 sequence and a number of a million digits are ValueErrors as well.
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=no_constant,
            parse_float=finite,
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else error
        raise CacheError(f"{where}: found broken JSON ({reason}), expected valid JSON") from None


#: Bytes of a JSON or TOML file of a run at most.
_MOST_BYTES = 2**28

#: Brackets that may be open at once in a TOML file: more would exhaust the parser's stack.
_DEEPEST = 64


def read_json_file(path: Path, *, error: type[HistographError] = ConfigError) -> Any:
    """Parse a regular file of JSON strictly."""
    try:
        return parse_json(read_limited(real_path(path), _MOST_BYTES), str(path))
    except CacheError as refused:
        raise error(str(refused)) from None


def read_toml_file(path: Path) -> dict[str, Any]:
    """Parse a regular file of TOML, refusing deep nesting."""
    data = read_regular(path, _MOST_BYTES)
    try:
        text = data.decode("utf-8")
        depths = accumulate(1 if mark in "[{" else -1 for mark in re.findall(r"[\[\]{}]", text))
        if max(depths, default=0) > _DEEPEST or re.search(r"(\.[^.\n]*){1000}", text):
            raise ValueError("nested too deep")
        value = tomllib.loads(text)
        _refuse_long_numbers(value)
        return value
    except (ValueError, RecursionError) as refused:
        reason = "nested too deep" if isinstance(refused, RecursionError) else refused
        raise ConfigError(f"{path}: not a readable TOML file ({reason})") from None


def _refuse_long_numbers(value: Any) -> None:
    """Refuse whole numbers beyond TOML's 64 bits; Python cannot even write the longest as text."""
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(f"a whole number of {value.bit_length()} bits, expected at most 64")
    inside = value.values() if isinstance(value, dict) else value
    for item in inside if isinstance(value, dict | list) else ():
        _refuse_long_numbers(item)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Parse a log of JSON objects, without a last line that was cut off by a kill."""
    lines = read_limited(real_path(path), _MOST_BYTES).split(b"\n")
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = parse_json(line, f"{path}: line {number}")
        except CacheError as refused:
            if number == len(lines):
                break  # it has no end: the writer was killed
            raise ConfigError(str(refused)) from None
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: line {number}: found no object, expected one")
        found.append(value)
    return found


def json_sha256(value: Any, where: str) -> str:
    """Return the SHA-256 of ``value`` as JSON with sorted keys, without spaces, in ASCII."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheError(f"{where}: found a value that JSON cannot hold ({error})") from None
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# --- constraints beyond a plain type


@dataclass(frozen=True)
class Form:
    """A constraint on a JSON value, as in ``Annotated[str, Form("a digit", str.isdigit)]``."""

    #: Ends the sentence "found x = 1, expected".
    expected: str
    #: Whether a value, of any type, satisfies it.
    holds: Callable[[Any], object]
    #: Turns such a value into the field of the dataclass.
    convert: Callable[[Any], Any] | None = None


def is_count(value: Any) -> bool:
    """Whether ``value`` is an integer (not a bool) that fits a file offset."""
    return type(value) is int and 0 <= value < 2**63


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


Count = Annotated[int, Form("a whole number from 0", is_count)]
Positive = Annotated[int, Form("a whole number from 1", lambda value: is_count(value) and value)]
Sha256 = Annotated[str, Form("64 hexadecimal digits", _is_sha256)]


# --- from JSON to dataclasses


def decode(
    cls: type[T],
    value: Any,
    where: str,
    *,
    error: type[HistographError] = CacheError,
    defaults: bool = False,
    unknown: bool = False,
) -> T:
    """Turn a JSON object into a dataclass whose fields have the annotated types.

    Fields are ``str``, ``int``, ``float``, ``bool``, ``Literal``, ``Annotated`` with a
    :class:`Form`, other dataclasses, ``tuple`` (lists), ``Mapping`` (objects), ``Any``, and
    ``T | None``.

    Args:
        cls: The dataclass; its ``__post_init__`` may refuse values as well.
        where: The file, which begins every message.
        defaults: Whether fields with a default may be missing.
        unknown: Whether unknown fields are ignored, also in nested objects.
    """
    try:
        found: T = _decode_object(cls, value, where, f"{where}: found", defaults, unknown)
    except _RefusedError as refused:
        raise error(str(refused)) from None
    return found


class _RefusedError(Exception):
    """A value that does not have the annotated type."""


def _refuse(found: str, value: Any, expected: str) -> NoReturn:
    text = _shown(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    raise _RefusedError(f"{found} {text}, expected {expected}")


def _decode_object(
    cls: Any, value: Any, where: str, found: str, defaults: bool, unknown: bool = False
) -> Any:
    if not isinstance(value, Mapping):
        _refuse(found, value, "an object")
    types = _field_types(cls)
    if not unknown and (others := sorted(value.keys() - types)):
        raise _RefusedError(f"{where}: found the unknown field {others[0]!r}, expected none")
    values = {}
    for name, (kind, has_default) in types.items():
        if name in value:
            values[name] = _decode_value(kind, value[name], where, name, (defaults, unknown))
        elif not (defaults and has_default):
            raise _RefusedError(f"{where}: found no {name!r}, expected one")
    try:
        return cls(**values)
    except HistographError as error:
        raise _RefusedError(f"{where}: {error}") from None


@cache
def _field_types(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of every field of a dataclass, and whether it has a default."""
    # Lambdas inside annotations need the module's names as their globals.
    types = get_type_hints(cls, vars(sys.modules[cls.__module__]), include_extras=True)
    return {
        field.name: (
            types[field.name],
            field.default is not MISSING or field.default_factory is not MISSING,
        )
        for field in fields(cls)
    }


#: Plain types -> their types in JSON, and their name in messages.
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "a text"),
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((float, int), "a number"),
}


def _decode_value(
    kind: Any, value: Any, where: str, name: str, lenient: tuple[bool, bool], or_null: str = ""
) -> Any:
    origin, arguments, found = get_origin(kind), get_args(kind), f"{where}: found {name} ="
    if origin in (Union, UnionType):  # T | None
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _decode_value(kind, value, where, name, lenient, " or null")
    if kind is Any:
        return value
    if kind in _PLAIN:
        types, expected = _PLAIN[kind]
        too_long = kind is float and type(value) is int and not _is_finite(value)
        if type(value) not in types or too_long:
            _refuse(found, value, expected + or_null)
        return kind(value)
    if origin is Annotated:
        form: Form = arguments[1]
        if not form.holds(value):
            _refuse(found, value, form.expected + or_null)
        return form.convert(value) if form.convert else value
    if origin is Literal:
        if value not in arguments:
            _refuse(found, value, f"one of {', '.join(arguments)}{or_null}")
        return value
    if origin is tuple:  # tuple[T, ...]
        if not isinstance(value, list):
            _refuse(found, value, "a list" + or_null)
        return tuple(
            _decode_value(arguments[0], item, where, f"{name}[{position}]", lenient)
            for position, item in enumerate(value)
        )
    if origin is Mapping:  # Mapping[str, T]
        if not isinstance(value, Mapping):
            _refuse(found, value, "an object" + or_null)
        return {
            key: _decode_value(arguments[1], item, where, f"{name}[{key!r}]", lenient)
            for key, item in value.items()
        }
    return _decode_object(kind, value, f"{where}: {name}", found, *lenient)


# --- numbers from options

#: Widths and counts of a network beyond this are typing errors; layers take time to build.
MOST = 2**20
MOST_LAYERS = 1000

#: Seeds and epochs of one command at most.
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
    """Refuse anything but a finite number in a range.

    Args:
        above: Whether ``low`` itself is excluded.
    """
    types: tuple[type, ...] = (int,) if whole else (int, float)
    right = isinstance(value, types) and not isinstance(value, bool)
    if right and _is_finite(value) and low <= value <= high and not (above and value == low):
        return
    kind = "a whole number" if whole else "a finite number"
    start = f"above {low:g}" if above else f"from {low:g}"
    end = "" if high == math.inf else f" to {high:g}"
    raise ConfigError(f"{name}: found {_shown(value)}, expected {kind} {start}{end}")


def _shown(value: Any) -> str:
    """Return a value for a message; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 10_000:
        return f"a number of {value.bit_length()} bits"
    return repr(value)


def _is_finite(value: float) -> bool:
    """Whether a number, which may be an integer of any length, fits a float."""
    return abs(value) <= sys.float_info.max


def require_sane(name: str, value: Any) -> None:
    """Refuse a number that no network can be built with; its type is checked elsewhere."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{name}: found {value!r}, expected a finite number")
    most = MOST_LAYERS if name.endswith("layers") else MOST
    if isinstance(value, int) and abs(value) > most:
        raise ConfigError(f"{name}: found {_shown(value)}, expected at most {most}")
