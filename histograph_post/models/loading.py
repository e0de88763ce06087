"""Strict loading: a checkpoint and a model agree on every tensor, or loading stops.

A :class:`LoadReport` lists what does not fit and how to fix it: the most similar name for every
tensor, and the key map that would rename them (``key_map.py``). A prefix that all weights of the
model have in the file (``net.``) is found. A caller that knows that a model does not need all of
its weights may allow some to be missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError
from ..utils.text import listed, text_table
from ..utils.unpickling import printable
from .checkpoints import Checkpoint
from .key_map import (
    OPTIONAL,
    SIMILAR,
    KeyMap,
    Proposal,
    Shape,
    is_transpose,
    misfit,
    propose_key_map,
    shape_of,
)
from .state_dicts import AVERAGED, WRAPPER_PREFIXES

#: Rows per kind of problem that get a similar name and a line in the table.
ROWS_SHOWN = 50
#: How a proposal begins in the details of an error.
PROPOSED = "A key map (--key-map FILE.toml)"


@dataclass(frozen=True)
class KeyRow:
    """One tensor that does not fit."""

    problem: Literal["missing", "unexpected", "wrong shape"]
    name: str
    #: None where there is no such tensor, or where a lazy layer has no shape yet.
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
    """The outcome of comparing a checkpoint with a model."""

    #: Number of tensors that fit.
    loaded: int
    missing: tuple[KeyRow, ...] = ()
    unexpected: tuple[KeyRow, ...] = ()
    wrong_shape: tuple[KeyRow, ...] = ()
    #: Not in the file and not needed: counters of batch norm, second names of shared weights.
    defaulted: tuple[str, ...] = ()
    #: How many of the tensors that fit differ from the model in precision.
    converted: int = 0
    #: Tensors of the file without the prefix of the model's weights.
    left_out: tuple[str, ...] = ()
    #: The key map with which everything fits.
    proposal: Proposal | None = None

    @property
    def ok(self) -> bool:
        """Whether every tensor of the model is in the file, and nothing else is."""
        return not (self.missing or self.unexpected or self.wrong_shape)

    @property
    def notes(self) -> list[str]:
        """What a user should know about how the weights were loaded."""
        if not self.left_out:
            return []
        names = listed(printable(name, 60) for name in self.left_out)
        return [f"left out, since the model has no such weights: {names}"]

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
        columns = ("problem", "name", "in the file", "in the model", "nearest name", "note")
        shown: list[tuple[str, ...]] = []
        below: list[str] = []
        for rows in (self.missing, self.wrong_shape, self.unexpected):
            shown += [row.cells for row in rows[:ROWS_SHOWN]]
            if len(rows) > ROWS_SHOWN:
                below.append(f"and {len(rows) - ROWS_SHOWN} more {rows[0].problem}")
        if self.proposal is not None:
            rules, without = self.proposal.key_map, self.proposal.without
            heading = f"that fits, but for {len(without)} missing" if without else "that fits"
            below += ["", f"{PROPOSED} {heading}:", str(rules)]
            if any(rule.transpose for rule in rules.rules):
                below.append("(A square matrix fits transposed or not: check the model's score.)")
        return "\n".join([text_table(columns, shown), *below])


def load_into(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    key_map: KeyMap | None = None,
    allow_missing: bool = False,
) -> LoadReport:
    """Copy a checkpoint's tensors into a model; a mismatch raises, with a table as its details.

    Names are tried without the prefixes of wrappers first, then with them: a model may have a
    ``model.`` of its own. Floating-point values take the precision of the model's parameters.

    Args:
        allow_missing: Accept a file that lacks some of the model's tensors, if it has no others and
            some fit. The missing ones become zero, so that a file always gives the same model, and
            are listed in the report.
    """
    expected = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    attempts = [(_compare(expected, tensors), tensors) for tensors in _namings(checkpoint, key_map)]
    report, tensors = max(attempts, key=lambda attempt: (attempt[0].ok, attempt[0].loaded))
    if not report.ok and key_map is None:
        report, tensors = _under_one_prefix(expected, checkpoint) or (report, tensors)
    if not report.ok and not (allow_missing and _lacks_some(report, expected)):
        raise _misfit_error(report, expected, tensors, checkpoint, key_map)
    fitted = {
        name: tensor if is_lazy(expected[name]) else tensor.reshape(expected[name].shape)
        for name, tensor in tensors.items()
    }
    fitted |= {row.name: torch.zeros_like(expected[row.name]) for row in report.missing}
    try:
        model.load_state_dict(fitted, strict=False)
    except RuntimeError as error:
        # Only the layer itself can tell, as the output width of a lazy one.
        reason = str(error).strip().splitlines()[-1].strip()
        raise CheckpointError(
            f"{checkpoint.path}: does not fit the model: {printable(reason)}"
        ) from error
    return report


def _lacks_some(report: LoadReport, expected: Mapping[str, Tensor]) -> bool:
    """Whether a file has some of the model's weights and no others."""
    whole = not any(is_lazy(expected[row.name]) for row in report.missing)
    return whole and report.loaded > 0 and not (report.unexpected or report.wrong_shape)


def _misfit_error(
    report: LoadReport,
    expected: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    checkpoint: Checkpoint,
    key_map: KeyMap | None,
) -> CheckpointError:
    report = _with_nearest_names(report)

    def fits(rules: KeyMap) -> tuple[str, ...] | None:
        try:
            outcome = _compare(expected, rules.apply(tensors))
        except CheckpointError:  # two tensors would get the same name
            return None
        if outcome.unexpected or outcome.wrong_shape:
            return None
        return tuple(row.name for row in outcome.missing)

    if key_map is None:
        report = replace(report, proposal=propose_key_map(expected, tensors, fits))
    details = report.table()
    if key_map is not None and (idle := _idle_rules(checkpoint, key_map)):
        details += "\n\nLines of the key map that match nothing: " + ", ".join(idle)
    return CheckpointError(
        f"{checkpoint.path}: does not fit the model: {report.summary()}", details=details
    )


def _under_one_prefix(
    expected: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[LoadReport, dict[str, Tensor]] | None:
    """Return the weights that fit under one prefix of the file, such as ``net.``; else None.

    Lightning saves a model beside losses, metrics and averages of it.
    """
    whole = {"".join(checkpoint.stripped) + name: t for name, t in checkpoint.state_dict.items()}
    sample = next((name for name in expected if not name.endswith(OPTIONAL)), "")
    fitting: dict[str, tuple[LoadReport, dict[str, Tensor]]] = {}
    for name in whole:
        prefix = name.removesuffix(sample)
        if not sample or not name.endswith(f".{sample}"):
            continue
        inner = {key.removeprefix(prefix): t for key, t in whole.items() if key.startswith(prefix)}
        report = _compare(expected, inner)
        if report.ok:
            left = tuple(key for key in whole if not key.startswith(prefix))
            fitting[prefix] = replace(report, left_out=left), inner
    trained = [prefix for prefix in fitting if not AVERAGED.search(prefix)] or list(fitting)
    best = [prefix for prefix in trained if prefix in WRAPPER_PREFIXES] or trained
    if len(best) > 1:
        names = [printable(prefix.removesuffix(".")) for prefix in best]
        raise CheckpointError(
            f"{checkpoint.path}: several parts fit the model: {', '.join(names)}; "
            f"choose one, as in --state {names[0]}"
        )
    return fitting[best[0]] if best else None


def _namings(checkpoint: Checkpoint, key_map: KeyMap | None) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors under each set of names they may have, the shortest first."""
    for count in range(len(checkpoint.stripped) + 1):
        prefix = "".join(checkpoint.stripped[len(checkpoint.stripped) - count :])
        tensors = {prefix + name: tensor for name, tensor in checkpoint.state_dict.items()}
        yield tensors if key_map is None else key_map.apply(tensors)


def _idle_rules(checkpoint: Checkpoint, key_map: KeyMap) -> list[str]:
    names = {name for tensors in _namings(checkpoint, None) for name in tensors}
    return [printable(rule.old) for rule in key_map.rules if not any(map(rule.matches, names))]


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> LoadReport:
    """Compare a file's tensors with a model's, without looking for similar names yet."""
    wrong = tuple(
        KeyRow("wrong shape", name, shape_of(found[name]), shape_of(value), note=note)
        for name, value in expected.items()
        if name in found and (note := misfit(found[name], value)) is not None
    )
    fitting = found.keys() & expected.keys() - {row.name for row in wrong}
    filled = {id(expected[name]) for name in fitting}
    # torch before 0.4.1 did not save the counter of batch norm, and safetensors saves a tensor
    # that the model has under several names once.
    defaulted = tuple(
        name
        for name, value in expected.items()
        if name not in found and (name.endswith(OPTIONAL) or id(value) in filled)
    )
    return LoadReport(
        loaded=len(fitting),
        missing=tuple(
            KeyRow("missing", name, in_model=shape_of(value))
            for name, value in expected.items()
            if name not in found and name not in defaulted
        ),
        unexpected=tuple(
            KeyRow("unexpected", name, in_file=shape_of(value))
            for name, value in found.items()
            if name not in expected
        ),
        wrong_shape=wrong,
        defaulted=defaulted,
        converted=sum(found[name].dtype != expected[name].dtype for name in fitting),
    )


# --- similar names

#: What an equal shape adds to the similarity of two names, and what a transposed one does.
_SAME_SHAPE, _TRANSPOSED = 0.3, 0.2


def _with_nearest_names(report: LoadReport) -> LoadReport:
    """Return the report with the most similar name on the other side for each row shown."""
    missing = {row.name: row.in_model for row in report.missing}
    unexpected = {row.name: row.in_file for row in report.unexpected}
    return replace(
        report,
        missing=tuple(_with_nearest(report.missing, unexpected)),
        unexpected=tuple(_with_nearest(report.unexpected, missing)),
    )


def _with_nearest(rows: Sequence[KeyRow], others: Mapping[str, Shape | None]) -> Iterator[KeyRow]:
    for row in rows[:ROWS_SHOWN]:
        shape = row.in_model if row.in_file is None else row.in_file
        matcher = SequenceMatcher(b=row.name, autojunk=False)
        similarity = SIMILAR
        for name, other in others.items():
            transposed = is_transpose(shape, other)
            bonus = _TRANSPOSED if transposed else _SAME_SHAPE if shape == other else 0.0
            matcher.set_seq1(name)
            # The quick ratios are upper bounds of the true one, which is slow.
            if min(matcher.real_quick_ratio(), matcher.quick_ratio()) + bonus <= similarity:
                continue
            if matcher.ratio() + bonus > similarity:
                similarity = matcher.ratio() + bonus
                row = replace(row, nearest=name, note="its transpose" if transposed else "")
        yield row
    yield from rows[ROWS_SHOWN:]
