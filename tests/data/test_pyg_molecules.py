"""Molecules of PyG: its features, its MoleculeNet folders, and graphs that carry a SMILES."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from histograph_post.data import DataSpec, from_graphs, load_data
from histograph_post.data.spec import Reading
from histograph_post.errors import DataError
from histograph_post.splits import resolve_splits

pytest.importorskip("rdkit")

from torch_geometric.datasets import MoleculeNet
from torch_geometric.utils import from_smiles

SMILES = (
    "CC(=O)Oc1ccccc1C(=O)O", "C", "F/C=C\\F", "C[C@H](N)C(=O)[O-]", "[Na+].[Cl-]", "*CC",
    "O->[Cu]", "c1ccc2ccccc2c1", "[CH3]", "C1CC1C#N", "N[C@@H](Cc1ccccc1)C(=O)O",
)  # fmt: skip


def write_bbbp(root: Path) -> Path:
    """A few rows as they are in PyG's folder of BBBP; one cannot be read."""
    raw = root / "bbbp" / "raw"
    raw.mkdir(parents=True)
    rows = [f"{n},name {n},{n % 2},{smiles}" for n, smiles in enumerate((*SMILES, "C1CC"), 1)]
    (raw / "BBBP.csv").write_text("\n".join(["num,name,p_np,smiles", *rows]) + "\n")
    return root


def test_pyg_features_are_those_of_pyg(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(["smiles", *SMILES]))
    dataset = load_data(f"smiles:{tmp_path / 'a.csv'}", args={"mol_features": "pyg"})
    assert len(dataset) == len(SMILES)
    for graph, smiles in zip(dataset.graphs, SMILES, strict=True):
        expected = from_smiles(smiles)
        for name in ("x", "edge_index", "edge_attr"):
            assert torch.equal(graph[name], expected[name]), (smiles, name)


def test_moleculenet_is_read_as_pyg_reads_it(tmp_path: Path) -> None:
    root = write_bbbp(tmp_path)
    dataset = load_data("moleculenet:BBBP", root=root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the molecule that it skips
        theirs = MoleculeNet(str(root), "BBBP")
    assert len(dataset) == len(theirs) == len(SMILES)
    assert dataset.target_names == ["p_np"]
    assert dataset.ids[0] == "name 1"
    assert dataset.smiles == [graph.smiles for graph in theirs]
    assert np.array_equal(dataset.labels()[:, 0], [float(graph.y) for graph in theirs])
    for ours, graph in zip(dataset.graphs, theirs, strict=True):
        assert torch.equal(ours.x, graph.x)
        assert torch.equal(ours.edge_index, graph.edge_index)
        assert torch.equal(ours.edge_attr, graph.edge_attr)
    again = load_data("moleculenet:bbbp", root=root, args={"mol_features": "ogb"})
    assert again.graphs[0].x.shape == (13, 9)


def test_jobs_read_a_set_of_moleculenet_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("histograph_post.data.streaming.BLOCK_ROWS", 3)
    root, how = write_bbbp(tmp_path), Reading(workers=0, sampled=True)
    sample = load_data("moleculenet:BBBP", root=root, args={"stream": True}, reading=how)
    assert sample.source is not None
    part, whole = sample.source.read([range(4, 5)]), load_data("moleculenet:BBBP", root=root)
    assert part.rows is not None
    assert part.rows.tolist() == [3, 4, 5]  # the block of row 4
    assert list(part.ids) == list(whole.ids[3:6])
    assert part.labels().tolist() == whole.labels()[3:6].tolist()
    assert all(map(torch.equal, *([graph.x for graph in each] for each in (part, whole[3:6]))))


def test_sets_of_moleculenet_with_several_targets(shared_data: Path, tmp_path: Path) -> None:
    lines = (shared_data / "mol" / "tox21.csv").read_text().splitlines()[:100]
    (tmp_path / "tox21.csv").write_text("\n".join(lines))
    tox = load_data("moleculenet:Tox21", root=tmp_path, args={"mol_features": "ogb"})
    assert len(tox) == 99
    assert len(tox.target_names) == 12
    assert tox.target_names[0] == "NR-AR"
    assert np.isnan(tox.labels()).any()


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("moleculenet:BBB", "no set of MoleculeNet, expected one of ESOL, FreeSolv"),
        ("moleculenet:ESOL", "esol/raw/delaney-processed.csv not found in"),
    ],
)
def test_a_set_that_is_not_there_is_refused(spec: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=expected):
        load_data(spec, root=tmp_path)


def test_graphs_that_carry_a_smiles_are_molecules() -> None:
    graphs = [from_smiles(smiles) for smiles in SMILES if smiles != "*CC"]
    for number, graph in enumerate(graphs):
        graph.y, graph.name = torch.tensor([number % 2]), f"compound {number}"
    dataset = from_graphs(graphs)
    assert dataset.smiles == [graph.smiles for graph in graphs]
    assert dataset.ids == [f"compound {number}" for number in range(len(graphs))]
    assert not dataset.notes
    parts = resolve_splits(dataset, "scaffold:0.5,0.25,0.25").folds[0]
    assert len(parts.train) + len(parts.valid) + len(parts.test) == len(graphs)


def test_names_that_are_shared_or_missing_are_not_ids(tmp_path: Path) -> None:
    graphs = [from_smiles(smiles) for smiles in ("CC", "CCO", "CCN")]
    for graph in graphs:
        graph.name = "the same"
    del graphs[1]["smiles"]
    torch.save(graphs, tmp_path / "graphs.pt")
    dataset = DataSpec(str(tmp_path / "graphs.pt")).load()
    assert dataset.ids == ["0", "1", "2"]
    assert dataset.smiles is None


def test_ogb_sets_are_encoded_again_for_other_features(shared_data: Path) -> None:
    shipped = load_data("ogbg:molesol", root=shared_data)
    again = load_data("ogbg:molesol", root=shared_data, args={"mol_features": "pretrain"})
    assert again.official == shipped.official
    assert np.array_equal(again.labels(), shipped.labels())
    assert again.graphs[0].x.shape[1] == 2
    # The atomic number is in both: the order of the atoms is the same.
    one, other = (torch.cat([graph.x[:, 0] for graph in data.graphs]) for data in (shipped, again))
    assert torch.equal(one, other)


def test_graphs_of_other_kinds_stay_as_they_are() -> None:
    graph = Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 0, dtype=torch.int64), smiles=3)
    assert from_graphs([graph]).smiles is None
