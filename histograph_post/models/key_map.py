"""Key maps: what a checkpoint calls its tensors, and what the model calls them.

A TOML or JSON file of ``old = new``. ``*`` stands for any characters and is carried over;
the first line that fits a name decides. Besides a new name, the right side may be a table with
``transpose = true`` (PyG before 2.0 stored ``conv.weight`` as the transpose of today's
``conv.lin.weight``), or ``false`` to leave a tensor out::

    "encoder.*" = "*"
    "convs.*.weight" = { to = "convs.*.lin.weight", transpose = true }
    "pretraining_head.*" = false
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ..errors import CheckpointError, ConfigError, NotFoundError
from ..utils.decoding import read_json_file, read_toml_file
from .unpickling import printable


@dataclass(frozen=True)
class KeyRule:
    """One line of a key map; ``new`` is None where the tensor is to be left out."""

    old: str
    new: str | None
    transpose: bool = False

    def rename(self, name: str) -> str | None:
        """Return the new name of a tensor that this rule matches."""
        match = self._pattern.fullmatch(name)
        if match is None or self.new is None:
            return None
        wildcards = iter(match.groups())
        return re.sub(r"\*", lambda _: next(wildcards), self.new)

    def matches(self, name: str) -> bool:
        """Whether this rule is about the tensor of that name."""
        return self._pattern.fullmatch(name) is not None

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("(.*)".join(map(re.escape, self.old.split("*"))), re.DOTALL)

    def __str__(self) -> str:
        old = json.dumps(self.old, ensure_ascii=False)
        if self.new is None:
            return f"{old} = false"
        new = json.dumps(self.new, ensure_ascii=False)
        return f"{old} = {{ to = {new}, transpose = true }}" if self.transpose else f"{old} = {new}"


@dataclass(frozen=True)
class KeyMap:
    """An ordered set of renaming rules; its text is the TOML file that it would be read from."""

    rules: tuple[KeyRule, ...]

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors under their new names; what no rule matches keeps its name."""
        renamed: dict[str, Tensor] = {}
        origin: dict[str, str] = {}
        for old, tensor in tensors.items():
            rule = next((rule for rule in self.rules if rule.matches(old)), KeyRule("*", "*"))
            new = rule.rename(old)
            if new is None:
                continue
            if new in renamed:
                raise CheckpointError(
                    f"key map: {printable(origin[new])} and {printable(old)} both become "
                    f"{printable(new)}; expected different names"
                )
            if rule.transpose and tensor.dim() != 2:
                raise CheckpointError(
                    f"key map: {printable(old)} is to be transposed, but has shape "
                    f"{list(tensor.shape)}; expected a matrix"
                )
            renamed[new] = tensor.T if rule.transpose else tensor
            origin[new] = old
        return renamed

    def __str__(self) -> str:
        return "\n".join(map(str, self.rules))


def read_key_map(path: Path | str) -> KeyMap:
    """Read a key map from a ``.toml`` or ``.json`` file."""
    path = Path(path)
    if not path.exists():
        raise NotFoundError(f"{path}: no such file; expected a key map")
    entries = read_json_file(path) if path.suffix == ".json" else read_toml_file(path)
    if not isinstance(entries, dict):
        raise ConfigError(f"{path}: found a {type(entries).__name__}; expected old = new")
    return KeyMap(tuple(_rules(entries, path)))


def _rules(entries: Mapping[str, object], path: Path, prefix: str = "") -> Iterator[KeyRule]:
    for key, value in entries.items():
        old = prefix + key
        if isinstance(value, Mapping) and not isinstance(value.get("to"), str):
            # An unquoted a.b.c = "..." is a table in a table to TOML.
            yield from _rules(value, path, prefix=f"{old}.")
            continue
        rule = _rule(old, value)
        if rule is None:
            raise ConfigError(
                f"{path}: {printable(old)}: found {printable(repr(value))}; expected a name, "
                "{ to = name, transpose = true }, or false to leave the tensor out"
            )
        if rule.new is not None and rule.new.count("*") != old.count("*"):
            raise ConfigError(
                f"{path}: {printable(old)} = {printable(rule.new)}: found {old.count('*')} and "
                f"{rule.new.count('*')} wildcards; expected as many on both sides"
            )
        yield rule


def _rule(old: str, value: object) -> KeyRule | None:
    match value:
        case False:
            return KeyRule(old, None)
        case str(new) if new:
            return KeyRule(old, new)
        case {"to": str(new), **rest} if new and rest.keys() <= {"transpose"}:
            transpose = rest.get("transpose", False)
            return KeyRule(old, new, transpose) if isinstance(transpose, bool) else None
    return None
