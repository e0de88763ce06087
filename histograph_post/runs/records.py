"""The shapes of ``results.json``, ``run.json`` and ``head.json``, and the hashes of all files.

They are checked as they are read: whoever shows or follows what they say need not check anything.

Only what is read is declared; other entries, and those of earlier versions, are left as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, HistographError
from ..utils.decoding import Count, decode
from ..utils.files import read_regular, sha256_file


@dataclass(frozen=True)
class _Task:
    """What is predicted."""

    kind: str
    level: str
    num_targets: Count
    classes: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Summary:
    """Scores in short."""

    mean: float
    deviation: float
    count: Count


@dataclass(frozen=True)
class _Interval:
    """Where a difference lies, over rows."""

    low: float | None = None
    high: float | None = None
    count: Count = 0


@dataclass(frozen=True)
class _Difference:
    """A paired difference."""

    mean: float
    low: float | None = None
    high: float | None = None
    count: Count = 0
    baseline: str | None = None
    over: str | None = None
    #: The same over single rows.
    rows: _Interval | None = None


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
class _Scale:
    """What the outputs of a regression are multiplied with, and what is added."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class _StoredFit:
    """``fit.json``: a fit, how its head is built, and the hashes of its files."""

    head: str
    fold: Count
    seed: int
    scores: Mapping[str, Mapping[str, float]]
    best_epoch: int
    epochs: Count
    config: Mapping[str, Any]
    standardize: bool
    target_scale: _Scale
    num_parameters: Count
    seconds_per_epoch: float
    log: tuple[Mapping[str, float | None], ...]
    layer_norm: bool = False
    strength: float | None = None
    diverged: bool = False
    backbone: Mapping[str, Any] | None = None
    plan: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _BeforeAndAfter:
    """A calibration error."""

    before: float | None
    after: float | None


@dataclass(frozen=True)
class _Calibration:
    """What a temperature does."""

    test: _BeforeAndAfter
    temperature: float


@dataclass(frozen=True)
class _Trial:
    """A trial of a search."""

    score: float | None


@dataclass(frozen=True)
class _Search:
    """A search."""

    trials: tuple[_Trial, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    lrs: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Readouts:
    """The results of readouts."""

    task: _Task
    metric: str
    higher_is_better: bool
    head: str
    readouts: Mapping[str, _Row]
    fits: tuple[_Fit, ...]
    members: Count = 0
    left_out: Count = 0
    calibration: _Calibration | None = None
    tuning: _Search | None = None


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


@dataclass(frozen=True)
class _Named:
    """A readout and its options."""

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Plan:
    """What a result depends on: of a stage, and of the one that it wraps."""

    heads: tuple[_Named, ...] = ()
    seeds: tuple[int, ...] = ()
    weights: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    lrs: Mapping[str, float] = field(default_factory=dict)
    frozen: Mapping[str, Any] = field(default_factory=dict)
    stage: str | None = None


def check_plan(found: Mapping[str, Any], where: str) -> None:
    """Refuse a plan whose entries do not have the types that its readers count on."""
    for each in (found, found.get("frozen", {})):
        decode(_Plan, each, where, error=ConfigError, defaults=True, unknown=True)


@dataclass(frozen=True)
class _Member:
    """A head that predicts with others: what differs from the best one."""

    fold: Count
    seed: Count
    config: Mapping[str, Any] = field(default_factory=dict)
    standardize: bool = True
    layer_norm: bool = False
    target_scale: _Scale | None = None


@dataclass(frozen=True)
class _Head:
    """The head of a run."""

    head: str
    fold: Count
    seed: Count
    config: Mapping[str, Any]
    standardize: bool
    target_scale: _Scale
    task: _Task
    target_names: tuple[str, ...]
    backbone: Mapping[str, Any]
    layer_norm: bool = False
    temperature: float = 1.0
    members: tuple[_Member, ...] | None = None


def check_fit(found: Mapping[str, Any], where: str) -> None:
    """Refuse a ``fit.json`` whose entries do not have the types that its readers count on."""
    decode(_StoredFit, found, where, error=ConfigError, defaults=True, unknown=True)


def check_head(found: Mapping[str, Any], where: str) -> None:
    """Refuse a ``head.json`` whose entries do not have the types that its readers count on."""
    decode(_Head, found, where, error=ConfigError, defaults=True, unknown=True)
    if found.get("members") == [] or not found.get("temperature", 1.0) > 0:
        raise ConfigError(f"{where}: found no members, or no temperature above 0, expected both")


@contextmanager
def known_errors(path: Path) -> Iterator[None]:
    """Turn what a description of a head lacks into an error that says so."""
    try:
        yield
    except HistographError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"{path}: not a head this version can read ({type(error).__name__}: {error})"
        ) from error


# --- the hashes of a run's files

#: Bytes of the list at most.
_MOST_SUMS = 2**28


def read_sums(path: Path) -> dict[str, str]:
    """Read a list as ``sha256sum`` writes it, name to hash; empty if there is none."""
    if not os.path.lexists(path):
        return {}
    text = read_regular(path, _MOST_SUMS).decode("utf-8", errors="replace")
    lines = [re.fullmatch(r"([0-9a-f]{64})  (.+)", line) for line in text.splitlines()]
    if not all(lines):
        raise ConfigError(f"{path}: not a list of SHA-256 sums")
    return {line[2]: line[1] for line in lines if line is not None}


def require_listed(folder: Path, sums: Mapping[str, str], names: Iterable[str]) -> None:
    """Refuse files of a folder whose hash is not the one that a list has."""
    for name in names:
        path, expected = folder / name, sums.get(name)
        if expected is None or not path.is_file():
            continue
        found = sha256_file(path)
        if found != expected:
            raise ConfigError(
                f"{path}: found other contents (SHA-256 {found[:12]}) than SHA256SUMS lists "
                f"({expected[:12]}), expected the run's own; give its command again to mend it"
            )
