"""What a notebook sees: short texts, bars, frames, graphs by their place, plain keywords."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

import histograph_post as hg
from histograph_post.errors import MissingExtraError

from ..helpers import make_model

QUICK = {"dim": 8, "seeds": [0], "epochs": 1, "jobs": 1}


@pytest.fixture(scope="module")
def run(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> hg.Run:
    return hg.train_head(demo_cache, tmp_path_factory.mktemp("run") / "r", heads=2, **QUICK)


@pytest.fixture(scope="module")
def predictions(run: hg.Run):
    data = hg.load_data("demo:", args={"num_graphs": 20})
    return hg.predict(run, data, model=make_model(), device="cpu")


def test_how_to_train_can_be_given_word_by_word(run: hg.Run, demo_cache: Path, tmp_path) -> None:
    assert run.plan["training"]["epochs"] == 1
    assert {fit["epochs"] for fit in run.results["fits"]} == {1}
    both = hg.train_head(
        demo_cache, tmp_path / "b", training=hg.TrainingOptions(batch_size=8), head="mean", **QUICK
    )
    assert (both.plan["training"]["batch_size"], both.plan["training"]["epochs"]) == (8, 1)


def test_texts_are_short(run: hg.Run, predictions) -> None:
    score = run.results["readouts"]["histograph"]["test"]["mean"]
    assert repr(run) == f"Run({str(run.folder)!r}, histograph, test accuracy {score:.4f})"
    assert (
        repr(predictions)
        == f"Predictions(20 graphs, accuracy {predictions.scores['accuracy']:.4f})"
    )
    assert len(repr(run.saved_head)) < 200
    assert repr(hg.Run(Path("nowhere"))) == "Run('nowhere')"


def test_results_and_predictions_are_frames(run: hg.Run, predictions) -> None:
    pytest.importorskip("pandas")
    frame = run.to_frame()
    readouts = run.results["readouts"]
    assert set(frame.index) == set(readouts)
    assert frame.loc["histograph", "test"] == readouts["histograph"]["test"]["mean"]
    assert len(run.to_frame(fits=True)) == len(run.results["fits"])
    said = predictions.to_frame()
    assert list(said.index) == list(predictions.ids)
    assert said["p_1"].to_numpy() == pytest.approx(predictions.probabilities[:, 0], rel=1e-5)


def test_without_pandas_the_extra_is_named(run: hg.Run, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"histograph-post\[pandas\]"):
        run.to_frame()


def test_a_notebook_shows_bars_and_nothing_else_does(
    demo_cache: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    given = {"head": "concat", **QUICK}  # solved, so without epochs
    hg.train_head(demo_cache, tmp_path / "quiet", **given)
    assert capsys.readouterr().err == ""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    hg.train_head(demo_cache, tmp_path / "shown", **given)
    assert "training: 100%" in capsys.readouterr().err


def test_graphs_are_found_by_their_place() -> None:
    data = hg.load_data("demo:", args={"num_graphs": 10})
    assert data[3] is data.graphs[3]
    assert data[-1] is data.graphs[-1]
    part = data[2:6]
    assert (len(part), part.ids) == (4, data.ids[2:6])
    assert list(part.rows) == [2, 3, 4, 5]
    assert data[[7, 1]].graphs == [data.graphs[7], data.graphs[1]]
    assert list(data) == data.graphs
    with pytest.raises(IndexError):
        data[10]
