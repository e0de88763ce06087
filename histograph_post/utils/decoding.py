"""JSON read as if it came from a stranger: bounded, no doubled keys, every value checked."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ..errors import CacheError

_SHA256 = re.compile(r"[0-9a-f]{64}")


def parse_json(text: bytes, where: str) -> Any:
    """Parse JSON text, refusing what is ambiguous: doubled keys, NaN, infinity, deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            raise ValueError("a key appears twice in one object")
        return value

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    try:
        # A cut-off UTF-8 sequence and a number of a million digits are ValueErrors as well.
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
    except ValueError as error:
        raise CacheError(f"{where}: found broken JSON ({error}), expected valid JSON") from None
    except RecursionError:
        raise CacheError(
            f"{where}: found broken JSON (nested too deep), expected valid JSON"
        ) from None


def canonical_json(value: Any, where: str) -> bytes:
    """Return the one byte string that stands for ``value``: sorted keys, no spaces, ASCII."""
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise CacheError(f"{where}: found a value that JSON cannot hold ({error})") from None
    return text.encode("ascii")


def json_sha256(value: Any, where: str) -> str:
    """Return the SHA-256 of the canonical JSON of ``value``."""
    return hashlib.sha256(canonical_json(value, where)).hexdigest()


class Fields:
    """One JSON object being read: typed access to its fields, and none may be left over."""

    def __init__(self, value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            raise CacheError(f"{where}: found {type(value).__name__}, expected an object")
        self._left = dict(value)
        self._where = where

    def take(self, key: str) -> Any:
        """Return the value of ``key``, whatever it is; a missing key is refused."""
        if key not in self._left:
            raise CacheError(f"{self._where}: found no {key!r}, expected one")
        return self._left.pop(key)

    def text(self, key: str) -> str:
        """Return a text."""
        value = self.take(key)
        return value if isinstance(value, str) else self._refuse(key, value, "a text")

    def optional_text(self, key: str) -> str | None:
        """Return a text or null."""
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            self._refuse(key, value, "a text or null")
        return value

    def count(self, key: str) -> int:
        """Return a whole number of at least 0."""
        value = self.take(key)
        return value if is_count(value) else self._refuse(key, value, "a whole number from 0")

    def flag(self, key: str) -> bool:
        """Return true or false."""
        value = self.take(key)
        return value if isinstance(value, bool) else self._refuse(key, value, "true or false")

    def sha256(self, key: str) -> str:
        """Return a SHA-256 in lower-case hexadecimal."""
        value = self.take(key)
        if not isinstance(value, str) or not _SHA256.fullmatch(value):
            self._refuse(key, value, "64 hexadecimal digits")
        return value

    def items(self, key: str) -> Sequence[Any]:
        """Return a list."""
        value = self.take(key)
        return value if isinstance(value, list) else self._refuse(key, value, "a list")

    def mapping(self, key: str) -> dict[str, Any]:
        """Return an object."""
        value = self.take(key)
        return value if isinstance(value, dict) else self._refuse(key, value, "an object")

    def optional_mapping(self, key: str) -> dict[str, Any] | None:
        """Return an object or null."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            self._refuse(key, value, "an object or null")
        return value

    def done(self) -> None:
        """Refuse the fields that nobody asked for."""
        if self._left:
            raise CacheError(
                f"{self._where}: found the unknown field {sorted(self._left)[0]!r}, expected none"
            )

    def _refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        found = repr(value)
        found = found if len(found) <= 60 else f"{found[:57]}..."
        raise CacheError(f"{self._where}: found {key} = {found}, expected {expected}")


def is_count(value: Any) -> bool:
    """Return whether ``value`` is a whole number that a file offset can hold (and not a bool)."""
    return type(value) is int and 0 <= value < 2**63
