"""`histograph predict` as a user and a script see it."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

import histograph_post as hg
from histograph_post.errors import OutputExistsError
from histograph_post.runs.run import Run

from ..helpers import histograph
from .conftest import hashes, other_checkpoint


@pytest.fixture
def command(folder: Path) -> Callable[..., Result]:
    def run(out: Path, *more: object) -> Result:
        demo = ("--data", "demo:", "--data-args", "num_graphs=20", "--data-args", "seed=5")
        return histograph("predict", folder / "run", *demo, "-o", out, *more)

    return run


def test_command_writes_a_csv_and_shows_the_scores(
    command: Callable[..., Result], run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "predictions.csv"
    result = command(out)
    assert result.exit_code == 0, result.output
    assert "20 graphs predicted" in result.stdout
    assert "accuracy" in result.stdout
    assert f"next: less {out}" in result.stdout
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    graphs = hg.load_data("demo:", args={"num_graphs": 20, "seed": 5})
    expected = hg.predict(run, graphs)
    assert [row["id"] for row in rows] == list(expected.ids)
    np.testing.assert_allclose(
        [float(row["p_1"]) for row in rows], expected.probabilities[:, 0], rtol=1e-5
    )
    assert [float(row["label_y"]) for row in rows] == graphs.labels()[:, 0].tolist()
    again = histograph(
        "predict",
        run.folder,
        "--config",
        tmp_path / "new" / "predictions.csv.config.toml",
        "-o",
        tmp_path / "again.csv",
    )
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again.csv").read_bytes() == out.read_bytes()


def test_command_overwrites_only_when_told(
    command: Callable[..., Result], run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "predictions.csv"
    out.write_text("years of work")
    result = command(out)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "--overwrite" in result.stderr
    assert out.read_text() == "years of work"
    assert command(out, "--overwrite").exit_code == 0
    assert out.read_text().startswith("id,class,p_1")
    with pytest.raises(OutputExistsError, match="found a folder"):
        hg.predict(run, "demo:", tmp_path, overwrite=True)


def test_command_prints_one_json_object(command: Callable[..., Result], tmp_path: Path) -> None:
    result = command(tmp_path / "predictions.csv", "--json")
    found = json.loads(result.stdout)
    assert found["rows"] == 20
    assert found["task"]["kind"] == "binary"
    assert 0 <= found["scores"]["accuracy"] <= 1


def test_command_refuses_another_backbone_in_one_line(
    command: Callable[..., Result], tmp_path: Path
) -> None:
    out = tmp_path / "predictions.csv"
    result = command(out, "--checkpoint", other_checkpoint(tmp_path))
    assert result.exit_code == 1
    assert len(hashes(result.stderr)) == 2
    assert len(result.stderr.splitlines()) == 1
    assert not out.exists()
