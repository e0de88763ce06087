"""What of a checkpoint fits a model, told so that a user can mend what does not."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal, TypeGuard

from .key_map import KeyMap, KeyRule
from .unpickling import printable

Shape = tuple[int, ...]

#: PyG 2.0 replaced the weight of a convolution by a linear layer, whose weight is its transpose.
_PYG_2 = ("weight", "lin.weight")

#: Rows per kind of problem that get a nearest name and a line in the table.
ROWS_SHOWN = 50
#: Names less alike than this have nothing to do with each other.
_ALIKE = 0.6
#: What an equal shape adds to the likeness of two names, and what a transposed one does.
_SAME_SHAPE, _TRANSPOSED = 0.3, 0.2


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
    #: A key map to try, and whether it settles everything.
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


def with_nearest(report: LoadReport) -> LoadReport:
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
            bonus = _TRANSPOSED if is_transpose(shape, other_shape) else bonus
            matcher.set_seq1(name)
            # The quick ratios are upper bounds of the true one, which is slow.
            if min(matcher.real_quick_ratio(), matcher.quick_ratio()) + bonus <= likeness:
                continue
            if matcher.ratio() + bonus > likeness:
                likeness = matcher.ratio() + bonus
                note = "its transpose" if is_transpose(shape, other_shape) else ""
                row = replace(row, nearest=name, note=note)
        yield row
    yield from rows[ROWS_SHOWN:]


def is_transpose(shape: Shape | None, other: Shape | None) -> bool:
    """Whether one shape is a matrix and the other its transpose, and they differ."""
    return shape != other and _is_matrix(shape) and shape[::-1] == other


def _is_matrix(shape: Shape | None) -> TypeGuard[Shape]:
    return shape is not None and len(shape) == 2


def suggest_key_map(report: LoadReport) -> KeyMap | None:
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
        if is_transpose(row.in_file, row.in_model)
    ]
    transposed = _transposed_renamings(pairs)
    for old, new in pairs:
        fits = old.in_file == new.in_model or new.in_model is None
        turned = fits and _is_matrix(old.in_file) and _renaming(old, new) in transposed
        if turned or is_transpose(old.in_file, new.in_model):
            rules.append(KeyRule(old.name, new.name, transpose=True))
        elif fits:
            rules.append(_rename(old.name, new.name, whole=report.loaded == 0))
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
        if is_transpose(old.in_file, new.in_model):
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


def _rename(old: str, new: str, *, whole: bool) -> KeyRule:
    """Return the rule from one name to another, for all names alike if only a prefix differs."""
    if old.endswith(f".{new}"):
        return KeyRule(old.removesuffix(new) + "*", "*")
    if whole and new.endswith(f".{old}"):
        return KeyRule("*", new.removesuffix(old) + "*")
    return KeyRule(old, new)
