"""The table of results: a row per fit, and one per fold for the seeds averaged.

Each readout on each fold is a piece of its own, written when it is done, in any order and by any
number of jobs; the table is always all pieces, sorted.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from histograph_post.errors import ConfigError, NotFoundError
from histograph_post.utils.files import write_json, write_text

#: The seed of a row that averages the predictions of all seeds.
AVERAGED = "averaged"

#: The readout that the checkpoint came with.
OWN = "own"

RESULTS_NAME = "results.csv"
_PIECES = "pieces"


@dataclass(frozen=True)
class Row:
    """One fit, or the seeds of one fold averaged."""

    data: str
    checkpoint: str
    split: str
    fold: int
    readout: str
    #: A number, or :data:`AVERAGED`.
    seed: str
    metric: str
    higher_is_better: bool
    valid: float | None
    test: float | None
    #: Of training, all seeds of an average together.
    seconds: float | None = None
    epochs: int | None = None
    best_epoch: int | None = None
    parameters: int | None = None

    @property
    def cell(self) -> str:
        """The cell this belongs to."""
        return f"{self.data}/{self.checkpoint}/{self.split}"

    @property
    def order(self) -> tuple[Any, ...]:
        """Where the row stands in the table."""
        averaged = self.seed == AVERAGED
        return self.cell, self.fold, self.readout, averaged, 0 if averaged else int(self.seed)


COLUMNS = ("cell", *(column.name for column in fields(Row)))


def to_csv(rows: Iterable[Row]) -> str:
    """Return the table as text, sorted."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row in sorted(rows, key=lambda row: row.order):
        values = {"cell": row.cell, **asdict(row)}
        writer.writerow({name: _cell(value) for name, value in values.items()})
    return text.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_csv(path: Path, *, test: bool) -> list[Row]:
    """Read the table.

    Args:
        path: The file.
        test: Whether to read the scores of the test parts. Choices are made without them.
    """
    try:
        lines = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
    except FileNotFoundError:
        raise NotFoundError(
            f"{path}: found no such file, expected the results of a study"
        ) from None
    if not lines or tuple(lines[0]) != COLUMNS:
        found = ",".join(lines[0]) if lines else "nothing"
        raise ConfigError(f"{path}: found the columns {found}, expected {','.join(COLUMNS)}")
    rows = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            values = dict(zip(COLUMNS, line, strict=True))
            rows.append(_row(values | ({} if test else {"test": ""})))
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
    return rows


#: How columns that may be empty are read.
_OPTIONAL: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(("valid", "test", "seconds"), float),
    **dict.fromkeys(("epochs", "best_epoch", "parameters"), int),
}


def _row(values: Mapping[str, str]) -> Row:
    if values["higher_is_better"] not in ("yes", "no"):
        raise ValueError(
            f"found higher_is_better {values['higher_is_better']!r}, expected yes or no"
        )
    if values["seed"] != AVERAGED and not values["seed"].isdecimal():
        raise ValueError(f"found seed {values['seed']!r}, expected a number or {AVERAGED}")
    columns: dict[str, Any] = dict(values)
    cell = columns.pop("cell")
    columns["fold"] = int(values["fold"])
    columns["higher_is_better"] = values["higher_is_better"] == "yes"
    for name, read in _OPTIONAL.items():
        columns[name] = read(values[name]) if values[name] else None
    row = Row(**columns)
    if row.cell != cell:
        raise ValueError(f"found cell {cell!r}, expected {row.cell!r}")
    return row


# --- pieces


def find_piece(out: Path, unit: str, readout: str, settings: Mapping[str, Any]) -> bool:
    """Whether a readout is done on a unit with these settings."""
    path = _piece(out, unit, readout)
    return path.is_file() and _read_piece(path)["settings"] == json.loads(json.dumps(settings))


def write_piece(
    out: Path, unit: str, readout: str, settings: Mapping[str, Any], rows: Sequence[Row]
) -> None:
    """Write the rows of a readout on a unit, replacing older ones."""
    path = _piece(out, unit, readout)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"settings": settings, "rows": [asdict(row) for row in rows]})


def join_pieces(out: Path) -> Path:
    """Write the table of all pieces."""
    path, joined = out / RESULTS_NAME, None
    # Another job may write a piece meanwhile, and its table before ours: repeat until none has.
    while joined != (found := _pieces(out)):
        rows = [Row(**row) for piece, _ in found for row in _read_piece(piece)["rows"]]
        write_text(path, to_csv(rows))
        joined = found
    return path


def _pieces(out: Path) -> list[tuple[Path, int]]:
    return [(path, path.stat().st_mtime_ns) for path in sorted((out / _PIECES).rglob("*.json"))]


def _piece(out: Path, unit: str, readout: str) -> Path:
    return out / _PIECES / unit / f"{readout}.json"


def _read_piece(path: Path) -> dict[str, Any]:
    try:
        value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"settings": value["settings"], "rows": value["rows"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: found no piece of a study ({error}), expected one") from None
