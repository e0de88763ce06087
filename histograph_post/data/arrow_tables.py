"""Tables of Parquet and Arrow files, as those of csv files are: a header and columns of text.

Read batch by batch with pyarrow (extra ``arrow``), which Hugging Face's data sets are stored with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataError, MissingExtraError
from .tables import ColumnBuilder, TextColumn


def read_arrow(path: Path) -> tuple[tuple[str, ...], tuple[TextColumn, ...]]:
    """Return the names and the cells of all columns of texts and numbers; others are left out."""
    try:
        from pyarrow import ArrowInvalid, types
        from pyarrow.dataset import dataset
    except ImportError:
        raise MissingExtraError(f"{path}: a table of Parquet or Arrow", extra="arrow") from None
    kind = "parquet" if path.suffix == ".parquet" else "feather"
    try:
        table = dataset(path, format=kind)
        fields = [
            field
            for field in table.schema
            if not (types.is_nested(field.type) or types.is_binary(field.type))
        ]
        names = [field.name for field in fields]
        columns = [ColumnBuilder() for _ in names]
        for batch in table.to_batches(columns=names):
            for column, values in zip(columns, batch.columns, strict=True):
                for value in values.to_pylist():
                    column.append(_cell(value))
    except (ArrowInvalid, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise DataError(f"{path}: not a readable table ({reason})") from None
    if not columns or not len(columns[0]):
        raise DataError(f"{path}: found no rows of texts and numbers, expected at least one")
    return tuple(names), tuple(column.column() for column in columns)


def _cell(value: Any) -> str:
    """Return a value as a csv file has it."""
    if value is None or value != value:
        return ""
    return str(int(value)) if isinstance(value, bool) else str(value).strip()
