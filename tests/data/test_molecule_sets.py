from __future__ import annotations

import gzip
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from histograph_post.data.molecule_sets import load_ogbg
from histograph_post.errors import DataError, MissingExtraError, SplitError

# Two molecules, three and one atoms, in OGB's layout: each bond once, blank = missing label.
FILES = {
    "raw/num-node-list": "3\n1\n",
    "raw/num-edge-list": "2\n0\n",
    "raw/node-feat": (
        "5,0,4,5,3,0,2,0,0\n5,0,4,5,2,0,2,0,0\n7,0,2,5,1,0,2,0,0\n10,0,0,6,0,0,5,0,0\n"
    ),
    "raw/edge": "0,1\n1,2\n",
    "raw/edge-feat": "0,0,0\n1,2,1\n",
    "raw/graph-label": "1,\n0,1\n",
    "mapping/mol": "A,B,smiles,mol_id\n1,,CCO,first\n0,1,[Na+],second\n",
    "split/scaffold/train": "1\n",
    "split/scaffold/valid": "",
    "split/scaffold/test": "0\n",
}


def write_set(folder: Path, **changes: str) -> Path:
    for name, text in (FILES | changes).items():
        path = folder / f"{name}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    return folder


@pytest.fixture
def user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "histograph-post"


# --- reading ----------------------------------------------------------------------------------


def test_a_small_set_by_hand(tmp_path: Path) -> None:
    write_set(tmp_path / "ogbg_moltiny")
    dataset = load_ogbg("moltiny", tmp_path, {})
    assert dataset.spec == "ogbg:moltiny"
    assert dataset.ids == ["first", "second"]
    assert dataset.smiles == ["CCO", "[Na+]"]
    assert dataset.target_names == ["A", "B"]
    np.testing.assert_array_equal(dataset.labels(), [[1, np.nan], [0, 1]])
    first, second = dataset.graphs
    # Each bond is followed by its reverse.
    assert first.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert first.edge_attr.tolist() == [[0, 0, 0], [0, 0, 0], [1, 2, 1], [1, 2, 1]]
    assert first.x[:, 0].tolist() == [5, 5, 7]
    assert second.x.tolist() == [[10, 0, 0, 6, 0, 0, 5, 0, 0]]
    assert second.edge_index.shape == (2, 0)
    assert second.edge_attr.shape == (0, 3)
    assert dataset.official is not None
    assert dataset.official.folds[0].train.tolist() == [1]
    assert dataset.official.folds[0].valid.tolist() == []
    assert dataset.official.folds[0].test.tolist() == [0]


def test_a_graph_does_not_hold_the_whole_set(tmp_path: Path) -> None:
    write_set(tmp_path / "ogbg_moltiny")
    graph = load_ogbg("moltiny", tmp_path, {}).graphs[1]
    assert graph.x.untyped_storage().nbytes() == graph.x.numel() * 8


def test_equal_to_the_reader_of_the_ogb_package(
    shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Importing ogb asks the network for its latest version unless this package is missing.
    monkeypatch.setitem(sys.modules, "outdated", None)
    reader = pytest.importorskip("ogb.io.read_graph_raw")
    theirs = reader.read_csv_graph_raw(
        str(shared_data / "ogb" / "ogbg_molesol" / "raw"), add_inverse_edge=True
    )
    ours = load_ogbg("molesol", shared_data, {})
    assert len(ours) == len(theirs) == 1128
    for graph, expected in zip(ours.graphs, theirs, strict=True):
        assert torch.equal(graph.x, torch.from_numpy(expected["node_feat"]))
        assert torch.equal(graph.edge_index, torch.from_numpy(expected["edge_index"]))
        assert torch.equal(graph.edge_attr, torch.from_numpy(expected["edge_feat"]))


def test_the_real_sets(shared_data: Path) -> None:
    bbbp = load_ogbg("molbbbp", shared_data, {})
    assert bbbp.official is not None
    assert [len(part) for part in bbbp.official.folds[0].parts] == [1631, 204, 204]
    assert bbbp.graphs[0].y.dtype == torch.int64
    esol = load_ogbg("molesol", shared_data / "ogb", {})
    assert esol.target_names == ["measured log solubility in mols per litre"]
    assert esol.labels()[:3, 0] == pytest.approx([-0.77, -3.3, -2.06])
    assert esol.ids[:2] == ["Amigdalin", "Fenfuram"]


@pytest.mark.parametrize("place", ["ogbg_moltiny", "ogb/ogbg_moltiny", "", "../ogbg_moltiny"])
def test_where_a_root_is_searched(tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    folder = write_set((root / place).resolve())
    given = folder if place.startswith("..") else root  # the last case: the root is the set
    assert len(load_ogbg("moltiny", given, {})) == 2


# --- what is refused --------------------------------------------------------------------------


def test_a_root_without_the_set_says_where_it_looked(tmp_path: Path) -> None:
    other = write_set(tmp_path / "ogbg_molother")
    with pytest.raises(DataError, match=r"ogbg:moltiny: ogbg_moltiny/raw/edge.csv.gz not found"):
        load_ogbg("moltiny", tmp_path, {})
    with pytest.raises(DataError) as caught:
        load_ogbg("moltiny", other, {})  # another set is not mistaken for this one
    assert f"{other}/ogb/ogbg_moltiny" in caught.value.details


@pytest.mark.parametrize("name", ["", "ppa", "../molhiv", "mol/hiv"])
def test_names_that_are_not_molecule_sets(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="one of OGB's molecule sets"):
        load_ogbg(name, tmp_path, {})


def test_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown data argument 'features', expected one of level"):
        load_ogbg("molhiv", tmp_path, {"features": "degree"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raw/num-node-list", "3\n2\n", "4 rows of node features, expected 5"),
        ("raw/num-edge-list", "2\n1\n", "found 2 edges and 2 rows of edge features, expected 3"),
        ("raw/edge-feat", "0,0,0\n", "found 2 edges and 1 rows"),
        ("raw/edge", "0,1\n1,3\n", "edge.csv.gz: found an edge to a node its graph does not have"),
        ("raw/edge", "0,1,2\n1,2,0\n", "edge.csv.gz: found 3 columns, expected 2"),
        ("raw/edge", "0,1\n1,x\n", "edge.csv.gz: not a table of whole numbers"),
        ("raw/node-feat", "", "node-feat.csv.gz: found no rows"),
        ("raw/graph-label", "1,\n0,1\n0,0\n", r"2 graphs, labels \[3, 2\]"),
        ("raw/graph-label", "1\n0,1\n", "graph-label.csv.gz: not a table of numbers"),
        ("raw/graph-label", "1,yes\n0,1\n", "graph-label.csv.gz: not a table of numbers"),
        ("mapping/mol", "A,smiles,mol_id\n1,C,a\n0,C,b\n", "2 molecules with 1 targets"),
    ],
)
def test_files_that_disagree_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    write_set(tmp_path / "ogbg_moltiny", **{name: text})
    with pytest.raises(DataError, match=message):
        load_ogbg("moltiny", tmp_path, {})


def test_a_split_that_does_not_fit_names_its_folder_and_index(tmp_path: Path) -> None:
    write_set(tmp_path / "ogbg_moltiny", **{"split/scaffold/test": "2\n"})
    with pytest.raises(SplitError, match="scaffold: found index 2 in test, expected 0 to 1"):
        load_ogbg("moltiny", tmp_path, {})


def test_a_damaged_or_missing_file_is_named(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "ogbg_moltiny")
    labels = folder / "raw" / "graph-label.csv.gz"
    labels.write_bytes(labels.read_bytes()[:-6])
    with pytest.raises(DataError, match=r"graph-label.csv.gz: not a gzipped csv file"):
        load_ogbg("moltiny", tmp_path, {})
    labels.unlink()
    with pytest.raises(DataError, match=r"graph-label.csv.gz: no such file"):
        load_ogbg("moltiny", tmp_path, {})


def test_a_set_without_its_split_is_noted(tmp_path: Path) -> None:
    folder = write_set(tmp_path / "ogbg_moltiny")
    shutil.rmtree(folder / "split")
    dataset = load_ogbg("moltiny", tmp_path, {})
    assert dataset.official is None
    assert "without its scaffold split" in dataset.notes[0]


# --- downloading: an installed ogb package whose table points into a local folder ---------------


def install_ogb(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    package = folder / "ogb" / "graphproppred"
    package.mkdir(parents=True)
    (folder / "ogb" / "__init__.py").touch()
    (package / "master.csv").write_text(
        f",ogbg-moltiny,ogbg-ppa\ndownload_name,tiny,ppi\nurl,{url},nowhere\n"
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "ogb", raising=False)


def test_without_a_root_the_set_is_downloaded_once(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "served" / "tiny")
    archive = shutil.make_archive(str(tmp_path / "tiny"), "zip", tmp_path / "served", "tiny")
    install_ogb(tmp_path / "site", monkeypatch, Path(archive).as_uri())
    assert len(load_ogbg("moltiny", None, {})) == 2
    assert [path.name for path in (user_cache / "ogb").iterdir()] == ["ogbg_moltiny"]
    Path(archive).unlink()
    assert len(load_ogbg("moltiny", None, {})) == 2


@pytest.mark.parametrize("served", ["missing", "damaged"])
def test_a_failed_download_is_one_line_and_leaves_nothing(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch, served: str
) -> None:
    archive = tmp_path / "tiny.zip"
    if served == "damaged":
        archive.write_bytes(b"PK\x03\x04 and then nothing")
    install_ogb(tmp_path / "site", monkeypatch, archive.as_uri())
    with pytest.raises(
        DataError, match=r"ogbg:moltiny: cannot be downloaded.*--data-root"
    ) as error:
        load_ogbg("moltiny", None, {})
    assert "\n" not in str(error.value)
    assert list((user_cache / "ogb").iterdir()) == []


def test_an_unknown_set_lists_those_of_the_table(
    tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_ogb(tmp_path / "site", monkeypatch, "file:///nowhere")
    with pytest.raises(DataError, match=r"OGB has no such set, expected one of moltiny$"):
        load_ogbg("molnone", None, {})


def test_without_the_ogb_package_the_extra_is_named(
    user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ogb", raising=False)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(MissingExtraError, match=r"--data-root.*histograph-post\[ogb\]"):
        load_ogbg("molhiv", None, {})
