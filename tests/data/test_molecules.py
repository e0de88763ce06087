from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from histograph_post.data.dataset import GraphDataset
from histograph_post.data.molecules import load_smiles
from histograph_post.errors import DataError, MissingExtraError

Chem = pytest.importorskip("rdkit.Chem")


def write_csv(folder: Path, *lines: str, name: str = "molecules.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def load_one(folder: Path, smiles: str, features: str) -> GraphDataset:
    return load_smiles(write_csv(folder, "smiles,y", f"{smiles},1"), {"mol_features": features})


def ogb_smiles2graph(monkeypatch: pytest.MonkeyPatch):
    # Importing ogb asks the network for its latest version unless this package is missing.
    monkeypatch.setitem(sys.modules, "outdated", None)
    return pytest.importorskip("ogb.utils.mol").smiles2graph


# --- features ---------------------------------------------------------------------------------

# Chlorine and bromine on a stereocentre beside a trans double bond: every feature has its say.
STEREO = "Cl[C@H](/C=C/C)Br"


def test_ogb_features_of_a_molecule_by_hand(tmp_path: Path) -> None:
    graph = load_one(tmp_path, STEREO, "ogb").graphs[0]
    # atomic number - 1, chirality, degree, charge + 5, hydrogens, radicals, hybridisation,
    # aromatic, in a ring
    assert graph.x.tolist() == [
        [16, 0, 1, 5, 0, 0, 2, 0, 0],
        [5, 2, 4, 5, 1, 0, 2, 0, 0],
        [5, 0, 3, 5, 1, 0, 1, 0, 0],
        [5, 0, 3, 5, 1, 0, 1, 0, 0],
        [5, 0, 4, 5, 3, 0, 2, 0, 0],
        [34, 0, 1, 5, 0, 0, 2, 0, 0],
    ]
    assert graph.edge_index.tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4, 1, 5],
        [1, 0, 2, 1, 3, 2, 4, 3, 5, 1],
    ]
    # type, stereo, conjugated
    single, double = [0, 0, 0], [1, 2, 0]
    assert graph.edge_attr.tolist() == [single] * 4 + [double] * 2 + [single] * 4


def test_pretrain_features_of_a_molecule_by_hand(tmp_path: Path) -> None:
    graph = load_one(tmp_path, STEREO, "pretrain").graphs[0]
    assert graph.x.tolist() == [[16, 0], [5, 2], [5, 0], [5, 0], [5, 0], [34, 0]]
    assert graph.edge_index.tolist() == [
        [0, 1, 1, 2, 2, 3, 3, 4, 1, 5],
        [1, 0, 2, 1, 3, 2, 4, 3, 5, 1],
    ]
    # type; direction 1 for the slashes on both sides of the double bond
    assert graph.edge_attr.tolist() == [
        [0, 0], [0, 0], [0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 1], [0, 0], [0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(("features", "widths"), [("ogb", (9, 3)), ("pretrain", (2, 2))])
def test_an_isolated_atom_has_empty_edges_of_the_right_width(
    tmp_path: Path, features: str, widths: tuple[int, int]
) -> None:
    graph = load_one(tmp_path, "[Na+]", features).graphs[0]
    assert graph.x.shape == (1, widths[0])
    assert graph.edge_index.shape == (2, 0)
    assert graph.edge_attr.shape == (0, widths[1])
    assert {graph[key].dtype for key in ("x", "edge_index", "edge_attr")} == {torch.int64}


# Aromatics, charges, radicals, wildcards, isotopes, salts, metals, ring and bond stereo, big atoms.
AWKWARD = [
    "c1ccccc1O", "CC(=O)[O-].[Na+]", "[CH3]", "*CC*", "[2H]C([2H])[2H]", "C/C=C\\C", "F/C=C/F",
    "N[C@@H](C)C(=O)O", "[Fe+2]", "S(F)(F)(F)(F)(F)F", "P(Cl)(Cl)(Cl)(Cl)Cl", "C#N", "[H][H]",
    "O=[U](=O)([O-])[O-]", "C1CC1", "[O-][N+](=O)c1ccccc1", "[Fe+6]", "[C-]#[O+]", "B", "O->[Cu]",
    "[Xe](F)(F)(F)F", "C[C@H]1CC[C@@H](O)CC1", "CC=CC", "Cl[Pt@SP1](Cl)(N)N",
]  # fmt: skip


def test_ogb_features_equal_the_ogb_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smiles2graph = ogb_smiles2graph(monkeypatch)
    dataset = load_smiles(write_csv(tmp_path, "smiles", *AWKWARD), {})
    assert dataset.smiles == AWKWARD
    for text, graph in zip(AWKWARD, dataset.graphs, strict=True):
        expected = smiles2graph(text)
        assert graph.x.numpy().tolist() == expected["node_feat"].tolist(), text
        assert graph.edge_index.numpy().tolist() == expected["edge_index"].tolist(), text
        assert graph.edge_attr.numpy().tolist() == expected["edge_feat"].tolist(), text


def test_ogb_features_equal_the_files_ogb_ships(shared_data: Path) -> None:
    from histograph_post.data.molecule_sets import load_ogbg

    shipped = load_ogbg("molbbbp", shared_data, {})
    made = load_smiles(shared_data / "mol" / "BBBP.csv", {})
    assert len(made) == len(shipped) == 2039
    assert made.smiles == shipped.smiles
    assert np.array_equal(made.labels(), shipped.labels())
    assert made.target_names == shipped.target_names == ["p_np"]
    for ours, theirs in zip(made.graphs, shipped.graphs, strict=True):
        assert torch.equal(ours.edge_index, theirs.edge_index)
        assert torch.equal(ours.edge_attr, theirs.edge_attr)
        assert torch.equal(ours.x, theirs.x)


@pytest.fixture(scope="module")
def bbbp(shared_data: Path) -> GraphDataset:
    """BBBP in the encoding of pretrain-gnns, which tests leave as it is."""
    return load_smiles(shared_data / "mol" / "BBBP.csv", {"mol_features": "pretrain"})


def test_pretrain_features_equal_a_literal_transcription(bbbp: GraphDataset) -> None:
    """Against the lists and ``index`` calls of pretrain-gnns' ``mol_to_graph_data_obj_simple``."""
    chirality = [
        Chem.ChiralType.CHI_UNSPECIFIED, Chem.ChiralType.CHI_TETRAHEDRAL_CW,
        Chem.ChiralType.CHI_TETRAHEDRAL_CCW, Chem.ChiralType.CHI_OTHER,
    ]  # fmt: skip
    kinds = [
        Chem.BondType.SINGLE, Chem.BondType.DOUBLE, Chem.BondType.TRIPLE, Chem.BondType.AROMATIC,
    ]  # fmt: skip
    directions = [Chem.BondDir.NONE, Chem.BondDir.ENDUPRIGHT, Chem.BondDir.ENDDOWNRIGHT]
    for text, graph in list(zip(bbbp.smiles or [], bbbp.graphs, strict=True))[::10]:
        molecule = Chem.MolFromSmiles(text)
        assert graph.x.tolist() == [
            [list(range(1, 119)).index(atom.GetAtomicNum()), chirality.index(atom.GetChiralTag())]
            for atom in molecule.GetAtoms()
        ]
        edges, attributes = [], []
        for bond in molecule.GetBonds():
            i, j = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
            edges += [[i, j], [j, i]]
            attributes += 2 * [
                [kinds.index(bond.GetBondType()), directions.index(bond.GetBondDir())]
            ]
        assert graph.edge_index.t().tolist() == edges
        assert graph.edge_attr.tolist() == attributes


# --- rows and ids -----------------------------------------------------------------------------


def test_unreadable_rows_are_skipped_and_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path, "smiles,y", "CCO,1", "not a molecule,0", "CC,0", ",1", "c1cc,1")
    dataset = load_smiles(path, {})
    assert dataset.rows is not None
    assert dataset.rows.tolist() == [0, 2]
    assert dataset.ids == ["0", "2"]
    assert dataset.smiles == ["CCO", "CC"]
    assert dataset.labels().tolist() == [[1.0], [0.0]]
    note = next(note for note in dataset.notes if "without a graph" in note)
    assert "3 of 5 rows" in note
    assert "row 1 not a molecule" in note
    assert "row 3 (blank)" in note
    assert "row 4 c1cc" in note
    assert capfd.readouterr() == ("", "")  # RDKit is quiet


def test_what_the_pretrain_features_cannot_express_is_skipped_and_named(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "smiles,y", "CCO,1", "*CC,0", "O->[Cu],1")
    assert len(load_smiles(path, {"mol_features": "ogb"})) == 3
    dataset = load_smiles(path, {"mol_features": "pretrain"})
    assert dataset.ids == ["0"]
    note = next(note for note in dataset.notes if "without a graph" in note)
    assert "row 1 *CC (no pretrain feature for atomic number 0)" in note
    assert "row 2 O->[Cu] (no pretrain feature for DATIVE)" in note


def test_a_file_without_a_readable_molecule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no molecule RDKit can read in column 'smiles'"):
        load_smiles(write_csv(tmp_path, "smiles,y", "nonsense,1"), {})


def test_the_notes_on_bbbp_count_its_eleven_unreadable_rows(bbbp: GraphDataset) -> None:
    note = next(note for note in bbbp.notes if note.startswith("11 of 2050 rows without a graph"))
    assert bbbp.rows is not None
    unread = set(range(2050)) - set(bbbp.rows.tolist())
    assert len(unread) == 11
    assert all(f"row {row} " in note for row in unread)


def test_ids_come_from_a_naming_column_only_while_unique(tmp_path: Path) -> None:
    unique = write_csv(tmp_path, "Mol-ID,smiles,y", "a,C,1", "b,CC,0")
    repeated = write_csv(tmp_path, "Mol-ID,smiles,y", "a,C,1", "a,CC,0", name="repeated.csv")
    blank = write_csv(tmp_path, "name,smiles,y", "a,C,1", ",CC,0", name="blank.csv")
    assert load_smiles(unique, {}).ids == ["a", "b"]
    assert load_smiles(repeated, {}).ids == ["0", "1"]
    assert load_smiles(blank, {}).ids == ["0", "1"]


# --- targets ----------------------------------------------------------------------------------


def test_the_only_column_of_numbers_is_the_target(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "num,text,value,smiles", "1,a,0.5,C", "2,b,,CC", "3,c,-2,CCC")
    dataset = load_smiles(path, {})
    assert dataset.target_names == ["value"]
    np.testing.assert_array_equal(dataset.labels(), [[0.5], [np.nan], [-2.0]])
    assert any("value" in note and "guessed" in note for note in dataset.notes)


@pytest.mark.parametrize("rows", [100, pytest.param(7831, marks=pytest.mark.long)])
def test_several_binary_columns_are_all_targets_with_blanks_missing(
    shared_data: Path, tmp_path: Path, rows: int
) -> None:
    lines = (shared_data / "mol" / "tox21.csv").read_text().splitlines()
    table = write_csv(tmp_path, *lines[: rows + 1])
    dataset = load_smiles(table, {"mol_features": "pretrain"})
    labels = dataset.labels()
    assert labels.shape == (7823 if rows == 7831 else rows, 12)
    assert dataset.ids[0] == "TOX3021"
    # The first row of the file, blanks included.
    first = [0, 0, 1, np.nan, np.nan, 0, 0, 1, 0, 0, 0, 0]
    np.testing.assert_array_equal(labels[0], first)


def test_targets_beside_descriptors_must_be_chosen(shared_data: Path) -> None:
    path = shared_data / "mol" / "ESOL_delaney-processed.csv"
    with pytest.raises(DataError, match="8 columns that could be targets") as caught:
        load_smiles(path, {})
    assert "measured log solubility in mols per litre" in caught.value.details
    chosen = load_smiles(path, {"targets": "measured*"})
    assert chosen.target_names == ["measured log solubility in mols per litre"]
    assert chosen.labels()[0, 0] == pytest.approx(-0.77)
    assert chosen.ids[0] == "Amigdalin"


def test_targets_by_name_glob_and_list_keep_the_order_asked_for(tmp_path: Path) -> None:
    path = write_csv(tmp_path, 'a1,"b,c",a2,text,smiles', "1,2,3,x,C")
    assert load_smiles(path, {"targets": "a2,a*"}).target_names == ["a2", "a1"]
    assert load_smiles(path, {"targets": "b,c"}).target_names == ["b,c"]
    assert load_smiles(path, {"targets": ["b,c", "a1"]}).target_names == ["b,c", "a1"]
    assert load_smiles(path, {"targets": "*"}).labels().tolist() == [[1, 2, 3]]


def test_no_targets_on_request_or_where_there_are_none(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path, "smiles,y", "C,1", name="labelled.csv")
    bare = write_csv(tmp_path, "smiles,text", "C,x", name="bare.csv")
    assert load_smiles(labelled, {"targets": ""}).labels().shape == (1, 0)
    dataset = load_smiles(bare, {})
    assert dataset.labels().shape == (1, 0)
    assert any("no labels" in note for note in dataset.notes)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [("z", "'z' matches no column"), ("text", "'text' has cells that are not numbers")],
)
def test_a_target_that_cannot_be_used_is_named(tmp_path: Path, wanted: str, message: str) -> None:
    path = write_csv(tmp_path, "smiles,y,text", "C,1,x")
    with pytest.raises(DataError, match=message):
        load_smiles(path, {"targets": wanted})


def test_classes_are_whole_numbers_and_everything_else_is_float(tmp_path: Path) -> None:
    whole = write_csv(tmp_path, "smiles,y", "C,0", "CC,1")
    gap = write_csv(tmp_path, "smiles,y", "C,0", "CC,", name="gap.csv")
    assert load_smiles(whole, {}).graphs[0].y.dtype == torch.int64
    assert load_smiles(gap, {}).graphs[0].y.dtype == torch.float32


def test_the_graphs_batch(tmp_path: Path) -> None:
    from torch_geometric.data import Batch

    path = write_csv(tmp_path, "smiles,a,b", "CCO,1,", "[Na+],,0")
    batch = Batch.from_data_list(load_smiles(path, {}).graphs)
    assert batch.x.shape == (4, 9)
    assert batch.y.shape == (2, 2)


# --- what is refused --------------------------------------------------------------------------


def test_the_smiles_column_by_name(tmp_path: Path) -> None:
    path = write_csv(tmp_path, "structure,y", "CCO,1")
    with pytest.raises(DataError, match=r"no columns called 'smiles'.*smiles=COLUMN"):
        load_smiles(path, {})
    assert load_smiles(path, {"smiles": "Structure"}).smiles == ["CCO"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {"feature": "ogb"},
            "unknown data argument 'feature'.*mol_features, smiles, stream, targets",
        ),
        ({"mol_features": "morgan"}, "mol_features=morgan, expected one of ogb, pretrain"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, args: dict[str, str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_smiles(write_csv(tmp_path, "smiles,y", "C,1"), args)


def test_without_rdkit_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_csv(tmp_path, "smiles,y", "C,1")
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[chem\]"):
        load_smiles(path, {})
