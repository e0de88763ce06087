from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from histograph_post.errors import SplitError
from histograph_post.splits.split import read_folder, to_positions


def listed(folds: list) -> list[list[list[int]]]:
    return [[part.tolist() for part in fold] for fold in folds]


def parts(*rows: list[int]) -> list:
    return [tuple(np.array(part, dtype=np.int64) for part in rows)]


def write_numbered(folder: Path, tests: dict[int, list[int]], total: int) -> None:
    folder.mkdir(parents=True)
    for number, test in tests.items():
        train = [row for row in reversed(range(total)) if row not in test]
        (folder / f"train_idx-{number}.txt").write_text("\n".join(map(str, train)))
        (folder / f"test_idx-{number}.txt").write_text("\n".join(map(str, test)))


# --- OGB's layout -----------------------------------------------------------------------------


def test_plain_gzipped_and_text_files(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("3\n1\n\n")
    (tmp_path / "val.csv").write_text("0\r\n")
    (tmp_path / "test.csv.gz").write_bytes(gzip.compress(b"2", mtime=0))
    folds = read_folder(tmp_path)
    assert listed(folds) == [[[3, 1], [0], [2]]]
    assert {part.dtype for part in folds[0]} == {np.dtype(np.int64)}


def test_a_part_may_be_empty_or_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("0\n")
    (tmp_path / "test.csv").write_text("")
    assert listed(read_folder(tmp_path)) == [[[0], [], []]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.csv", b"0\n1,2\n", r"train\.csv: line 2: found '1,2', expected one index"),
        ("train.csv", b"index\n0\n", r"train\.csv: line 1: found 'index'"),
        ("train.txt", b"1.5\n", r"train\.txt: line 1: found '1\.5'"),
        ("train.txt", b"9" * 30, r"train\.txt: line 1: found '9{30}'"),
        ("train.csv.gz", b"no gzip", r"train\.csv\.gz: not a list of indices"),
        (
            "train.csv.gz",
            gzip.compress(b"1\n2\n", mtime=0)[:-9],
            r"train\.csv\.gz: not a list of indices",
        ),
        ("train.csv", b"\xff\xfe", r"train\.csv: not a list of indices"),
        ("test.csv", b"0\n", "found no training indices"),
    ],
)
def test_files_that_are_no_indices_are_refused_by_name(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SplitError, match=message) as caught:
        read_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_two_files_for_one_part_are_refused(tmp_path: Path) -> None:
    for name in ("train.csv", "valid.csv", "val.txt"):
        (tmp_path / name).write_text("0\n")
    with pytest.raises(SplitError, match=r"both valid\.csv and val\.txt"):
        read_folder(tmp_path)


# --- DGCNN's layout ---------------------------------------------------------------------------


def test_numbered_folds_validate_on_the_next_test_part(tmp_path: Path) -> None:
    folder = tmp_path / "10fold_idx"
    write_numbered(folder, {1: [0, 1], 2: [2], 3: [3]}, total=5)
    expected = [
        [[4, 3], [2], [0, 1]],
        [[4, 1, 0], [3], [2]],
        [[4, 2], [0, 1], [3]],
    ]
    assert listed(read_folder(folder)) == listed(read_folder(tmp_path)) == expected


def test_ten_folds_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write_numbered(tmp_path / "folds", {number: [number] for number in range(1, 12)}, total=12)
    folds = read_folder(tmp_path / "folds")
    assert [fold[2].tolist() for fold in folds] == [[number] for number in range(1, 12)]


def test_numbered_folds_must_be_complete_and_at_least_three(tmp_path: Path) -> None:
    write_numbered(tmp_path / "gap", {1: [0], 2: [1], 4: [2]}, total=4)
    with pytest.raises(SplitError, match=r"train_idx-3\.txt: no such file"):
        read_folder(tmp_path / "gap")
    write_numbered(tmp_path / "two", {1: [0], 2: [1]}, total=4)
    with pytest.raises(SplitError, match="found 2 folds, expected at least 3"):
        read_folder(tmp_path / "two")


# --- source rows or graph positions -----------------------------------------------------------

# Five rows, of which row 1 has no graph: positions 0, 1, 2, 3 are rows 0, 2, 3, 4.
ROWS = np.array([0, 2, 3, 4])


@pytest.mark.parametrize(
    ("given", "expected", "said"),
    [
        # Every position: positions.
        (parts([1, 0], [2], [3]), [[1, 0], [2], [3]], "the indices are graph positions"),
        # Every row that has a graph: rows.
        (parts([2, 0], [3], [4]), [[1, 0], [2], [3]], "the indices are source rows"),
        # Every row, the one without a graph too: rows.
        (parts([0, 1, 2], [3], [4]), [[0, 1], [2], [3]], "1 of them have no graph"),
        # Beyond the last position: rows.
        (parts([2], [], [4]), [[1], [], [3]], "the indices are source rows"),
    ],
)
def test_indices_are_rows_or_positions_by_what_they_cover(
    given: list, expected: list, said: str
) -> None:
    folds, note = to_positions(given, ROWS, where="here")
    assert listed(folds) == [expected]
    assert note.startswith("here: ")
    assert note.endswith(said)


def test_indices_that_could_be_either_are_refused() -> None:
    with pytest.raises(SplitError, match=r"could be source rows or graph positions \(4 graphs"):
        to_positions(parts([0, 2], [], [3]), ROWS, where="here")


def test_without_skipped_rows_both_readings_are_the_same() -> None:
    folds, note = to_positions(parts([0, 2], [], [3]), np.arange(4), where="here")
    assert listed(folds) == [[[0, 2], [], [3]]]
    assert note == ""


@pytest.mark.parametrize("outside", [5, -1])
def test_rows_outside_the_source_are_refused(outside: int) -> None:
    with pytest.raises(SplitError, match=f"index {outside}, expected source rows from 0 to 4"):
        to_positions(parts([0, 4], [], [outside]), ROWS, where="here")
