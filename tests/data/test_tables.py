from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from histograph_post.data.tables import read_table
from histograph_post.errors import DataError, NotFoundError


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_cells_are_text_without_the_white_space_around_them(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, 'a,"b,c"\n 1 ,x\n\n2,"y ""z"""\n'))
    assert table.header == ("a", "b,c")
    assert table.num_rows == 2
    assert table.column("a") == ("1", "2")
    assert table.column("b,c") == ("x", 'y "z"')


def test_a_gzipped_table_with_a_byte_order_mark_and_windows_lines(tmp_path: Path) -> None:
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress("\ufeffa,b\r\n1,2\r\n".encode()))
    assert read_table(path).column("a") == ("1",)


def test_a_column_of_numbers_has_nan_for_blanks(tmp_path: Path) -> None:
    table = read_table(write(tmp_path, "a,b,c\n1,x,1\n,2,inf\n-2.5e1,3,2\n"))
    np.testing.assert_array_equal(table.numbers("a"), [1, np.nan, -25])
    assert table.numbers("b") is None
    assert table.numbers("c") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n1,2,3\n", "line 3: found 3 cells, expected 2"),
        ("a,b\n", "found no rows"),
        ("", "found no rows"),
        ("a,b,b\n1,2,3\n", "found column 'b' more than once"),
    ],
)
def test_broken_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"table\.csv: .*{message}"):
        read_table(write(tmp_path, text))


def test_files_that_are_no_table_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"nowhere\.csv: no such file"):
        read_table(tmp_path / "nowhere.csv")
    for name, content in (("binary.csv", b"a\n\xff\xfe\n"), ("cut.csv.gz", b"\x1f\x8b\x08\x00")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: not a readable csv file"):
            read_table(tmp_path / name)


@pytest.mark.parametrize("kind", ["parquet", "feather", "stream"])
def test_tables_of_arrow_have_the_cells_of_a_csv_file(tmp_path: Path, kind: str) -> None:
    """A stream is what ``datasets.Dataset.save_to_disk`` of Hugging Face writes."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, ipc, parquet

    values = {"smiles": [" CC ", "CCO"], "y": [True, None], "x": [0.5, None], "list": [[1], [2]]}
    made, path = pyarrow.table(values), tmp_path / f"t.{'arrow' if kind == 'stream' else kind}"
    if kind == "parquet":
        parquet.write_table(made, path)
    elif kind == "feather":
        feather.write_feather(made, path)
    else:
        with ipc.new_stream(str(path), made.schema) as writer:
            writer.write_table(made)
    table = read_table(path)
    assert table.header == ("smiles", "y", "x")
    assert [list(column) for column in table.columns] == [["CC", "CCO"], ["1", ""], ["0.5", ""]]


def test_no_table_of_arrow_is_one_line(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for name in ("a.parquet", "a.arrow"):
        (tmp_path / name).write_bytes(b"no table at all")
        with pytest.raises(DataError, match=f"{name}: not a readable table"):
            read_table(tmp_path / name)
