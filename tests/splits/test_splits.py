from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from histograph_post.data import GraphDataset, from_graphs
from histograph_post.errors import MissingExtraError, NotFoundError, SplitError
from histograph_post.splits import Split, Splits, resolve_splits, split


def graph_data(labels: list, **fields) -> GraphDataset:
    """Return one-node graphs with these labels (a number or a list of numbers each)."""
    graphs = [
        Data(
            x=torch.zeros(1, 1),
            edge_index=torch.empty(2, 0, dtype=torch.int64),
            y=torch.tensor(label, dtype=torch.float32).reshape(1, -1),
        )
        for label in labels
    ]
    return from_graphs(graphs, level="graph", **fields)


def node_data(classes: list[int]) -> GraphDataset:
    """Return two graphs that share these node labels."""
    cut = len(classes) // 3
    graphs = [
        Data(
            x=torch.zeros(len(part), 1),
            edge_index=torch.empty(2, 0, dtype=torch.int64),
            y=torch.tensor(part),
        )
        for part in (classes[:cut], classes[cut:])
    ]
    return from_graphs(graphs, level="node")


def sizes(splits: Splits) -> list[list[int]]:
    return [[len(part) for part in fold.parts] for fold in splits.folds]


def all_rows(fold: Split) -> list[int]:
    return sorted(np.concatenate(fold.parts).tolist())


def write_indices(folder: Path, **parts: list[int] | str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in parts.items():
        text = rows if isinstance(rows, str) else "".join(f"{row}\n" for row in rows)
        (folder / f"{name}.csv").write_text(text)
    return folder


def make(train, valid=(), test=(), *, total: int = 10, unit="graph", seed=None) -> Splits:
    fold = Split(*(np.array(part, dtype=np.int64) for part in (train, valid, test)))
    return Splits(kind="made", unit=unit, total=total, seed=seed, folds=(fold,))


# --- the types --------------------------------------------------------------------------------


def test_a_split_owns_read_only_int64_rows() -> None:
    source = np.array([2, 1], dtype=np.int32)
    split = Split(source, [], [0])
    source[0] = 9
    assert split.train.tolist() == [2, 1]
    assert [part.dtype for part in split.parts] == [np.int64] * 3
    with pytest.raises(ValueError, match="read-only"):
        split.train[0] = 5


@pytest.mark.parametrize("values", [[0.5], [True, 2], ["a"], [[1, 2]]])
def test_rows_that_are_not_integers_are_refused(values: list) -> None:
    with pytest.raises(SplitError, match=r"valid: found .* expected a list of integers"):
        Split([0], values, [1])


def test_splits_compare_by_their_rows() -> None:
    assert make([1, 2], [3]) == make([1, 2], [3])
    assert make([1, 2], [3]) != make([1, 3], [2])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (([0, 10], [], []), "index 10 in train, expected 0 to 9"),
        (([0], [-1], []), "index -1 in valid, expected 0 to 9"),
        (([0, 3], [3], []), "index 3 in both train and valid"),
        (([0], [4, 5], [5]), "index 5 in both valid and test"),
        (([0, 7, 7], [], []), "index 7 more than once in train"),
        (([], [1], [2]), "empty training part"),
    ],
)
def test_unsound_folds_are_refused_with_the_index(parts: tuple, message: str) -> None:
    with pytest.raises(SplitError, match=f"^somewhere: found .*{message}"):
        make(*parts).validate(where="somewhere")


def test_empty_validation_and_unused_rows_are_allowed() -> None:
    make([0, 5]).validate()


def test_the_fold_is_named_and_folds_must_exist() -> None:
    good, bad = make([0]).folds[0], make([99]).folds[0]
    with pytest.raises(SplitError, match="fold 1: found index 99"):
        Splits("made", "graph", 10, None, (good, bad)).validate()
    with pytest.raises(SplitError, match="no folds"):
        Splits("made", "graph", 10, None, ()).validate()
    with pytest.raises(SplitError, match="index 0 in train, expected 0 to -1"):
        make([0], total=0).validate()
    with pytest.raises(SplitError, match="unit 'edge'"):
        make([0], unit="edge").validate()


@settings(max_examples=50)
@given(st.data())
def test_json_round_trip_is_exact_and_byte_stable(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    total = data.draw(st.integers(1, 30))
    owners = [
        data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)) for _ in range(2)
    ]
    folds = []
    for owner in owners:
        owner[data.draw(st.integers(0, total - 1))] = 0  # something to train on
        order = data.draw(st.permutations(range(total)))
        folds.append(Split(*([row for row in order if owner[row] == part] for part in range(3))))
    seed = data.draw(st.none() | st.integers(0, 2**63))
    kind, unit = (
        data.draw(st.text(max_size=5)),
        data.draw(st.sampled_from(["graph", "node", "link"])),
    )
    splits = Splits(kind, unit, total, seed, tuple(folds))
    folder = tmp_path_factory.mktemp("splits")
    splits.save(folder / "a.json")
    loaded = Splits.load(folder / "a.json")
    loaded.save(folder / "b.json")
    assert loaded == splits
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"total": "10"}, "total = '10', expected a whole number"),
        ({"total": True}, "total = True, expected a whole number"),
        ({"kind": 3}, "kind = 3, expected a text"),
        ({"seed": 0.5}, "seed = 0.5, expected a whole number or null"),
        ({"folds": {}}, "folds = {}, expected a list"),
        ({"folds": [{"train": [0]}]}, r"folds\[0\]: found no 'valid'"),
        ({"folds": [{"train": "012", "valid": [], "test": []}]}, "train = '012', expected a list"),
        ({"folds": [{"train": [0.5], "valid": [], "test": []}]}, "train: found values"),
        ({"folds": [{"train": [11], "valid": [], "test": []}]}, "index 11 in train"),
        ({"more": 1}, "unknown field 'more'"),
    ],
)
def test_a_damaged_splits_file_is_refused_by_name(
    tmp_path: Path, change: dict, message: str
) -> None:
    path = tmp_path / "splits.json"
    path.write_text(json.dumps(make([0]).to_json() | change))
    with pytest.raises(SplitError, match=rf"splits\.json: .*{message}"):
        Splits.load(path)


def test_a_total_that_promises_too_much_costs_nothing() -> None:
    make([0], total=10**15).validate()  # as many bytes would not fit anywhere


def test_a_file_that_is_no_json_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(SplitError, match=r"bad\.json: found broken JSON"):
        Splits.load(tmp_path / "bad.json")
    with pytest.raises(NotFoundError, match=r"none\.json"):
        Splits.load(tmp_path / "none.json")


# --- made -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["random", "stratified", "kfold:5"])
def test_made_splits_use_every_row_once_and_follow_the_seed(spec: str) -> None:
    dataset = graph_data([0, 1] * 50)
    splits = resolve_splits(dataset, spec, seed=3)
    assert splits.seed == 3
    assert splits.total == 100
    assert all(all_rows(fold) == list(range(100)) for fold in splits.folds)
    assert splits == resolve_splits(dataset, spec, seed=3)
    assert splits != resolve_splits(dataset, spec, seed=4)


def test_shares_set_the_sizes_and_are_kept_in_the_kind() -> None:
    splits = resolve_splits(graph_data([0.5 * row for row in range(40)]), "random:0.5,0.25,0.25")
    assert sizes(splits) == [[20, 10, 10]]
    assert splits.kind == "random:0.5,0.25,0.25"


def test_node_level_splits_index_nodes_across_graphs() -> None:
    splits = resolve_splits(node_data([0, 1, 2] * 20), "stratified:0.5,0.25,0.25")
    assert splits.unit == "node"
    assert splits.total == 60
    assert sizes(splits) == [[30, 15, 15]]
    assert all_rows(splits.folds[0]) == list(range(60))


def test_several_targets_fall_back_to_random_with_a_note() -> None:
    dataset = graph_data([[0, 1], [1, 0], [1, 1], [0, 0]] * 10)
    splits = resolve_splits(dataset, "stratified", seed=1)
    assert splits.folds == resolve_splits(dataset, "random", seed=1).folds
    assert splits.kind.startswith("random:")
    notes = [note for note in dataset.notes if "several targets cannot be stratified" in note]
    assert len(notes) == 1
    resolve_splits(dataset, "stratified", seed=1)
    assert notes == [note for note in dataset.notes if "cannot be stratified" in note]


def test_kfold_is_stratified_where_there_are_classes() -> None:
    labels = np.array([0] * 70 + [1] * 30)
    splits = resolve_splits(graph_data(labels.tolist()), "kfold:10")
    assert splits.kind == "kfold:10"
    assert [labels[fold.test].sum() for fold in splits.folds] == [3] * 10
    regression = graph_data([0.5 * row for row in range(12)])
    assert sizes(resolve_splits(regression, "kfold:4")) == [[6, 3, 3]] * 4


def test_stratifying_a_regression_or_single_members_is_refused() -> None:
    with pytest.raises(SplitError, match="no classes to stratify by"):
        resolve_splits(graph_data([0.5 * row for row in range(20)]), "stratified")
    with pytest.raises(SplitError, match="smallest: 1 of 20 rows"):
        resolve_splits(graph_data([0] * 19 + [1]), "stratified")


def test_missing_labels_are_spread_like_a_class() -> None:
    labels = np.array([0.0] * 40 + [1.0] * 40 + [np.nan] * 20)
    fold = resolve_splits(graph_data(labels.tolist()), "stratified").folds[0]
    assert [int(np.isnan(labels[part]).sum()) for part in fold.parts] == [16, 2, 2]


# --- auto and official ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([0, 1] * 20, "stratified:0.8,0.1,0.1"),
        ([0.5 * row for row in range(40)], "random:0.8,0.1,0.1"),
        ([[0, 1]] * 40, "random:0.8,0.1,0.1"),
        ([0] * 39 + [1], "random:0.8,0.1,0.1"),
    ],
)
@pytest.mark.parametrize("spec", [None, "auto"])
def test_auto_stratifies_where_it_can(labels: list, kind: str, spec: str | None) -> None:
    assert resolve_splits(graph_data(labels), spec).kind == kind


def test_auto_says_when_classes_are_too_small_to_stratify() -> None:
    dataset = graph_data([0] * 39 + [1])
    resolve_splits(dataset, None)
    assert any("drawn at random instead" in note for note in dataset.notes)


def test_official_splits_win_and_are_asked_for_by_name() -> None:
    official = make([0, 1], [2], [3], total=4)
    dataset = graph_data([0, 1, 0, 1], official=official)
    assert resolve_splits(dataset, None) == official
    assert resolve_splits(dataset, "official") == official
    with pytest.raises(SplitError, match="memory comes without official splits"):
        resolve_splits(graph_data([0, 1]), "official")


# --- files ------------------------------------------------------------------------------------


def test_a_saved_split_comes_back_the_same(tmp_path: Path) -> None:
    dataset = graph_data([0, 1] * 20)
    splits = resolve_splits(dataset, "kfold:4", seed=7)
    splits.save(tmp_path / "splits.json")
    assert resolve_splits(dataset, str(tmp_path / "splits.json")) == splits


def test_a_split_of_other_data_is_refused(tmp_path: Path) -> None:
    resolve_splits(graph_data([0, 1] * 20), "random").save(tmp_path / "splits.json")
    with pytest.raises(SplitError, match="split of 40 graphs, expected one of the 10 graphs"):
        resolve_splits(graph_data([0, 1] * 5), str(tmp_path / "splits.json"))
    with pytest.raises(SplitError, match="split of 40 graphs, expected one of the 40 nodes"):
        resolve_splits(node_data([0, 1] * 20), str(tmp_path / "splits.json"))


def test_empty_and_missing_parts_are_said(tmp_path: Path) -> None:
    dataset = graph_data([0, 1, 0, 1])
    splits = resolve_splits(dataset, str(write_indices(tmp_path, train=[0, 1], test=[])))
    assert sizes(splits) == [[2, 0, 0]]
    assert [note.rpartition(": ")[2] for note in dataset.notes] == [
        "the valid part is empty",
        "the test part is empty",
    ]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"train": [0, 9]}, "index 9 in train, expected 0 to 3"),
        ({"train": [0], "test": [0]}, "index 0 in both train and test"),
        ({"train": []}, "empty training part"),
    ],
)
def test_index_files_that_do_not_fit_are_refused(tmp_path: Path, parts: dict, message: str) -> None:
    write_indices(tmp_path, **parts)
    with pytest.raises(SplitError, match=message) as caught:
        resolve_splits(graph_data([0, 1, 0, 1]), str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_an_unknown_split_lists_the_forms() -> None:
    with pytest.raises(
        SplitError, match="split randm: no such file or folder; expected auto, offi"
    ):
        resolve_splits(graph_data([0, 1]), "randm")


def test_index_files_may_hold_source_rows(tmp_path: Path) -> None:
    dataset = graph_data([0, 1, 0, 1], rows=np.array([0, 2, 3, 4]))
    fold = resolve_splits(dataset, str(write_indices(tmp_path, train=[0, 2], test=[4]))).folds[0]
    assert fold == Split([0, 1], [], [3])
    assert any("source rows" in note for note in dataset.notes)


def test_the_ten_folds_of_proteins(shared_data: Path) -> None:
    folder = shared_data / "splits" / "dgcnn_10fold" / "PROTEINS"
    splits = resolve_splits(graph_data([0] * 663 + [1] * 450), str(folder))
    assert sizes(splits) == [[891, 111, 111]] * 10
    first = (folder / "10fold_idx" / "test_idx-1.txt").read_text().split()
    assert splits.folds[0].test.tolist() == splits.folds[9].valid.tolist()
    assert splits.folds[0].test.tolist() == [int(row) for row in first]


# --- scaffolds --------------------------------------------------------------------------------


def test_a_scaffold_split_needs_no_seed() -> None:
    pytest.importorskip("rdkit")
    smiles = ["C1CC1", "CC1CC1", "CCC1CC1", "nonsense", "C1CCC1"]
    dataset = graph_data([0.5 * number for number in range(5)], smiles=smiles)
    splits = resolve_splits(dataset, "scaffold:0.6,0.2,0.2")
    assert splits.folds == (Split([0, 1, 2], [4], [3]),)
    assert splits.seed is None
    assert splits.kind == "scaffold:0.6,0.2,0.2"
    assert splits == resolve_splits(dataset, "scaffold:0.6,0.2,0.2", seed=5)
    assert any("nonsense" in note for note in dataset.notes)


def test_made_and_shipped_scaffold_splits_agree_on_bbbp(shared_data: Path) -> None:
    """OGB's files count the readable molecules only, so they fit the csv file with 11 skipped."""
    pytest.importorskip("rdkit")
    from histograph_post.data.molecules import load_smiles

    bbbp = load_smiles(shared_data / "mol" / "BBBP.csv", {"mol_features": "pretrain"})
    shipped = shared_data / "ogb" / "ogbg_molbbbp" / "split" / "scaffold"
    splits = resolve_splits(bbbp, str(shipped))
    assert sizes(splits) == [[1631, 204, 204]]
    assert splits.folds == resolve_splits(bbbp, "scaffold").folds


def test_scaffolds_need_smiles_and_rdkit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SplitError, match="memory has no SMILES"):
        resolve_splits(graph_data([0, 1]), "scaffold")
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[chem\]"):
        resolve_splits(graph_data([0, 1], smiles=["C", "C"]), "scaffold")


def test_many_rows_are_packed_and_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "PACKED_ROWS", 10)
    folds = (
        Split(train=[0, 1, 5, 8], valid=[2, 7], test=[]),
        Split(train=[2], valid=[], test=[0, 8]),
    )
    splits = Splits("files", "graph", 9, None, folds)
    splits.save(tmp_path / "few.json")
    assert splits.to_json()["folds"][0]["train"] == [0, 1, 5, 8]  # 9 rows are named
    more = Splits("files", "graph", 9, None, (*folds, *folds))
    # Rows 0 to 8 of the first fold: 1 1 2 0 | 0 1 0 2 | 1, the first in the lowest bits.
    assert base64.b64decode(more.to_json()["folds"][0]["packed"]) == bytes([0x25, 0x84, 0x01])
    more.save(tmp_path / "many.json")
    assert Splits.load(tmp_path / "many.json") == more
    value = more.to_json()
    value["folds"][1]["packed"] = "AAAA" * 2
    with pytest.raises(SplitError, match="found 6 bytes of packed rows, expected 3"):
        Splits.from_json(value)
    value["folds"][1]["packed"] = "no base64"
    with pytest.raises(SplitError, match="packed rows that are not base64"):
        Splits.from_json(value)
    unsorted = Split(train=[5, 1, 0, 8], valid=[2, 7], test=[])
    kept = Splits("files", "graph", 9, None, (unsorted, *folds))
    assert kept.to_json()["folds"][0]["train"] == [5, 1, 0, 8]
