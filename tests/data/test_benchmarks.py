"""Benchmark sets on a hand-made TU set: finding, processing, refusing."""

from __future__ import annotations

import os
import pickle
import zipfile

import pytest
import torch
from torch_geometric.datasets import TUDataset

from histograph_post.data import load_data
from histograph_post.data.benchmarks import RawFiles, processed
from histograph_post.errors import DataError

from .conftest import listing


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "histograph-post" / "datasets"


TINY = {
    "A": "1, 2\n2, 1\n3, 4\n4, 3\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n2\n2\n2\n",
    "graph_labels": "-1\n1\n",
    "node_labels": "0\n1\n1\n0\n2\n",
    "node_attributes": "0.5\n1.5\n2.5\n3.5\n4.5\n",
}


def write_tiny(folder, leave_out=()):
    folder.mkdir(parents=True)
    for part, text in TINY.items():
        if part not in leave_out:
            (folder / f"TINY_{part}.txt").write_text(text)
    return folder


@pytest.mark.parametrize("place", ["TINY/raw", "tu/TINY/raw", "raw", "TINY"])
def test_raw_files_are_found_and_left_alone(place, tmp_path, cache_folder, capfd):
    root = tmp_path / "root"
    write_tiny(root / place)
    before = listing(root)

    dataset = load_data("tu:TINY", root=root)

    assert dataset.graphs[1].x.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert dataset.graphs[1].edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert dataset.labels().tolist() == [[0], [1]]
    assert listing(root) == before
    assert capfd.readouterr() == ("", "")
    assert [path.name.rpartition("-")[0] for path in cache_folder.iterdir()] == ["tu-TINY"]


def test_node_attributes_come_first_when_asked_for(tmp_path):
    write_tiny(tmp_path / "TINY" / "raw")

    dataset = load_data("tu:TINY", root=tmp_path, args={"node_attr": "true"})

    assert dataset.graphs[0].x.tolist() == [[0.5, 1, 0, 0], [1.5, 0, 1, 0]]


def test_changed_raw_files_are_processed_again(tmp_path, cache_folder):
    raw = write_tiny(tmp_path / "TINY" / "raw")
    first = load_data("tu:TINY", root=tmp_path)
    (raw / "TINY_graph_labels.txt").write_text("+1\n-1\n")
    os.utime(raw / "TINY_graph_labels.txt", ns=(1, 1))

    second = load_data("tu:TINY", root=tmp_path)

    assert (first.labels().tolist(), second.labels().tolist()) == ([[0], [1]], [[1], [0]])
    assert len(list(cache_folder.iterdir())) == 2


def test_an_incomplete_copy_is_refused_and_nothing_is_downloaded_into_it(tmp_path):
    write_tiny(tmp_path / "TINY" / "raw", leave_out=["graph_indicator"])
    before = listing(tmp_path)

    with pytest.raises(DataError, match=r"TINY_graph_indicator\.txt not found in .*TINY/raw"):
        load_data("tu:TINY", root=tmp_path)

    assert listing(tmp_path) == before
    with pytest.raises(DataError, match="absent: no such folder"):
        load_data("tu:TINY", root=tmp_path / "absent")


def test_unreadable_raw_files_leave_nothing_behind(tmp_path, cache_folder):
    raw = write_tiny(tmp_path / "TINY" / "raw")
    (raw / "TINY_A.txt").write_text("one, two\n")

    with pytest.raises(DataError, match=r"raw: cannot be read as tu:TINY \(ValueError"):
        load_data("tu:TINY", root=tmp_path)

    assert list(cache_folder.iterdir()) == []


def test_a_processed_file_that_would_run_code_is_refused(tmp_path, cache_folder):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    write_tiny(tmp_path / "TINY" / "raw")
    load_data("tu:TINY", root=tmp_path)
    made = next(cache_folder.iterdir()) / "TINY" / "processed"
    assert [path.name for path in made.iterdir()] == ["data.pt"]
    torch.save(Hostile(), made / "data.pt")

    with pytest.raises(DataError, match="damaged, delete this folder"):
        load_data("tu:TINY", root=tmp_path)

    assert not (tmp_path / "executed").exists()


def test_a_process_that_finishes_second_uses_what_the_first_one_made(tmp_path, cache_folder):
    raw = write_tiny(tmp_path / "TINY" / "raw")
    tiny = RawFiles("tu:TINY", ("TINY/raw",), ("TINY_A.txt",), "TINY", "TINY_*.txt")
    folders = []

    def build(folder):
        folders.append(folder)
        if len(folders) == 1:  # someone else starts and finishes while this one is at work
            load_data("tu:TINY", root=tmp_path)
        return TUDataset(folder, "TINY")

    assert len(processed(tiny, tmp_path, build)) == 2

    (kept,) = cache_folder.iterdir()
    assert folders[0] != str(kept)
    assert folders[1] == str(kept)
    assert (kept / "TINY" / "raw" / "TINY_A.txt").resolve() == (raw / "TINY_A.txt").resolve()


def test_without_a_root_pyg_downloads_into_the_cache(tmp_path, monkeypatch, cache_folder, capfd):
    raw = write_tiny(tmp_path / "TINY")
    with zipfile.ZipFile(tmp_path / "TINY.zip", "w") as archive:
        for path in raw.iterdir():
            archive.write(path, f"TINY/{path.name}")
    monkeypatch.setattr(TUDataset, "url", str(tmp_path))

    first = load_data("tu:TINY")
    (tmp_path / "TINY.zip").unlink()
    again = load_data("tu:TINY")

    assert first.fingerprint() == again.fingerprint()
    assert len(list(cache_folder.iterdir())) == 1
    assert capfd.readouterr() == ("", "")


def test_a_failed_download_is_one_line_that_says_what_to_do(tmp_path, monkeypatch, cache_folder):
    monkeypatch.setattr(TUDataset, "url", str(tmp_path / "nowhere"))

    with pytest.raises(DataError, match=r"^tu:TINY: cannot be downloaded, .* --data-root \(.*\)$"):
        load_data("tu:TINY")

    assert list(cache_folder.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said_so(tmp_path, monkeypatch):
    write_tiny(tmp_path / "TINY" / "raw")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    with pytest.raises(DataError, match=r"cannot be written .* set XDG_CACHE_HOME"):
        load_data("tu:TINY", root=tmp_path)


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("tu:../TINY", {}, "not a name of the TU collection"),
        ("tu:", {}, "not a name of the TU collection"),
        (
            "tu:TINY",
            {"split": "public"},
            "unknown data argument 'split', expected one of features, ",
        ),
        ("tu:TINY", {"node_attr": "maybe"}, "node_attr=maybe, expected true or false"),
        ("tu:TINY", {"max_degree": "many"}, "max_degree=many, expected a whole number"),
        ("planetoid:Coral", {}, "unknown, expected one of Cora, CiteSeer, PubMed"),
        ("planetoid:Cora", {"split": "random"}, "split=random, expected one of public, geom-gcn"),
        ("actor:Brando", {}, "expected actor:"),
        ("actor:", {"split": 1}, "unknown data argument 'split', expected one of level"),
        ("wiki:crocodile", {}, "unknown, expected one of chameleon, squirrel"),
    ],
)
def test_bad_names_and_arguments_are_refused(spec, args, message, tmp_path):
    write_tiny(tmp_path / "TINY" / "raw")

    with pytest.raises(DataError, match=message):
        load_data(spec, root=tmp_path, args=args)


def test_planetoid_files_that_would_run_code_are_refused(tmp_path):
    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (raw / f"ind.cora.{part}").write_bytes(pickle.dumps(Hostile()))

    with pytest.raises(DataError, match=r"ind\.cora\.allx: .* nothing in it has been executed"):
        load_data("planetoid:Cora", root=tmp_path)

    assert not (tmp_path / "executed").exists()
