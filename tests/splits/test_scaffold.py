from __future__ import annotations

import csv
import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from histograph_post.errors import MissingExtraError
from histograph_post.splits.making import murcko_scaffolds, scaffold_parts
from histograph_post.splits.split import to_positions

pytest.importorskip("rdkit")

SHARES = (0.8, 0.1, 0.1)


def read_smiles(path: Path) -> list[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return [row["smiles"] for row in csv.DictReader(file)]


def read_parts(folder: Path) -> list[list[int]]:
    return [
        sorted(np.loadtxt(next(folder.glob(f"{part}.csv*")), dtype=np.int64).tolist())
        for part in ("train", "valid", "test")
    ]


def test_a_scaffold_keeps_rings_linkers_and_chirality(capfd: pytest.CaptureFixture[str]) -> None:
    assert murcko_scaffolds(["CCO", "Cc1ccccc1", "OC1CCCC1Cc1ccccc1 ", "not a molecule"]) == [
        "",
        "c1ccccc1",
        "c1ccc(CC2CCCC2)cc1",
        None,
    ]
    cis, trans = murcko_scaffolds(["C1CC[C@@H]2CCCC[C@@H]2C1", "C1CC[C@H]2CCCC[C@@H]2C1"])
    assert cis != trans
    assert capfd.readouterr() == ("", "")  # RDKit is quiet


def test_whole_groups_fill_the_parts_largest_first() -> None:
    benzenes = ["c1ccccc1", "Cc1ccccc1", "CCc1ccccc1", "CCCc1ccccc1", "Oc1ccccc1", "Nc1ccccc1"]
    smiles = ["C1CC1", *benzenes, "CC1CC1", "C1CCC1", "C1CCCC1"]
    parts, note = scaffold_parts(smiles, (0.6, 0.2, 0.2))
    # Six benzenes, two cyclopropanes, then what stands alone.
    assert [part.tolist() for part in parts] == [[1, 2, 3, 4, 5, 6], [0, 7], [8, 9]]
    assert note == ""


def test_a_molecule_that_cannot_be_read_is_tested_on() -> None:
    smiles = ["C1CC1", "CC1CC1", "CCC1CC1", "nonsense", "C1CCC1"]
    parts, note = scaffold_parts(smiles, (0.6, 0.2, 0.2))
    assert [part.tolist() for part in parts] == [[0, 1, 2], [4], [3]]
    assert "1 molecules cannot be read" in note
    assert "number 3, nonsense" in note


@pytest.mark.parametrize("name", ["molbbbp", "molesol"])
def test_the_split_is_the_one_ogb_ships(shared_data: Path, name: str) -> None:
    folder = shared_data / "ogb" / f"ogbg_{name}"
    parts, note = scaffold_parts(read_smiles(folder / "mapping" / "mol.csv.gz"), SHARES)
    assert [part.tolist() for part in parts] == read_parts(folder / "split" / "scaffold")
    assert note == ""


@pytest.mark.long
def test_the_split_of_tox21(shared_data: Path) -> None:
    smiles = read_smiles(shared_data / "mol" / "tox21.csv")
    derived = read_parts(shared_data / "splits" / "ogb_scaffold_derived" / "tox21")
    (train, valid, test), note = scaffold_parts(smiles, SHARES)
    # The derived files leave out the eight molecules that cannot be read.
    scaffolds = murcko_scaffolds([smiles[row] for row in test])
    readable = [
        r for r, scaffold in zip(test.tolist(), scaffolds, strict=True) if scaffold is not None
    ]
    assert [train.tolist(), valid.tolist(), readable] == derived
    assert len(test) - len(readable) == 8
    assert "8 molecules" in note
    # They hold rows of the csv file; among the readable molecules these become positions.
    rows = np.sort(np.concatenate([train, valid, readable]))
    folds, _ = to_positions([tuple(np.array(part) for part in derived)], rows, where="tox21")
    assert [rows[part].tolist() for part in folds[0]] == derived


def test_without_rdkit_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[chem\]"):
        scaffold_parts(["C"], SHARES)
