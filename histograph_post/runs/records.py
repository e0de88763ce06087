"""The shape of ``results.json``: checked as it is read, so that nobody who shows it has to.

Only what is read is declared; other entries, and those of earlier versions, are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..utils.decoding import Count, decode


@dataclass(frozen=True)
class _Summary:
    """Scores in short."""

    mean: float
    deviation: float
    count: Count


@dataclass(frozen=True)
class _Difference:
    """A paired difference."""

    mean: float
    low: float | None = None
    high: float | None = None
    count: Count = 0
    baseline: str | None = None
    over: str | None = None


@dataclass(frozen=True)
class _Averaged:
    """A readout, the seeds of each fold averaged."""

    test: _Summary | None
    valid: _Summary | None = None
    versus_own: _Difference | None = None
    versus_baseline: _Difference | None = None
    versus_rival: _Difference | None = None


@dataclass(frozen=True)
class _Row(_Averaged):
    """A readout."""

    averaged: _Averaged | None = None
    num_parameters: Count | None = None


@dataclass(frozen=True)
class _Fit:
    """A fit."""

    head: str
    fold: Count
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    best_epoch: int | None = None
    epochs: Count = 0
    strength: float | None = None
    diverged: bool = False
    backbone: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Readouts:
    """The results of readouts."""

    task: Mapping[str, Any]
    metric: str
    higher_is_better: bool
    head: str
    readouts: Mapping[str, _Row]
    fits: tuple[_Fit, ...]
    members: Count = 0
    left_out: Count = 0
    calibration: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _Fold:
    """A fold of a pretraining."""

    fold: Count
    best_epoch: int
    scores: Mapping[str, Mapping[str, float]]
    diverged: bool = False


@dataclass(frozen=True)
class _Folds:
    """The results of a pretraining."""

    metric: str
    folds: tuple[_Fold, ...]
    model: str
    data: str
    valid: _Summary | None = None
    test: _Summary | None = None


def check_results(found: Mapping[str, Any], where: str) -> None:
    """Refuse results whose entries do not have the types that their readers count on."""
    kind: Any = _Folds if "folds" in found and "readouts" not in found else _Readouts
    if kind is _Readouts and "readouts" not in found:
        return  # of a fold, or of another program: whoever needs readouts says so
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
