"""A study file: cells, readouts, and budgets.

A cell is a checkpoint on some data with a kind of split; a unit is one fold of a cell. Everything
is read strictly: what is unknown, missing or of another type is refused before anything is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from histograph_post.errors import ConfigError, HistographError
from histograph_post.heads.registry import head_info
from histograph_post.training.options import TrainingOptions
from histograph_post.utils.decoding import Positive, decode, read_toml_file

#: The budget that leaves nothing out, and the one of ``--quick``.
FULL, QUICK = "full", "quick"

_TRAINING = tuple(option.name for option in fields(TrainingOptions))


@dataclass(frozen=True)
class Checkpoint:
    """A network: with weights of its own, or one that is trained on every fold."""

    name: str
    #: As ``--model``; a file is looked for beside the study file.
    model: str
    args: Mapping[str, Any] = field(default_factory=dict)
    #: Under the data root; without it the network is trained on the training part of each fold.
    weights: str | None = None


@dataclass(frozen=True)
class Kind:
    """What is predicted on one kind of data, and how networks and readouts are trained."""

    level: Literal["graph", "node"] = "graph"
    training: Mapping[str, Any] = field(default_factory=dict)
    pretraining: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Data:
    """A data set, or a fixed part of one."""

    name: str
    #: As ``--data``.
    spec: str
    #: One of the study's kinds.
    kind: str
    metric: str
    args: Mapping[str, Any] = field(default_factory=dict)
    #: Of a table of molecules: so many rows, always the same ones.
    rows: Positive | None = None
    #: Of a table of molecules: the first so many columns of targets.
    columns: Positive | None = None


@dataclass(frozen=True)
class SplitKind:
    """How data are split; ``{data}`` stands for the name of the data without its hyphens."""

    spec: str
    folds: Positive = 1
    #: Leave the test part alone: half of the validation part validates, the other half is scored.
    inner: bool = False


@dataclass(frozen=True)
class CellGroup:
    """Every one of these checkpoints on each of these data with each of these splits."""

    checkpoints: tuple[str, ...]
    data: tuple[str, ...]
    splits: tuple[str, ...]


@dataclass(frozen=True)
class ReadoutEntry:
    """A readout, as the tables call it."""

    name: str
    #: As ``--head``; by default the name.
    head: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: Positive = 1
    #: What differs from the training of the kind of data.
    training: Mapping[str, Any] = field(default_factory=dict)
    #: Kind of data -> what differs further there.
    kinds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Omission:
    """Readouts that are left out on some cells; both are globs."""

    cells: tuple[str, ...]
    readouts: tuple[str, ...] = ("*",)


@dataclass(frozen=True)
class Budget:
    """What is left out of a study, and what is done with less."""

    #: Cells and readouts that are not left out altogether, as globs.
    cells: tuple[str, ...] = ("*",)
    readouts: tuple[str, ...] = ("*",)
    omit: tuple[Omission, ...] = ()
    #: Cells, as globs -> the first so many of their folds; the first glob that matches counts.
    folds: Mapping[str, Positive] = field(default_factory=dict)
    #: Of a readout, at most.
    seeds: Positive | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    pretraining: Mapping[str, Any] = field(default_factory=dict)

    def omits(self, cell: str, readout: str) -> bool:
        """Whether a readout is left out on a cell."""
        if not (_matches(cell, self.cells) and _matches(readout, self.readouts)):
            return True
        return any(
            _matches(cell, omission.cells) and _matches(readout, omission.readouts)
            for omission in self.omit
        )

    @property
    def changes_fits(self) -> bool:
        """Whether fits differ from those of the full budget, and need a table of their own."""
        return bool(self.seeds or self.training or self.pretraining)


@dataclass(frozen=True)
class Cell:
    """A checkpoint on some data with one kind of split."""

    checkpoint: Checkpoint
    data: Data
    #: The name of the split.
    split: str

    @property
    def name(self) -> str:
        """What the tables call the cell, and where its files are."""
        return f"{self.data.name}/{self.checkpoint.name}/{self.split}"

    @property
    def activations(self) -> tuple[str, str]:
        """Cells that are equal in this read the same cache, or caches."""
        return self.data.name, self.checkpoint.name


@dataclass(frozen=True)
class Unit:
    """One fold of a cell."""

    cell: Cell
    fold: int

    @property
    def name(self) -> str:
        """What progress and folders call it."""
        return f"{self.cell.name}/fold-{self.fold}"


@dataclass(frozen=True)
class Settings:
    """All that decides the fits of one readout on one unit, besides the code."""

    readout: str
    head: str
    options: Mapping[str, Any]
    seeds: tuple[int, ...]
    training: Mapping[str, Any]
    metric: str


@dataclass(frozen=True)
class Study:
    """A study file."""

    checkpoints: tuple[Checkpoint, ...]
    kinds: Mapping[str, Kind]
    data: tuple[Data, ...]
    splits: Mapping[str, SplitKind]
    cells: tuple[CellGroup, ...]
    readouts: tuple[ReadoutEntry, ...]
    budgets: Mapping[str, Budget]
    #: Cells, as globs -> why HistoGraph is not the best there, for the page.
    notes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, entries in (
            ("checkpoints", self.checkpoints),
            ("data", self.data),
            ("readouts", self.readouts),
        ):
            names = [entry.name for entry in entries]
            for name in names:
                if names.count(name) > 1 or "/" in name or not name:
                    raise ConfigError(f"{what}: found the name {name!r}, expected one of its own")
        for data in self.data:
            _check_name(f"data {data.name}: kind", data.kind, self.kinds)
        for group in self.cells:
            for what, found, known in (
                ("checkpoints", group.checkpoints, [entry.name for entry in self.checkpoints]),
                ("data", group.data, [entry.name for entry in self.data]),
                ("splits", group.splits, list(self.splits)),
            ):
                for name in found:
                    _check_name(f"cells: {what}", name, known)
        for readout in self.readouts:
            head_info(readout.head or readout.name)  # refuses an unknown one
            for kind in readout.kinds:
                _check_name(f"readouts {readout.name}: kinds", kind, self.kinds)
        if len({split.inner for split in self.splits.values()}) > 1:
            raise ConfigError("splits: found inner ones and others, expected one kind in a study")
        if FULL not in self.budgets:
            raise ConfigError(f"budgets: found no {FULL!r}, expected one, empty or not")
        for where, options in self._trainings():
            for option in options:
                _check_name(where, option, _TRAINING)

    @property
    def inner(self) -> bool:
        """Whether the scores are of validation rows, to choose by, and no test part is read."""
        return any(split.inner for split in self.splits.values())

    def _trainings(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return every table of training options, and where it stands."""
        for name, kind in self.kinds.items():
            yield f"kinds {name}: training", kind.training
            yield f"kinds {name}: pretraining", kind.pretraining
        for readout in self.readouts:
            yield f"readouts {readout.name}: training", readout.training
            for name, training in readout.kinds.items():
                yield f"readouts {readout.name}: kinds {name}", training
        for name, budget in self.budgets.items():
            yield f"budgets {name}: training", budget.training
            yield f"budgets {name}: pretraining", budget.pretraining

    def budget(self, name: str) -> Budget:
        """Return the budget of that name."""
        _check_name("budget", name, self.budgets)
        return self.budgets[name]

    def all_cells(self) -> list[Cell]:
        """Return every cell, in the order of the file."""
        checkpoints = {entry.name: entry for entry in self.checkpoints}
        data = {entry.name: entry for entry in self.data}
        return [
            Cell(checkpoints[checkpoint], data[name], split)
            for group in self.cells
            for checkpoint in group.checkpoints
            for name in group.data
            for split in group.splits
        ]

    def units(
        self, budget: Budget, *, only: Sequence[str] = ("*",), part: tuple[int, int] = (0, 1)
    ) -> list[Unit]:
        """Return the folds of cells that are to be run.

        Args:
            budget: What is left out.
            only: Globs; a cell is run if its name matches one of them.
            part: ``(i, n)``: job ``i`` of ``n``. Cells on the same caches stay in one job.
        """
        number, count = part
        everything = [cell.name for cell in self.all_cells()]
        omitted = [pattern for omission in budget.omit for pattern in omission.cells]
        for pattern in (*budget.cells, *budget.folds, *omitted, *only):
            if not any(fnmatchcase(name, pattern) for name in everything):
                raise ConfigError(
                    f"cells: found {pattern!r}, expected a glob of names such as {everything[0]}"
                )
        cells = [
            cell
            for cell in self.all_cells()
            if _matches(cell.name, only) and self.settings(cell, budget)
        ]
        shared = list(dict.fromkeys(cell.activations for cell in cells))
        mine = {shared[at] for at in range(number, len(shared), count)}
        return [
            Unit(cell, fold)
            for cell in cells
            if cell.activations in mine
            for fold in range(self.num_folds(cell, budget))
        ]

    def num_folds(self, cell: Cell, budget: Budget) -> int:
        """Return how many folds of a cell a budget has."""
        own = self.splits[cell.split].folds
        asked = (count for glob, count in budget.folds.items() if fnmatchcase(cell.name, glob))
        return min(own, next(asked, own))

    def split_spec(self, cell: Cell) -> str:
        """Return the split of a cell as ``--split`` takes it, but for where its files are."""
        return self.splits[cell.split].spec.replace("{data}", cell.data.name.replace("-", ""))

    def pretraining(self, cell: Cell, budget: Budget) -> dict[str, Any]:
        """Return how the network of a cell is trained."""
        return {**self.kinds[cell.data.kind].pretraining, **budget.pretraining}

    def settings(self, cell: Cell, budget: Budget) -> list[Settings]:
        """Return what is fitted on a cell: every readout that can predict at its level."""
        kind = self.kinds[cell.data.kind]
        return [
            Settings(
                readout=entry.name,
                head=entry.head or entry.name,
                options=dict(entry.options),
                seeds=tuple(range(min(entry.seeds, budget.seeds or entry.seeds))),
                training={
                    **kind.training,
                    **entry.training,
                    **entry.kinds.get(cell.data.kind, {}),
                    **budget.training,
                },
                metric=cell.data.metric,
            )
            for entry in self.readouts
            if kind.level in head_info(entry.head or entry.name).levels
            and not budget.omits(cell.name, entry.name)
        ]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_name(where: str, name: str, known: Iterable[str]) -> None:
    if name not in known:
        raise ConfigError(f"{where}: found {name!r}, expected one of {', '.join(known)}")


def read_study(path: Path) -> Study:
    """Read a study file; models in files are named from the folder it is in."""
    try:
        return decode(Study, read_toml_file(path), str(path), error=ConfigError, defaults=True)
    except HistographError as error:
        raise ConfigError(str(error)) from None


def model_beside(study: Path, model: str) -> str:
    """Return a model's specification; a file in it is looked for beside the study file."""
    file, colon, name = model.rpartition(":")
    if not colon or not file.endswith(".py"):
        return model
    return f"{(study.parent / file).resolve()}:{name}"
