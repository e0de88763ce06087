"""The schemas of ``results.json``, ``run.json``, ``head.json`` and ``fit.json``.

They are checked as they are read, so that no code that uses them has to. Only entries that are used
are declared; others, and those of earlier versions, are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError
from ..utils.decoding import Count, decode, is_count


@dataclass(frozen=True, kw_only=True)
class _Task:
    kind: str
    level: str
    num_targets: Count
    classes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Summary:
    mean: float
    deviation: float
    count: Count


@dataclass(frozen=True, kw_only=True)
class _Interval:
    low: float | None = None
    high: float | None = None
    count: Count = 0


@dataclass(frozen=True, kw_only=True)
class _Difference(_Interval):
    mean: float
    baseline: str | None = None
    over: str | None = None
    #: The interval over single rows.
    rows: _Interval | None = None


@dataclass(frozen=True, kw_only=True)
class _Averaged:
    """A readout, the seeds of each fold averaged."""

    test: _Summary | None
    valid: _Summary | None = None
    versus_own: _Difference | None = None
    versus_baseline: _Difference | None = None
    versus_rival: _Difference | None = None


@dataclass(frozen=True, kw_only=True)
class _Row(_Averaged):
    averaged: _Averaged | None = None
    num_parameters: Count | None = None


@dataclass(frozen=True, kw_only=True)
class _Fit:
    head: str
    fold: Count
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    best_epoch: int | None = None
    epochs: Count = 0
    strength: float | None = None
    diverged: bool = False
    backbone: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The mean and deviation of regression targets; empty for other targets."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HeadRecord:
    """A trained head: which fit it was and how it is built, in ``fit.json`` and ``head.json``."""

    fold: Count
    seed: Count
    #: What the readout is built with.
    config: Mapping[str, Any]
    #: The hash of its code, if that is from a file of the user's or an installed package.
    source: str = ""
    standardize: bool
    #: Whether rows are normalised one by one instead.
    layer_norm: bool = False
    target_scale: Scale


def head_record(found: Mapping[str, Any], where: str) -> HeadRecord:
    """Read the entries of one head, refusing other types than the declared ones."""
    return decode(HeadRecord, found, where, error=ConfigError, defaults=True, unknown=True)


def head_entries(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of one head as they are stored."""
    return {entry.name: found[entry.name] for entry in fields(HeadRecord)}


@dataclass(frozen=True, kw_only=True)
class _StoredFit(HeadRecord, _Fit):
    """``fit.json``: a fit, how its head is built, and the hashes of its files."""

    best_epoch: int
    epochs: Count
    num_parameters: Count
    seconds_per_epoch: float
    log: tuple[Mapping[str, float | None], ...]
    plan: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _BeforeAndAfter:
    before: float | None
    after: float | None


@dataclass(frozen=True, kw_only=True)
class _Calibration:
    test: _BeforeAndAfter
    temperature: float


@dataclass(frozen=True, kw_only=True)
class _Trial:
    score: float | None


@dataclass(frozen=True, kw_only=True)
class _Search:
    trials: tuple[_Trial, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    lrs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Readouts:
    """The results of readouts."""

    task: _Task
    metric: str
    higher_is_better: bool
    head: str
    readouts: Mapping[str, _Row]
    fits: tuple[_Fit, ...]
    labelled_rows: Count = 0
    members: Count = 0
    left_out: Count = 0
    calibration: _Calibration | None = None
    tuning: _Search | None = None


@dataclass(frozen=True, kw_only=True)
class _Fold:
    """``results.json`` of a fold: a backbone that was trained on it."""

    fold: Count
    seed: int
    best_epoch: int
    epochs: Count
    scores: Mapping[str, Mapping[str, float]]
    num_parameters: Count
    weights_sha256: str
    head: str | None = None
    diverged: bool = False


@dataclass(frozen=True, kw_only=True)
class _Folds:
    """The results of a pretraining."""

    metric: str
    folds: tuple[_Fold, ...]
    model: str
    data: str
    valid: _Summary | None = None
    test: _Summary | None = None


def check_results(found: Mapping[str, Any], where: str) -> None:
    """Refuse results that do not have the declared types, or name readouts they do not have."""
    kind: Any = _Folds if "folds" in found and "readouts" not in found else _Readouts
    if kind is _Readouts and "readouts" not in found:
        return  # of a fold, or of another program: refused only where readouts are needed
    decode(kind, found, where, error=ConfigError, defaults=True, unknown=True)
    if kind is _Folds:
        return
    names = {found["head"], *(fit["head"] for fit in found["fits"])}
    for row in found["readouts"].values():
        for part in (row, row.get("averaged") or {}):
            versus = [part.get(f"versus_{other}") or {} for other in ("baseline", "rival")]
            names |= {other["baseline"] for other in versus if other.get("baseline")}
    missing = sorted(names - set(found["readouts"]))
    if missing or not found["fits"]:
        raise ConfigError(
            f"{where}: found no readout {missing[0]!r}, expected one"
            if missing
            else f"{where}: found no fits, expected at least one"
        )


@dataclass(frozen=True, kw_only=True)
class _Named:
    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """``run.json`` of a stage, and of the frozen stage inside it."""

    heads: tuple[_Named, ...] = ()
    seeds: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    lrs: Mapping[str, float] = field(default_factory=dict)
    frozen: Mapping[str, Any] = field(default_factory=dict)
    stage: str | None = None


def check_plan(found: Mapping[str, Any], where: str) -> None:
    """Refuse a plan that does not have the declared types."""
    for each in (found, found.get("frozen", {})):
        decode(_Plan, each, where, error=ConfigError, defaults=True, unknown=True)


@dataclass(frozen=True, kw_only=True)
class _Head(HeadRecord):
    """``head.json``: the best member and, of each, what differs from that."""

    head: str
    task: _Task
    target_names: tuple[str, ...]
    backbone: Mapping[str, Any]
    temperature: float = 1.0
    members: tuple[Mapping[str, Any], ...] | None = None


def check_fit(found: Mapping[str, Any], where: str) -> None:
    """Refuse a ``fit.json`` that does not have the declared types."""
    decode(_StoredFit, found, where, error=ConfigError, defaults=True, unknown=True)


def check_fold(found: Mapping[str, Any], where: str) -> None:
    """Refuse the results of a fold that do not have the declared types."""
    decode(_Fold, found, where, error=ConfigError, defaults=True, unknown=True)


def check_head(found: Mapping[str, Any], where: str) -> None:
    """Refuse a ``head.json`` that does not have the declared types."""
    decode(_Head, found, where, error=ConfigError, defaults=True, unknown=True)
    if found.get("members") == [] or not found.get("temperature", 1.0) > 0:
        raise ConfigError(f"{where}: found no members, or no temperature above 0, expected both")
    for number, entry in enumerate(found.get("members") or ()):
        head_record({**found, **entry}, f"{where}: members[{number}]")


def check_log(lines: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl``, each the numbers of one epoch of a fit, or refuse."""
    for at, line in enumerate(lines, start=1):
        named = isinstance(line.get("head"), str) and is_count(line.get("fold"))
        numbers = (value for name, value in line.items() if name != "head")
        if not (named and is_count(line.get("seed")) and all(map(_is_measured, numbers))):
            raise ConfigError(
                f"{where}: entry {at}: found no head, fold and seed with numbers, expected an epoch"
            )
    return lines


def _is_measured(value: Any) -> bool:
    return value is None or isinstance(value, float) or is_count(value)
