"""Strict loading: a checkpoint and a model agree on every tensor, or loading stops.

A :class:`LoadReport` lists what does not fit and how to fix it: the most similar name beside every
misfit, and the key map that would rename them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal, TypeGuard

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError
from .checkpoints import Checkpoint
from .key_map import KeyMap, KeyRule
from .unpickling import printable

Shape = tuple[int, ...]

#: Rows per kind of problem that get a nearest name and a line in the table.
ROWS_SHOWN = 50

#: What an honest checkpoint may lack: counters that old versions of torch did not save, and a
#: module's own notes, which are no weights.
_OPTIONAL = ("num_batches_tracked", "_extra_state")


@dataclass(frozen=True)
class KeyRow:
    """One tensor that stands in the way of loading."""

    problem: Literal["missing", "unexpected", "wrong shape"]
    name: str
    #: None where there is no such tensor, or where a lazy layer does not know its shape yet.
    in_file: Shape | None = None
    in_model: Shape | None = None
    #: The most similar name on the other side, empty if nothing is.
    nearest: str = ""
    note: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str, str, str]:
        """The row as text."""
        absent_file = "" if self.problem == "missing" else "?"
        absent_model = "" if self.problem == "unexpected" else "lazy"
        return (
            self.problem,
            printable(self.name),
            absent_file if self.in_file is None else str(list(self.in_file)),
            absent_model if self.in_model is None else str(list(self.in_model)),
            printable(self.nearest),
            self.note,
        )


@dataclass(frozen=True)
class LoadReport:
    """The outcome of holding a checkpoint against a model."""

    #: Tensors that fit.
    loaded: int
    missing: tuple[KeyRow, ...] = ()
    unexpected: tuple[KeyRow, ...] = ()
    wrong_shape: tuple[KeyRow, ...] = ()
    #: Not in the file and not needed: counters of batch norm, second names of shared weights.
    defaulted: tuple[str, ...] = ()
    #: How many of the tensors that fit have another precision than the model's.
    converted: int = 0
    #: A key map to try, and whether everything fits with it.
    suggestion: KeyMap | None = None
    suggestion_fits: bool = False

    @property
    def ok(self) -> bool:
        """Whether every tensor of the model is in the file, and nothing else is."""
        return not (self.missing or self.unexpected or self.wrong_shape)

    def summary(self) -> str:
        """Return the outcome in one line."""
        if self.ok:
            converted = f", {self.converted} of them converted" if self.converted else ""
            return f"{self.loaded} tensors loaded{converted}"
        first = (self.missing + self.wrong_shape + self.unexpected)[0]
        _, name, in_file, in_model, nearest, note = first.cells
        shapes = f"{in_file} for {in_model}" if in_file and in_model else in_file or in_model
        return (
            f"{len(self.missing)} missing, {len(self.unexpected)} unexpected, "
            f"{len(self.wrong_shape)} wrongly shaped, {self.loaded} fit; first: {first.problem} "
            f"{name} {shapes}{nearest and f', nearest {nearest}'}{note and f', {note}'}"
        )

    def table(self) -> str:
        """Return the problems as a plain text table, and a key map where one was found."""
        table = [("problem", "name", "in the file", "in the model", "nearest name", "note")]
        below: list[str] = []
        for rows in (self.missing, self.wrong_shape, self.unexpected):
            table += [row.cells for row in rows[:ROWS_SHOWN]]
            if len(rows) > ROWS_SHOWN:
                below.append(f"and {len(rows) - ROWS_SHOWN} more {rows[0].problem}")
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in table
        ]
        if self.suggestion is not None:
            heading = "that fits" if self.suggestion_fits else "to start from"
            below += ["", f"A key map (--key-map FILE.toml) {heading}:", str(self.suggestion)]
            if any(rule.transpose for rule in self.suggestion.rules):
                below.append("(A square matrix fits transposed or not: check the model's score.)")
        return "\n".join(lines + below)


def load_into(
    model: nn.Module, checkpoint: Checkpoint, *, key_map: KeyMap | None = None
) -> LoadReport:
    """Copy a checkpoint's tensors into a model; a mismatch raises, with a table as its details.

    The names are tried without the prefixes of wrappers first, then with them: a model may have a
    ``model.`` of its own. Floating-point values take the precision of the model's parameters.
    """
    expected = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    attempts = [(_compare(expected, tensors), tensors) for tensors in _namings(checkpoint, key_map)]
    report, tensors = max(attempts, key=lambda attempt: (attempt[0].ok, attempt[0].loaded))
    if not report.ok:
        report = _with_nearest_names(report)
        if key_map is None:
            report = _with_suggestion(report, expected, tensors)
        details = report.table()
        if key_map is not None and (idle := _idle_rules(checkpoint, key_map)):
            details += "\n\nLines of the key map that match nothing: " + ", ".join(idle)
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model: {report.summary()}", details=details
        )
    fitted = {
        name: tensor if is_lazy(expected[name]) else tensor.reshape(expected[name].shape)
        for name, tensor in tensors.items()
    }
    try:
        model.load_state_dict(fitted, strict=False)
    except RuntimeError as error:
        # What only a layer itself knows, such as the output width of a lazy one.
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model: {printable(reason)}"
        ) from error
    return report


def _namings(checkpoint: Checkpoint, key_map: KeyMap | None) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors under each set of names they may go by, barest first."""
    for count in range(len(checkpoint.stripped) + 1):
        prefix = "".join(checkpoint.stripped[len(checkpoint.stripped) - count :])
        tensors = {prefix + name: tensor for name, tensor in checkpoint.state_dict.items()}
        yield tensors if key_map is None else key_map.apply(tensors)


def _idle_rules(checkpoint: Checkpoint, key_map: KeyMap) -> list[str]:
    names = {name for tensors in _namings(checkpoint, None) for name in tensors}
    return [printable(rule.old) for rule in key_map.rules if not any(map(rule.matches, names))]


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> LoadReport:
    """Hold a file's tensors against a model's, without looking for similar names yet."""
    wrong = tuple(
        KeyRow("wrong shape", name, _shape(found[name]), _shape(value), note=note)
        for name, value in expected.items()
        if name in found and (note := _misfit(found[name], value)) is not None
    )
    fitting = found.keys() & expected.keys() - {row.name for row in wrong}
    filled = {id(expected[name]) for name in fitting}
    # torch before 0.4.1 did not save the counter of batch norm, and safetensors saves a tensor
    # that the model has under several names once.
    defaulted = tuple(
        name
        for name, value in expected.items()
        if name not in found and (name.endswith(_OPTIONAL) or id(value) in filled)
    )
    return LoadReport(
        loaded=len(fitting),
        missing=tuple(
            KeyRow("missing", name, in_model=_shape(value))
            for name, value in expected.items()
            if name not in found and name not in defaulted
        ),
        unexpected=tuple(
            KeyRow("unexpected", name, in_file=_shape(value))
            for name, value in found.items()
            if name not in expected
        ),
        wrong_shape=wrong,
        defaulted=defaulted,
        converted=sum(found[name].dtype != expected[name].dtype for name in fitting),
    )


def _shape(tensor: Tensor) -> Shape | None:
    return None if is_lazy(tensor) else tuple(tensor.shape)


def _misfit(found: Tensor, expected: Tensor) -> str | None:
    """Return why a tensor does not fit its namesake: empty for its shape, None if it fits."""
    if found.is_floating_point() != expected.is_floating_point():
        return f"{found.dtype} in the file, {expected.dtype} in the model".replace("torch.", "")
    shapes = _shape(found), _shape(expected)
    if shapes[1] is None or shapes[0] == shapes[1] or set(shapes) == {(), (1,)}:
        return None
    return "its transpose" if _is_transpose(*shapes) else ""


def _with_suggestion(
    report: LoadReport, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> LoadReport:
    """Add the key map to try, and whether everything would fit with it."""
    suggestion = _suggest_key_map(report)
    if suggestion is None:
        return report
    try:
        fits = _compare(expected, suggestion.apply(found)).ok
    except CheckpointError:  # two tensors would get the same name
        fits = False
    return replace(report, suggestion=suggestion, suggestion_fits=fits)


# --- similar names, and the key map they suggest

#: PyG 2.0 replaced the weight of a convolution by a linear layer, whose weight is its transpose.
_PYG_2 = ("weight", "lin.weight")

#: Names less alike than this have nothing to do with each other.
_ALIKE = 0.6
#: What an equal shape adds to the likeness of two names, and what a transposed one does.
_SAME_SHAPE, _TRANSPOSED = 0.3, 0.2


def _with_nearest_names(report: LoadReport) -> LoadReport:
    """Return the report with the most similar name of the other side beside each row shown."""
    missing = [(row.name, row.in_model) for row in report.missing]
    unexpected = [(row.name, row.in_file) for row in report.unexpected]
    return replace(
        report,
        missing=tuple(_with_nearest(report.missing, unexpected)),
        unexpected=tuple(_with_nearest(report.unexpected, missing)),
    )


def _with_nearest(
    rows: Sequence[KeyRow], others: Sequence[tuple[str, Shape | None]]
) -> Iterator[KeyRow]:
    for row in rows[:ROWS_SHOWN]:
        shape = row.in_model if row.in_file is None else row.in_file
        matcher = SequenceMatcher(b=row.name, autojunk=False)
        likeness = _ALIKE
        for name, other_shape in others:
            bonus = _SAME_SHAPE if shape == other_shape else 0.0
            bonus = _TRANSPOSED if _is_transpose(shape, other_shape) else bonus
            matcher.set_seq1(name)
            # The quick ratios are upper bounds of the true one, which is slow.
            if min(matcher.real_quick_ratio(), matcher.quick_ratio()) + bonus <= likeness:
                continue
            if matcher.ratio() + bonus > likeness:
                likeness = matcher.ratio() + bonus
                note = "its transpose" if _is_transpose(shape, other_shape) else ""
                row = replace(row, nearest=name, note=note)
        yield row
    yield from rows[ROWS_SHOWN:]


def _is_transpose(shape: Shape | None, other: Shape | None) -> bool:
    """Whether one shape is a matrix and the other its transpose, and they differ."""
    return shape != other and _is_matrix(shape) and shape[::-1] == other


def _is_matrix(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and len(shape) == 2


def _suggest_key_map(report: LoadReport) -> KeyMap | None:
    """Return the key map that pairs the tensors which are each other's nearest."""
    missing = {row.name: row for row in report.missing}
    pairs = [
        (old, missing[old.nearest])
        for old in report.unexpected
        if old.nearest and missing[old.nearest].nearest == old.name
    ]
    rules = [
        KeyRule(row.name, row.name, transpose=True)
        for row in report.wrong_shape
        if _is_transpose(row.in_file, row.in_model)
    ]
    transposed = _transposed_renamings(pairs)
    for old, new in pairs:
        fits = old.in_file == new.in_model or new.in_model is None
        transposed_too = fits and _is_matrix(old.in_file) and _renaming(old, new) in transposed
        if transposed_too or _is_transpose(old.in_file, new.in_model):
            rules.append(KeyRule(old.name, new.name, transpose=True))
        elif fits:
            rules.append(_rename(old.name, new.name, nothing_fits=report.loaded == 0))
    # The first rule that fits a name decides, so single names go before wildcards.
    rules.sort(key=lambda rule: "*" in rule.old)
    return KeyMap(tuple(dict.fromkeys(rules))) if rules else None


def _transposed_renamings(pairs: Sequence[tuple[KeyRow, KeyRow]]) -> set[tuple[str, str]]:
    """Return the renamings that come with a transpose.

    A square matrix does not show it, but the other ones renamed alike do; failing those, it is
    what PyG did in version 2.0.
    """
    transposed, straight = {_PYG_2}, set()
    for old, new in pairs:
        if _is_transpose(old.in_file, new.in_model):
            transposed.add(_renaming(old, new))
        elif _is_matrix(old.in_file) and old.in_file == new.in_model != old.in_file[::-1]:
            straight.add(_renaming(old, new))
    return transposed - straight


def _renaming(old: KeyRow, new: KeyRow) -> tuple[str, str]:
    """Return how one name becomes another: ``weight`` and ``lin.weight``, whatever the layer."""
    old_parts = re.sub(r"\d+", "#", old.name).split(".")
    new_parts = re.sub(r"\d+", "#", new.name).split(".")
    while old_parts and old_parts[:1] == new_parts[:1]:
        del old_parts[0], new_parts[0]
    return ".".join(old_parts), ".".join(new_parts)


def _rename(old: str, new: str, *, nothing_fits: bool) -> KeyRule:
    """Return the rule from one name to another, for all names alike if only a prefix differs."""
    if old.endswith(f".{new}"):
        return KeyRule(old.removesuffix(new) + "*", "*")
    if nothing_fits and new.endswith(f".{old}"):
        return KeyRule("*", new.removesuffix(old) + "*")
    return KeyRule(old, new)
