"""Key maps: from the names of tensors in a checkpoint to their names in the model.

A key map is a TOML or JSON file of ``old = new``. ``*`` matches any characters and is carried over;
the first line that matches a name applies. Instead of a new name, the right side may be a table
with ``transpose = true`` (PyG before 2.0 stored ``conv.weight`` as the transpose of today's
``conv.lin.weight``), or ``false`` to leave a tensor out::

    "encoder.*" = "*"
    "convs.*.weight" = { to = "convs.*.lin.weight", transpose = true }
    "pretraining_head.*" = false

Where a checkpoint does not fit a model, a map with which it would is proposed. Whole layers are
paired: all tensors of one with all tensors of another, by shape. So a batch norm, which has running
statistics, is never taken for a linear layer. A proposal covers every tensor, or there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path

from torch import Tensor
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, ConfigError, NotFoundError
from ..utils.decoding import read_json_file, read_toml_file
from ..utils.unpickling import printable


@dataclass(frozen=True)
class KeyRule:
    """One line of a key map; ``new`` is None if the tensor is left out."""

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
        """Whether this rule applies to the tensor of that name."""
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
    """An ordered set of renaming rules; its text is that of a TOML file."""

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


# --- the key map that would make a checkpoint fit

Shape = tuple[int, ...]

#: What a checkpoint may lack: counters that old versions of torch did not save, and extra state of
#: a module, which are not weights.
OPTIONAL = ("num_batches_tracked", "_extra_state")

#: PyG 2.0 replaced the weight of a convolution by a linear layer, whose weight is its transpose.
_PYG_2 = ("weight", "lin.weight")
#: Names of tensors less similar than this are unrelated.
SIMILAR = 0.6
#: What the same numbers in two names add to their similarity, and the same place in the model.
_SAME_NUMBERS, _SAME_PLACE = 0.5, 0.2
_MAX_PAIRS = 250_000


@dataclass(frozen=True)
class Proposal:
    """A key map, and the weights of the model that the file does not have."""

    key_map: KeyMap
    #: Empty where everything fits.
    without: tuple[str, ...] = ()


@dataclass
class _Layer:
    """The tensors of one module that are to be renamed, by the last part of their names."""

    name: str
    #: Its position in the order of the modules, from 0 to 1.
    place: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    #: Their full names.
    names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pair:
    old: str
    new: str
    in_file: Shape
    in_model: Shape | None


def propose_key_map(
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    fits: Callable[[KeyMap], tuple[str, ...] | None],
) -> Proposal | None:
    """Return a key map that makes a file fit; None if none is found.

    Args:
        fits: Tries a key map; returns the weights that the model would still lack, None if the map
            does not fit.
    """
    wrong = {name: misfit(found[name], expected[name]) for name in found.keys() & expected.keys()}
    transposed = sorted(name for name, problem in wrong.items() if problem == "its transpose")
    if len(transposed) < sum(problem is not None for problem in wrong.values()):
        return None
    olds = _layers({name: value for name, value in found.items() if name not in expected}, found)
    news = _layers({name: value for name, value in expected.items() if name not in found}, expected)
    if len(olds) * len(news) > _MAX_PAIRS:
        return None
    pairs = [
        _Pair(
            old.names[one], new.names[other], old.tensors[one].shape, shape_of(new.tensors[other])
        )
        for old, new, leaves in _assign(olds, news)
        for one, other in leaves.items()
    ]
    paired = {pair.old for pair in pairs}
    left = [name for layer in olds for name in layer.names.values() if name not in paired]
    lines = [KeyRule(name, name, transpose=True) for name in transposed]
    dropped = [KeyRule(name, None) for name in left]
    if not pairs and not lines:
        return None
    for renamed in _spellings(pairs):
        # The first rule that matches a name applies, so single names go before wildcards.
        rules = sorted([*lines, *dropped, *renamed], key=lambda rule: "*" in rule.old)
        key_map = KeyMap(tuple(dict.fromkeys(rules)))
        without = fits(key_map)
        if without is not None and not (without and dropped):
            return Proposal(key_map, without)
    return None


def _layers(tensors: Mapping[str, Tensor], side: Mapping[str, Tensor]) -> list[_Layer]:
    """Group tensors by module; ``side`` has all tensors of the file, or of the model."""
    layers: dict[str, _Layer] = {}
    for name, value in tensors.items():
        module, _, leaf = name.rpartition(".")
        alone = f"{module}.bias" not in side
        if leaf == "weight" and alone and (module == "lin" or module.endswith(".lin")):
            module, leaf = module[:-3].removesuffix("."), "lin.weight"  # of PyG's convolutions
        layer = layers.setdefault(module, _Layer(module))
        layer.tensors[leaf], layer.names[leaf] = value, name
    for position, layer in enumerate(layers.values()):
        layer.place = position / len(layers)
    return list(layers.values())


def _assign(
    olds: Sequence[_Layer], news: Sequence[_Layer]
) -> Iterator[tuple[_Layer, _Layer, dict[str, str]]]:
    """Pair layers, the most similar first, each with at most one other."""
    candidates = []
    for old in olds:
        for new in news:
            leaves = _leaves(old, new)
            if leaves is not None:
                candidates.append((_similarity(old, new), old, new, leaves))
    candidates.sort(key=lambda candidate: -candidate[0])
    taken: set[int] = set()
    for _, old, new, leaves in candidates:
        if id(old) not in taken and id(new) not in taken:
            taken |= {id(old), id(new)}
            yield old, new, leaves


def _leaves(old: _Layer, new: _Layer) -> dict[str, str] | None:
    """Match the tensors of one layer with those of another; None if they are of another kind."""
    waiting = {leaf for leaf in old.tensors if leaf not in OPTIONAL}
    leaves = {leaf: leaf for leaf in OPTIONAL if leaf in old.tensors and leaf in new.tensors}
    for leaf, tensor in new.tensors.items():
        if leaf in OPTIONAL:
            continue
        same = [leaf] if leaf in waiting else []
        same += [_PYG_2[0]] if leaf == _PYG_2[1] and _PYG_2[0] in waiting else []
        ranked = sorted(waiting, key=lambda name: -_ratio(name, leaf))
        same += [name for name in ranked if _ratio(name, leaf) >= SIMILAR]
        fits = (None, "its transpose")
        match = next((name for name in same if misfit(old.tensors[name], tensor) in fits), None)
        if match is None:
            return None
        waiting.discard(match)
        leaves[match] = leaf
    return leaves if leaves and not waiting else None


def _similarity(old: _Layer, new: _Layer) -> float:
    similarity = _ratio(_template(old.name), _template(new.name))
    if _numbers(old.name) == _numbers(new.name):
        similarity += _SAME_NUMBERS
    return similarity + _SAME_PLACE * (1 - abs(old.place - new.place))


@cache
def _ratio(one: str, other: str) -> float:
    """Return how similar two names are, from 0 to 1."""
    return SequenceMatcher(a=one, b=other, autojunk=False).ratio()


@cache
def _template(name: str) -> str:
    return re.sub(r"\d+", "#", name)


@cache
def _numbers(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+", name))


def shape_of(tensor: Tensor) -> Shape | None:
    """Return the shape of a tensor; None for one of a lazy layer, which has none yet."""
    return None if is_lazy(tensor) else tuple(tensor.shape)


def misfit(found: Tensor, expected: Tensor) -> str | None:
    """Return why a tensor does not fit; an empty text if its shape is wrong, None if it fits."""
    if found.is_floating_point() != expected.is_floating_point():
        return f"{found.dtype} in the file, {expected.dtype} in the model".replace("torch.", "")
    shapes = shape_of(found), shape_of(expected)
    if shapes[1] is None or shapes[0] == shapes[1] or set(shapes) == {(), (1,)}:
        return None
    return "its transpose" if is_transpose(*shapes) else ""


def is_transpose(shape: Shape | None, other: Shape | None) -> bool:
    """Whether one shape is a matrix and the other its transpose, and they differ."""
    return shape is not None and len(shape) == 2 and shape != other and shape[::-1] == other


# --- how a key map is written


def _spellings(pairs: Sequence[_Pair]) -> Iterator[list[KeyRule]]:
    """Yield rules for these renamings, the shortest first."""
    transposed = _transposed(pairs)
    others = [pair for pair in pairs if pair not in transposed]
    rules = _numbered(transposed, transpose=True)
    if prefix := _shared_prefix([(pair.old, pair.new) for pair in others]):
        yield [*rules, KeyRule(f"{prefix}*", "*")]
    if prefix := _shared_prefix([(pair.new, pair.old) for pair in others]):
        yield [*rules, KeyRule("*", f"{prefix}*")]
    yield [*rules, *_numbered(others, transpose=False)]
    yield [KeyRule(pair.old, pair.new, pair in transposed) for pair in (*transposed, *others)]


def _shared_prefix(names: Sequence[tuple[str, str]]) -> str:
    """Return the prefix that turns every second name into the first, such as ``model.``."""
    prefixes = {
        longer.removesuffix(shorter) if longer.endswith(f".{shorter}") else ""
        for longer, shorter in names
    }
    return prefixes.pop() if len(prefixes) == 1 else ""


def _numbered(pairs: Sequence[_Pair], *, transpose: bool) -> list[KeyRule]:
    """Return one rule for all layers of a list that are renamed in the same way."""
    groups: dict[tuple[str, str], list[_Pair]] = {}
    for pair in pairs:
        same = _numbers(pair.old) == _numbers(pair.new)
        key = (_template(pair.old), _template(pair.new)) if same else (pair.old, pair.new)
        groups.setdefault(key, []).append(pair)
    rules = []
    for (old, new), members in groups.items():
        if len(members) == 1:
            old, new = members[0].old, members[0].new
        rules.append(KeyRule(old.replace("#", "*"), new.replace("#", "*"), transpose=transpose))
    return rules


def _transposed(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Return the pairs that are transposed.

    The shape of a square matrix does not show it, but other matrices renamed in the same way do.
    If there are none, it is the renaming of PyG 2.0 that transposes.
    """
    matrices = {pair: _shows_transpose(pair) for pair in pairs if len(pair.in_file) == 2}
    straight = {_renaming(pair) for pair, shown in matrices.items() if shown is False}
    renamings = {_PYG_2, *(_renaming(pair) for pair, shown in matrices.items() if shown)} - straight
    return [
        pair
        for pair, shown in matrices.items()
        if shown or (shown is None and _renaming(pair) in renamings)
    ]


def _shows_transpose(matrix: _Pair) -> bool | None:
    """Whether two shapes are transposed; None if they do not tell."""
    is_square = matrix.in_model == matrix.in_file == matrix.in_file[::-1]
    return None if matrix.in_model is None or is_square else matrix.in_model != matrix.in_file


def _renaming(pair: _Pair) -> tuple[str, str]:
    """Return how one name becomes another: ``weight`` and ``lin.weight``, whatever the layer."""
    old_parts = _template(pair.old).split(".")
    new_parts = _template(pair.new).split(".")
    while old_parts and old_parts[:1] == new_parts[:1]:
        del old_parts[0], new_parts[0]
    return ".".join(old_parts), ".".join(new_parts)
