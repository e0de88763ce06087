"""GraphDataset and from_graphs on hand-made graphs."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data, HeteroData

from histograph_post.data import GraphDataset, from_graphs
from histograph_post.errors import DataError

NAN = float("nan")


def path_graph(size=3, **attributes):
    edges = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
    return Data(**{"x": torch.ones(size, 2), "edge_index": edges} | attributes)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([torch.tensor([1]), torch.tensor([0])], [[1.0], [0.0]]),
        ([torch.tensor(1), 0], [[1.0], [0.0]]),
        ([torch.tensor([[1.5, NAN]]), torch.tensor([[2.0, 3.0]])], [[1.5, NAN], [2.0, 3.0]]),
        ([torch.tensor([1.5, NAN]), torch.tensor([2.0, 3.0])], [[1.5, NAN], [2.0, 3.0]]),
        ([torch.tensor([1.0]), torch.tensor([[2.0]])], [[1.0], [2.0]]),
        ([[1.0, 2.0], np.array([3.0, 4.0])], [[1.0, 2.0], [3.0, 4.0]]),
        ([torch.tensor([-1]), torch.tensor([True])], [[-1.0], [1.0]]),
        ([torch.tensor([1]), None], [[1.0], [NAN]]),
        ([None, None], np.empty((2, 0))),
    ],
)
def test_graph_labels_have_a_row_per_graph_whatever_their_shape(labels, expected):
    dataset = from_graphs([path_graph(4, y=labels[0]), path_graph(5, y=labels[1])])

    found = dataset.labels()

    assert dataset.level == "graph"
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, np.array(expected))
    assert len(dataset.target_names) == found.shape[1]
    assert Batch.from_data_list(dataset.graphs).num_graphs == 2


def test_node_labels_are_concatenated_and_an_unlabelled_graph_is_missing():
    graphs = [
        path_graph(2, y=torch.tensor([0, 1])),
        path_graph(3),
        path_graph(1, y=torch.tensor([2])),
    ]

    dataset = from_graphs(graphs)

    assert dataset.level == "node"
    np.testing.assert_array_equal(dataset.labels()[:, 0], [0, 1, NAN, NAN, NAN, 2])
    np.testing.assert_array_equal(dataset.num_nodes, [2, 3, 1])
    assert Batch.from_data_list(dataset.graphs).y.shape == (6,)


def test_link_labels_have_a_row_per_pair():
    pairs = torch.tensor([[0, 1], [2, 2]])
    graph = path_graph(3, y=torch.zeros(3), edge_label_index=pairs, edge_label=torch.tensor([1, 0]))

    dataset = from_graphs([graph])

    assert dataset.level == "link"
    np.testing.assert_array_equal(dataset.labels(), [[1], [0]])


def test_the_level_can_be_given_where_the_guess_would_be_wrong():
    graphs = [path_graph(3, y=torch.tensor([1.0, 2.0, 3.0])) for _ in range(4)]

    guessed = from_graphs(graphs)
    given = from_graphs(graphs, level="graph")

    assert guessed.level == "node"
    assert "level=graph" in guessed.notes[0]
    assert guessed.labels().shape == (12, 1)
    assert given.labels().shape == (4, 3)
    assert given.target_names == ["y0", "y1", "y2"]


def test_graphs_of_one_node_are_graph_level():
    assert from_graphs([path_graph(1, y=torch.tensor([0])) for _ in range(3)]).level == "graph"


def test_labels_of_another_shape_than_the_level_are_refused():
    with pytest.raises(DataError, match=r"graph 0: y has shape \[3\], expected 4 rows"):
        from_graphs([path_graph(4, y=torch.zeros(3))], level="node")
    with pytest.raises(DataError, match=r"\[1, 2\] targets"):
        from_graphs([path_graph(4, y=torch.zeros(1)), path_graph(5, y=torch.zeros(2))])


def test_masks_become_official_splits_and_leave_the_graph():
    masks = torch.eye(4, dtype=torch.bool)
    graph = path_graph(
        4,
        y=torch.arange(4),
        train_mask=masks[:, :2],  # two folds
        val_mask=masks[:, 1:3],
        test_mask=masks[:, 3],  # one for both
    )

    dataset = from_graphs([graph])

    folds = [[part.tolist() for part in fold.parts] for fold in dataset.official.folds]
    assert folds == [[[0], [1], [3]], [[1], [2], [3]]]
    assert (dataset.official.unit, dataset.official.total) == ("node", 4)
    assert set(dataset.graphs[0].to_dict()) == {"x", "edge_index", "y"}
    assert "train_mask" in graph


def test_masks_of_several_graphs_index_all_nodes():
    graphs = [
        path_graph(2, y=torch.zeros(2), train_mask=torch.tensor([True, False])),
        path_graph(3, y=torch.zeros(3), train_mask=torch.tensor([False, False, True])),
    ]

    assert from_graphs(graphs).official.folds[0].train.tolist() == [0, 4]


def test_masks_that_overlap_or_do_not_fit_are_refused():
    mask = torch.tensor([True, False, False])
    with pytest.raises(DataError, match="both train and valid"):
        from_graphs([path_graph(y=torch.zeros(3), train_mask=mask, val_mask=mask)])
    with pytest.raises(DataError, match=r"train_mask has shape \[2\], expected 3 rows"):
        from_graphs([path_graph(y=torch.zeros(3), train_mask=mask[:2])])
    with pytest.raises(DataError, match="train_mask is not boolean"):
        from_graphs([path_graph(y=torch.zeros(3), train_mask=torch.arange(3))])


def test_the_given_graphs_are_not_changed():
    graph = path_graph(x=torch.ones(3, 2, dtype=torch.float64), y=2)

    dataset = from_graphs([graph])

    assert graph.x.dtype == torch.float64
    assert graph.y == 2
    assert dataset.graphs[0].x.dtype == torch.float32
    assert dataset.notes == ["x converted from float64 to float32 in 1 graphs"]


def test_an_empty_float_edge_index_is_a_graph_without_edges():
    graph = from_graphs([path_graph(edge_index=torch.tensor([[], []]))]).graphs[0]

    assert graph.edge_index.dtype == torch.int64
    assert graph.num_edges == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"edge_index": torch.tensor([[0], [3]])}, "edge_index names node 3, expected 0 to 2"),
        ({"edge_index": torch.tensor([[0], [-1]])}, "edge_index names node -1"),
        ({"edge_index": torch.tensor([[0], [1]]).int()}, r"edge_index is int32 \[2, 1\], expected"),
        ({"edge_index": torch.tensor([[0, 1, 2]])}, r"edge_index is int64 \[1, 3\], expected"),
        ({"edge_index": torch.eye(3).to_sparse()}, "edge_index is torch.sparse_coo, expected a de"),
        ({"edge_index": None}, "no edge_index"),
        ({"num_nodes": 4}, r"x is float32 \[3, 2\], expected 4 rows, one per node"),
        ({"x": torch.tensor([[0.0], [1.0], [NAN]])}, "x has 1 values that are not finite, the .*2"),
        ({"x": torch.ones(3, 1, dtype=torch.complex64)}, "x is complex64"),
        ({"x": "abc"}, "x is str, expected a dense tensor"),
        ({"y": "abc"}, "y is str, expected a dense tensor"),
        ({"edge_attr": torch.ones(3, 1)}, r"edge_attr is .*expected 2 rows, one per edge"),
        ({"edge_attr": torch.tensor([1.0, float("inf")])}, "edge_attr has 1 values .* at edge 1"),
        ({"x": torch.ones(0, 2), "edge_index": torch.empty(2, 0)}, "no nodes, expected at least"),
    ],
)
def test_a_bad_graph_is_named(change, message):
    with pytest.raises(DataError, match=f"^mine: graph b: .*{message}"):
        from_graphs([path_graph(), path_graph(**change)], spec="mine", ids=["a", "b"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(3, 5)}, r"x is float32 \[3, 5\], but float32 \[3, 2\] in graph 0"),
        ({"x": torch.ones(3, 2).long()}, r"x is int64 \[3, 2\], but float32"),
        ({"x": None, "num_nodes": 3}, "no x, but 1 of 2 graphs have it"),
        ({"edge_attr": torch.ones(2, 1)}, "no edge_attr, but 1 of 2"),
    ],
)
def test_graphs_that_differ_in_what_a_model_sees_are_refused(change, message):
    with pytest.raises(DataError, match=message):
        from_graphs([path_graph(), path_graph(**change)])


def test_other_attributes_that_cannot_be_batched_are_left_out_and_noted():
    graphs = [path_graph(extra=torch.ones(1), meta={"a": 1}), path_graph(meta={"b": 2})]

    dataset = from_graphs(graphs)

    assert set(Batch.from_data_list(dataset.graphs).to_dict()) >= {"x", "edge_index"}
    assert dataset.notes == [
        "attribute meta (dict) left out in 2 graphs",
        "attribute extra left out, not in all graphs: found in 1 graphs",
    ]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (torch.tensor([[0], [3]]), "edge_label_index names node 3"),
        (torch.tensor([0, 1]), r"edge_label_index is int64 \[2\]"),
    ],
)
def test_links_between_nodes_that_do_not_exist_are_refused(pairs, message):
    with pytest.raises(DataError, match=message):
        from_graphs([path_graph(edge_label_index=pairs)])


def test_what_is_not_a_homogeneous_graph_is_refused():
    with pytest.raises(DataError, match="graph 0: found HeteroData"):
        from_graphs([HeteroData()])
    with pytest.raises(DataError, match="no graphs"):
        from_graphs([])


def test_ids_are_unique_and_one_per_graph():
    with pytest.raises(DataError, match="id 'a' belongs to more than one graph"):
        from_graphs([path_graph(), path_graph()], ids=["a", "a"])
    with pytest.raises(DataError, match="1 ids for 2 graphs"):
        from_graphs([path_graph(), path_graph()], ids=["a"])
    with pytest.raises(DataError, match="3 smiles for 1 graphs"):
        GraphDataset("mine", [path_graph()], ["0"], "graph", smiles=["C", "N", "O"])


def test_the_fingerprint_depends_on_content_alone():
    def fingerprint(ids=("0", "1"), **change):
        graphs = [path_graph(y=torch.tensor([1])), path_graph(y=torch.tensor([0]))]
        for name, value in change.items():
            graphs[1][name] = value
        return from_graphs(graphs, ids=ids).fingerprint()

    assert fingerprint() == fingerprint(num_nodes=3)
    different = [
        fingerprint(),
        fingerprint(ids=["0", "2"]),
        fingerprint(y=torch.tensor([1])),
        fingerprint(y=torch.tensor([0.0])),
        fingerprint(x=torch.full((3, 2), 1.0000001)),
        fingerprint(edge_index=torch.tensor([[1, 1], [0, 2]])),
    ]
    assert len(set(different)) == len(different)


def test_the_fingerprint_is_the_same_in_every_version():
    dataset = from_graphs([path_graph(y=torch.tensor([1]))])

    assert dataset.fingerprint() == (
        "8653885299e6570efbc9ac3b4bb3c05f8c1616fba907c89c4a1c71f5bcecb754"
    )


class SparseTensor:
    """What torch_sparse's class of that name offers, which is not installed here."""

    def __init__(self, row: torch.Tensor, column: torch.Tensor, size: int) -> None:
        self._row, self._column, self._size = row, column, size

    def coo(self) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self._row, self._column, None

    def sizes(self) -> list[int]:
        return [self._size, self._size]

    def size(self, dim: int) -> int:
        return self._size


def test_a_sparse_tensor_of_torch_sparse_is_read_as_torchs_own() -> None:
    target, source = torch.tensor([0, 1, 1, 2]), torch.tensor([1, 0, 2, 1])
    theirs = Data(x=torch.ones(3, 2), adj_t=SparseTensor(target, source, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its CSR tensors beta
        own = torch.sparse_coo_tensor(torch.stack([target, source]), torch.ones(4), (3, 3))
        ours = Data(x=torch.ones(3, 2), adj_t=own.to_sparse_csr())
    found, expected = from_graphs([theirs]), from_graphs([ours])
    assert found.fingerprint() == expected.fingerprint()
    assert torch.equal(found.graphs[0].edge_index, expected.graphs[0].edge_index)
    assert any("torch_sparse" in note for note in found.notes)


def test_a_part_has_the_names_and_rows_of_its_graphs():
    part = from_graphs([path_graph(size, name=f"graph {size}") for size in (1, 2, 3)])[1:]
    assert (part.ids, part.names) == (["graph 2", "graph 3"],) * 2
    assert part.rows.tolist() == [1, 2]
    assert part.num_nodes.tolist() == [2, 3]
