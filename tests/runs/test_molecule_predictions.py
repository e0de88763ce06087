"""Predictions of a table of molecules: its rows, its columns, its order, and why one has none."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import histograph_post as hg
from histograph_post.data.tables import Table
from histograph_post.errors import DataError
from histograph_post.models import build_model
from histograph_post.runs.predictions import Predictions
from histograph_post.tasks import Task

from ..helpers import histograph

pytest.importorskip("rdkit")

#: Of OGB's features of an atom.
CATEGORIES = [119, 5, 12, 12, 10, 6, 6, 2, 2]


def type_words(*words: object) -> str:
    result = histograph(*words)
    assert result.exit_code == 0, result.output
    return result.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of two seeds that tell alcohols from amines."""
    folder = tmp_path_factory.mktemp("alcohols")
    lines = [f"C1{'C' * (1 + n // 2)}C1{'ON'[n % 2]},{n % 2}" for n in range(30)]
    (folder / "a.csv").write_text("\n".join(["structure,amine", *lines]))
    torch.manual_seed(0)
    model = build_model("gin", {"hidden": 8, "num_layers": 2, "in_dim": CATEGORIES}, out_dim=1)
    torch.save(model.state_dict(), folder / "gin.pt")
    data = ("--data", f"smiles:{folder / 'a.csv'}", "--data-args", "smiles=structure")
    weights = ("--model", "gin", "--checkpoint", folder / "gin.pt")
    type_words("cache", *weights, *data, "-o", folder / "a.cache")
    known = hg.Cache.open(folder / "a.cache").molecules()
    assert known == [(line.split(",")[0], "") for line in lines]
    quickly = ("--epochs", 2, "--seeds", "0-1", "--head", "mean", "--split", "scaffold")
    type_words("train-head", folder / "a.cache", *quickly, "-o", folder / "run")
    return folder / "run"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_of_the_table_stays_with_its_columns_in_its_order(
    run: Path, tmp_path: Path
) -> None:
    table = tmp_path / "new.csv"
    table.write_text(
        "name,structure,price,stock,status\n"
        'aspirin,CC(=O)Oc1ccccc1C(=O)O,1.5,3,new\n"a, b",C1CC,,,new\nnothing,,2,1,old\n'
        "b,CCN,2,1,old\nb,CCO,2,1,old\nb,CCN,2,1,old\n"
    )
    out = tmp_path / "out.csv"
    type_words("predict", run, "--data", f"smiles:{table}", "-o", out)
    given, found = rows_of(table), rows_of(out)
    assert list(found[0]) == [*given[0], "prediction", "probability", "spread", "status_2"]
    assert [{name: row[name] for name in given[0]} for row in found] == given
    assert [row["status_2"] for row in found] == [
        *("ok", "RDKit cannot read the SMILES", "no SMILES", "ok", "ok", "ok")
    ]
    assert [row["prediction"] == "" for row in found] == [False, True, True, False, False, False]
    assert found[3]["probability"] == found[5]["probability"]
    for row in found:
        if row["prediction"]:
            assert row["prediction"] == str(int(float(row["probability"]) > 0.5))
            assert float(row["spread"]) >= 0


def test_labels_of_the_run_are_scored_and_other_numbers_are_not(run: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("structure,weight,amine\nCCCN,1.5,1\nCCCO,2.5,0\nCCO,3.5,\n")
    found = hg.predict(run, f"smiles:{table}")
    assert found.labels is not None
    assert np.array_equal(found.labels[:2, 0], [1, 0])
    assert "accuracy" in found.scores
    table.write_text("structure,weight,size\nCCCN,1.5,1\nCCCO,2.5,0\n")
    assert hg.predict(run, f"smiles:{table}").labels is None


def test_a_head_refuses_features_of_another_kind(run: Path, tmp_path: Path) -> None:
    table = tmp_path / "new.csv"
    table.write_text("structure\nCCCN\n")
    with pytest.raises(DataError, match="found mol_features=pyg, expected mol_features=ogb, which"):
        hg.predict(run, f"smiles:{table}", data_args={"mol_features": "pyg"})
    raw = tmp_path / "bbbp" / "raw"
    raw.mkdir(parents=True)
    (raw / "BBBP.csv").write_text("num,name,p_np,smiles\n1,a,1,CCCN\n2,b,0,CCO\n")
    # PyG's features by default, but those of the head where there is one.
    one = hg.predict(run, "moleculenet:BBBP", data_root=tmp_path)
    other = hg.predict(run, f"smiles:{table}")
    np.testing.assert_allclose(one.outputs[0], other.outputs[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("task", "outputs", "expected"),
    [
        (
            Task("multiclass", "graph", 1, "accuracy", (0.0, 1.0, 2.0)),
            [[0.0, 0.0, 40.0]],
            ["prediction", "probability", "probability_0", "probability_1", "probability_2"],
        ),
        (
            Task("multilabel", "graph", 2, "roc_auc"),
            [[-40.0, 40.0]],
            ["prediction_a", "probability_a", "prediction_b", "probability_b"],
        ),
        (Task("regression", "graph", 2, "rmse"), [[1.0, 2.0]], ["prediction_a", "prediction_b"]),
        (Task("regression", "graph", 1, "rmse"), [[1.5]], ["prediction"]),
    ],
)
def test_the_columns_of_other_tasks(
    task: Task, outputs: list[list[float]], expected: Sequence[str]
) -> None:
    names = ["a", "b"] if len(outputs[0]) == 2 else ["a"]
    found = Predictions(
        task=task,
        target_names=names,
        ids=["x"],
        rows=np.array([1]),
        outputs=np.array(outputs),
        table=Table(Path(), ("smiles",), (("", "C"),), {0: "no SMILES"}),
    )
    header, missing, row = csv.reader(io.StringIO(found.to_csv()))
    several = task.kind == "multilabel" or len(expected) == 2  # of values, a column each
    spreads = ["spread_a", "spread_b"] if several else ["spread"]  # empty: of a single head
    assert header == ["smiles", *expected, *spreads, "status"]
    assert missing == [""] * (len(header) - 1) + ["no SMILES"]
    assert row[-1] == "ok"
    cells = dict(zip(header, row, strict=True))
    if task.kind == "multiclass":
        assert (cells["prediction"], cells["probability"]) == ("2", "1")
    if task.kind == "multilabel":
        assert (cells["prediction_a"], cells["prediction_b"]) == ("0", "1")
    if task.kind == "regression":
        assert cells[expected[0]] == ("1" if len(names) == 2 else "1.5")


def test_a_file_of_many_rows_is_written_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.array([0, 1, 3, 4, 6])  # 2 and 5 have no graph
    found = Predictions(
        task=Task("binary", "graph", 1, "roc_auc", (0.0, 1.0)),
        target_names=["a"],
        ids=[f"m{row}" for row in rows],
        rows=rows,
        outputs=np.linspace(-2, 2, 5)[:, None],
        spread=np.linspace(0, 1, 5)[:, None],
        table=Table(Path(), ("n",), ([str(row) for row in range(7)],), {2: "no SMILES"}),
    )
    expected = [found.to_csv(), replace(found, table=None).to_csv()]
    monkeypatch.setattr("histograph_post.runs.predictions._ROWS_AT_ONCE", 2)
    assert [found.to_csv(), replace(found, table=None).to_csv()] == expected
    assert len(list(found.csv_parts())) == 4
    lines = [line.split(",") for line in expected[0].splitlines()]
    assert lines[1] == ["0", "0", "0.119203", "0", "ok"]  # 1 / (1 + e^2)
    assert [line[-1] for line in lines[1:]] == [
        "ok",
        "ok",
        "no SMILES",
        "ok",
        "ok",
        "not predicted",
        "ok",
    ]
