"""``graphs.pt``: every form of it, and files that are something else."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from torch import nn
from torch_geometric.data import Batch, Data, InMemoryDataset

from histograph_post.data import from_graphs, load_data
from histograph_post.errors import DataError, NotFoundError


@pytest.fixture
def graphs():
    generator = torch.Generator().manual_seed(0)
    return [
        Data(
            x=torch.randn(size, 3, generator=generator),
            edge_index=torch.randint(size, (2, 2 * size), generator=generator),
            y=torch.tensor([size % 2]),
        )
        for size in (3, 5, 4)
    ]


def save(value, path):
    torch.save(value, path)
    return str(path)


@pytest.mark.parametrize(
    "form",
    [
        lambda graphs: graphs,
        tuple,
        lambda graphs: [graph.to_dict() for graph in graphs],
        InMemoryDataset.collate,
        lambda graphs: (
            InMemoryDataset.collate(graphs)[0].to_dict(),
            InMemoryDataset.collate(graphs)[1],
        ),
        lambda graphs: (graphs[0].to_dict(), graphs[1].to_dict(), graphs[2]),
    ],
    ids=["list", "tuple", "dicts", "collated", "collated-dict", "tuple-of-dicts"],
)
def test_every_form_gives_the_same_graphs(form, graphs, tmp_path):
    dataset = load_data(save(form(graphs), tmp_path / "graphs.pt"))

    assert dataset.level == "graph"
    assert dataset.fingerprint() == from_graphs(graphs).fingerprint()


def test_what_pyg_saves_itself_can_be_read(graphs, tmp_path):
    InMemoryDataset.save(graphs, str(tmp_path / "data.pt"))

    assert load_data(str(tmp_path / "data.pt")).fingerprint() == from_graphs(graphs).fingerprint()


@pytest.mark.parametrize("form", [list, InMemoryDataset.collate])
def test_featureless_graphs_of_different_sizes_keep_their_sizes(form, graphs, tmp_path):
    for graph in graphs:
        graph.num_nodes = graph.num_nodes + 1  # an isolated node that no edge tells of
        del graph.x

    dataset = load_data(save(form(graphs), tmp_path / "g.pt"), args={"features": "constant"})

    assert dataset.num_nodes.tolist() == [4, 6, 5]


def test_one_data_is_a_node_level_set_with_its_masks(graphs, tmp_path):
    graph = graphs[0]
    graph.y = torch.tensor([0, 1, 0])
    graph.train_mask, graph.test_mask = torch.tensor([[1, 0, 0], [0, 1, 1]]).bool()

    for number, value in enumerate((graph, graph.to_dict(), (graph, None))):
        dataset = load_data(save(value, tmp_path / f"{number}.pt"))
        assert dataset.level == "node"
        assert dataset.official.folds[0].test.tolist() == [1, 2]


def test_a_batch_is_taken_apart(graphs):
    dataset = from_graphs(Batch.from_data_list(graphs))

    assert dataset.num_nodes.tolist() == [3, 5, 4]


def test_arguments_reach_the_graphs(graphs, tmp_path):
    for graph in graphs:
        graph.y = torch.zeros(graph.num_nodes)
    path = save(graphs[:1], tmp_path / "graphs.pt")

    assert load_data(path).level == "node"
    assert load_data(path, args={"level": "graph"}).labels().shape == (1, 3)
    with pytest.raises(DataError, match="level=edge, expected one of graph, node, link"):
        load_data(path, args={"level": "edge"})
    with pytest.raises(DataError, match="unknown data argument 'levle', expected one of features"):
        load_data(path, args={"levle": "graph"})


def test_a_file_is_also_looked_for_under_the_root(graphs, tmp_path, monkeypatch):
    save(graphs, tmp_path / "graphs.pt")
    monkeypatch.chdir(tmp_path.parent)

    assert len(load_data("graphs.pt", root=tmp_path)) == 3


class Hostile:
    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


@pytest.mark.parametrize("write", [torch.save, lambda v, p: p.write_bytes(pickle.dumps(v))])
def test_a_hostile_file_is_refused_and_not_executed(write, graphs, tmp_path):
    witness = tmp_path / "executed"
    write([graphs[0], Hostile(witness)], tmp_path / "graphs.pt")

    with pytest.raises(DataError, match="nothing in it has been executed"):
        load_data(str(tmp_path / "graphs.pt"))

    assert not witness.exists()


def test_a_file_that_ends_the_reader_of_torch_is_only_read(tmp_path):
    (tmp_path / "graphs.pt").write_bytes(b"\x80\x02})" + b"\x85" * 3_000_000 + b"Ns.")

    with pytest.raises(DataError, match="expected a list of Data"):
        load_data(str(tmp_path / "graphs.pt"))


def test_the_refusal_names_the_class(tmp_path):
    path = save([Hostile(tmp_path / "executed")], tmp_path / "graphs.pt")

    with pytest.raises(DataError, match=r"it asks for posix\.mkdir"):
        load_data(path)


def test_reading_graphs_takes_nothing_from_what_torch_allows(graphs, tmp_path):
    before = set(torch.serialization.get_safe_globals())

    load_data(save(graphs, tmp_path / "graphs.pt"))

    assert set(torch.serialization.get_safe_globals()) == before


@pytest.mark.parametrize(
    "content",
    [
        nn.Linear(2, 3).state_dict(),
        nn.Sequential(nn.Linear(2, 3)).state_dict(),
        {"model": nn.Sequential(nn.Linear(2, 3)).state_dict(), "epoch": 3},
        {"state_dict": {"weight": torch.ones(1)}, "epoch": 3},
        {"model_state_dict": {}},
    ],
)
def test_a_checkpoint_given_as_data_is_recognised(content, tmp_path):
    path = save(content, tmp_path / "model.pt")

    with pytest.raises(DataError, match="looks like a checkpoint, give it with --checkpoint"):
        load_data(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "found an empty list, expected a list of Data"),
        (torch.ones(3), "found Tensor, expected"),
        ({"a": 1}, "found a dictionary with a, expected"),
        ([torch.ones(3)], "graph 0: found Tensor, expected Data"),
        ([{"x": torch.ones(3, 1)}], "graph 0: found a dictionary with x"),
        (
            (
                {"edge_index": torch.zeros(2, 1).long(), "x": torch.ones(1)},
                {"edge_index": torch.tensor([0, 1]), "x": "?"},
            ),
            "not readable as graphs",
        ),
    ],
)
def test_other_content_is_refused(content, message, tmp_path):
    with pytest.raises(DataError, match=message):
        load_data(save(content, tmp_path / "graphs.pt"))


def test_a_file_that_is_missing_or_damaged(graphs, tmp_path):
    with pytest.raises(NotFoundError, match=r"absent\.pt: no such file"):
        load_data(str(tmp_path / "absent.pt"))
    path = tmp_path / "graphs.pt"
    save(graphs, path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match=r"graphs\.pt: not a file of torch\.save, or damaged"):
        load_data(str(path))


def test_real_files_that_are_no_data_are_refused(shared_data):
    for name in ("pretrain-gnns/*.pth", "pytorch-GAT/*.pth"):
        path = next((shared_data / "checkpoints").glob(name))
        with pytest.raises(DataError, match="looks like a checkpoint"):
            load_data(str(path))
    path = next((shared_data / "checkpoints").glob("ReFine/*.pt"))
    with pytest.raises(DataError, match="nothing in it has been executed"):
        load_data(str(path))
