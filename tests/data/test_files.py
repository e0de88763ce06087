"""``file.py:function`` and ``package.module:function``."""

from __future__ import annotations

import sys

import pytest

from histograph_post.data import load_data
from histograph_post.errors import DataError, NotFoundError

SOURCE = """
from dataclasses import dataclass
from pathlib import Path

import torch
from torch_geometric.data import Data
from histograph_post.data import from_graphs
import neighbour_of_the_file

@dataclass
class Sizes:
    low: int

def graph(size):
    edges = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
    return Data(x=torch.ones(size, 2), edge_index=edges, y=torch.tensor([size]))

def several(count=2, size=3):
    return [graph(size + i) for i in range(count)]

def lazily():
    yield from several()

def anything(**options):
    return several(**options)

def from_root(root):
    assert isinstance(root, Path)
    return several(int((root / "count").read_text()))

def required(count):
    return several(count)

def leveled(level):
    return several(int(level))

def nodes():
    data = graph(3)
    data.y = torch.tensor([0, 1, 0])
    data.train_mask = data.y.bool()
    return data

def collected():
    return from_graphs(several(), ids=["a", "b"], spec="inner")

def fails():
    raise RuntimeError("no such luck\\nmore")

def number():
    return 3
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "neighbour_of_the_file.py").write_text("")
    yield str(tmp_path / "mine.py")
    sys.modules.pop("neighbour_of_the_file", None)


def test_a_function_of_a_file(source):
    path_before = list(sys.path)

    dataset = load_data(f"{source}:several")

    assert dataset.spec == f"{source}:several"
    assert dataset.num_nodes.tolist() == [3, 4]
    assert dataset.labels().tolist() == [[3], [4]]
    assert sys.path == path_before


def test_data_arguments_go_to_the_parameters_of_their_name(source):
    assert len(load_data(f"{source}:several", args={"count": 5, "size": 2})) == 5
    assert len(load_data(f"{source}:anything", args={"count": 4})) == 4
    assert len(load_data(f"{source}:lazily")) == 2
    # Its own parameter of that name wins over the argument of this package.
    assert len(load_data(f"{source}:leveled", args={"level": "3"})) == 3
    with pytest.raises(
        DataError, match=r"unknown data argument 'cuont', expected one of count, fea"
    ):
        load_data(f"{source}:several", args={"cuont": 5})
    with pytest.raises(DataError, match=r"needs 'count', give it with --data-args count=\.\.\."):
        load_data(f"{source}:required")


def test_the_root_is_given_when_asked_for(source, tmp_path):
    (tmp_path / "count").write_text("3")

    assert len(load_data(f"{source}:from_root", root=tmp_path)) == 3
    with pytest.raises(DataError, match="needs 'root', give it with --data-root"):
        load_data(f"{source}:from_root")


def test_one_data_is_a_node_level_set(source):
    dataset = load_data(f"{source}:nodes")

    assert dataset.level == "node"
    assert dataset.official.folds[0].train.tolist() == [1]


def test_a_graph_dataset_is_taken_as_it_is(source):
    dataset = load_data(f"{source}:collected")

    assert dataset.ids == ["a", "b"]
    assert dataset.spec == f"{source}:collected"
    with pytest.raises(DataError, match="returned a GraphDataset, expected no level"):
        load_data(f"{source}:collected", args={"level": "graph"})


def test_failures_are_one_line(source, tmp_path):
    with pytest.raises(DataError, match=r"mine\.py:fails: failed with RuntimeError: no such luck$"):
        load_data(f"{source}:fails")
    with pytest.raises(DataError, match=r"mine\.py:number: failed with TypeError"):
        load_data(f"{source}:number")
    with pytest.raises(DataError, match=r"no function 'sveral', found anything, collected, fails"):
        load_data(f"{source}:sveral")
    with pytest.raises(NotFoundError, match=r"absent\.py does not exist"):
        load_data(f"{tmp_path}/absent.py:several")
    (tmp_path / "broken.py").write_text("import not_a_module_at_all")
    with pytest.raises(
        DataError, match="ModuleNotFoundError: No module named 'not_a_module_at_all'"
    ):
        load_data(f"{tmp_path}/broken.py:several")


def test_two_files_of_one_name_stay_apart(tmp_path):
    for folder, count in (("one", 1), ("two", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(SOURCE.replace("count=2", f"count={count}"))
        (tmp_path / folder / "neighbour_of_the_file.py").write_text("")

    counts = [len(load_data(f"{tmp_path}/{f}/mine.py:several")) for f in ("one", "two", "one")]

    sys.modules.pop("neighbour_of_the_file", None)
    assert counts == [1, 2, 1]


def test_a_pyg_class_of_an_installed_package():
    dataset = load_data(
        "torch_geometric.datasets:FakeDataset", args={"num_graphs": 4, "task": "graph"}
    )

    assert (len(dataset), dataset.level) == (4, "graph")


def test_a_module_of_the_working_folder(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert len(load_data("mine:several")) == 2
    sys.modules.pop("mine", None)
    with pytest.raises(DataError, match="importing absent_package failed: ModuleNotFound"):
        load_data("absent_package:several")


@pytest.mark.parametrize("spec", ["", "PROTEINS", "graphs.csv", "mine.py:", ":several", "a/b"])
def test_what_is_no_specification_says_what_would_be(spec):
    with pytest.raises(DataError, match="not a data specification, expected one of tu:NAME"):
        load_data(spec)
