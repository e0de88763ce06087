"""A run's head on new graphs gives the numbers it gave in training, for any model and level."""

from __future__ import annotations

import csv
import inspect
import json
from itertools import compress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, global_mean_pool

import histograph_post as hg
from histograph_post.errors import DataError, ModelError, NotFoundError
from histograph_post.runs.predictions import Predictions
from histograph_post.runs.run import Run

from ..helpers import NUM_GRAPHS, NodeModel, demo_graphs, histograph, make_model, node_labelled
from .conftest import SHORT


def write_source(model: type[nn.Module], path: Path) -> None:
    """Write a model of this file into a file of its own, as a user has it."""
    imports = (
        "from torch import Tensor, nn\nfrom torch_geometric.nn import GCNConv, global_mean_pool"
    )
    path.write_text(f"{imports}\n\n\n{inspect.getsource(model)}")


def stored(run: Run, *columns: str) -> dict[str, list[float]]:
    """Return the run's own predictions for the test rows of the fold it chose."""
    chosen = json.loads((run.folder / "head.json").read_text())
    with (run.folder / "predictions.csv").open(newline="") as file:
        return {
            row["id"]: [float(row[column]) for column in columns]
            for row in csv.DictReader(file)
            if row["fold"] == str(chosen["fold"])
        }


def predict_in_fold(run: Run, graphs: list[Data]) -> Predictions:
    """Predict with those heads of the run that were trained on the fold it chose."""
    predictor = hg.load(run)
    own = [member.fold == run.chosen[0] for member in run.saved_head.members]
    predictor.heads.members = nn.ModuleList(compress(predictor.heads.members, own))
    return predictor.predict(graphs)


def assert_stored(run: Run, found: Predictions, *columns: str) -> None:
    expected = stored(run, *columns)
    assert len(expected) >= 5
    place = {name: at for at, name in enumerate(found.ids)}
    values = found.probabilities[[place[name] for name in expected]]
    np.testing.assert_allclose(values, list(expected.values()), rtol=1e-4, atol=1e-5)


def test_predictions_are_those_the_run_stored(run: Run) -> None:
    assert_stored(run, predict_in_fold(run, demo_graphs()), "p_1")
    found = hg.predict(run, demo_graphs())
    assert found.classes is not None
    assert np.array_equal(found.classes, (found.outputs[:, 0] > 0).astype(float))
    assert any("training rows" in note for note in found.notes)
    fewer = hg.predict(run, demo_graphs()[1:])
    assert not any("training rows" in note for note in fewer.notes)


@pytest.mark.parametrize(
    ("head", "standardize"),
    [("mean", True), ("concat", False), ("probe", True), ("jk-lstm", True), ("topkpool", False)],
)
def test_every_kind_of_head_predicts_what_its_run_stored(
    folder: Path, tmp_path: Path, head: str, standardize: bool
) -> None:
    run = hg.train_head(
        folder / "demo.cache",
        tmp_path / "run",
        head=head,
        dim=8,
        standardize=standardize,
        training=SHORT,
    )
    assert_stored(run, predict_in_fold(run, demo_graphs()), "p_1")


def test_head_that_leaves_standardising_to_the_run(folder: Path, tmp_path: Path) -> None:
    head = {"dim": 8, "standardize": False}
    run = hg.train_head(folder / "demo.cache", tmp_path / "run", head_options=head, training=SHORT)
    assert_stored(run, predict_in_fold(run, demo_graphs()), "p_1")


class MixedWidths(nn.Module):
    """A user's own model; its constructor insists on the number of features."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = GCNConv(in_channels, 6)
        self.second = GCNConv(6, 9)
        self.classifier = nn.Linear(9, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.classifier(global_mean_pool(x, batch))


def test_model_in_memory_with_layers_of_different_widths(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MixedWidths(4, 1)
    hg.cache(model, demo_graphs(), tmp_path / "a.cache")
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert_stored(run, hg.predict(run, demo_graphs(), model=model), "p_1")
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(ModelError, match=r"handed over in memory.*model="):
        hg.load(run)


def test_model_of_a_users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_source(MixedWidths, tmp_path / "my_model.py")
    torch.manual_seed(0)
    torch.save({"state_dict": MixedWidths(4, 1).state_dict()}, "model.pt")
    demo = ("--data", "demo:", "--data-args", f"num_graphs={NUM_GRAPHS}")
    model = ("--model", "my_model.py:MixedWidths", "--checkpoint", "model.pt")
    assert histograph("cache", *model, *demo, "-o", "a.cache").exit_code == 0
    run = hg.train_head("a.cache", "run", dim=8, training=SHORT)
    assert_stored(run, hg.predict("run", demo_graphs(), model="my_model.py:MixedWidths"), "p_1")
    predictor = hg.load("run", model="my_model.py:MixedWidths")  # sizes are those of the cache
    graph = demo_graphs()[0]
    assert predictor(graph).shape == (1, 1)
    with pytest.raises(ModelError, match=r"'my_model\.py:MixedWidths', which is code.*--model"):
        hg.load("run")
    # Somewhere else the checkpoint is found through the cache; code is not looked for.
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(NotFoundError, match="my_model"):
        hg.load("../run", model="my_model.py:MixedWidths")
    moved = hg.load("../run", model="../my_model.py:MixedWidths", in_dim=4)
    torch.testing.assert_close(moved(graph), predictor(graph))


def test_regression_values_are_in_the_units_of_the_labels(tmp_path: Path) -> None:
    graphs = demo_graphs(60)
    for graph in graphs:
        graph.y = torch.tensor([5000.0 + 30.5 * graph.num_nodes])
    model = make_model()
    hg.cache(model, graphs, tmp_path / "a.cache", splits="random")
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    found = hg.predict(run, graphs, model=model)
    assert found.task.kind == "regression"
    assert_stored(run, found, "y")
    assert 5000 < found.outputs.mean() < 7000
    assert found.classes is None
    errors = found.outputs[:, 0] - [float(graph.y) for graph in graphs]
    assert found.scores["rmse"] == pytest.approx(np.sqrt(np.mean(errors**2)), rel=1e-5)
    with torch.no_grad():
        alone = hg.load(run, model=model)(graphs[7])
    np.testing.assert_allclose(alone.numpy(), found.outputs[7:8], rtol=1e-5)


def test_node_level_run(tmp_path: Path) -> None:
    graphs = node_labelled(6)
    torch.manual_seed(0)
    model = NodeModel()
    hg.cache(model, graphs, tmp_path / "a.cache", splits="random")
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    found = hg.predict(run, graphs, model=model)
    assert len(found) == sum(graph.num_nodes for graph in graphs)
    assert found.ids[graphs[0].num_nodes + 2] == "1:2"
    assert found.rows[graphs[0].num_nodes] == 1
    assert_stored(run, found, "p_0", "p_1", "p_2")
    np.testing.assert_allclose(found.probabilities.sum(axis=1), 1)
    # Without labels nothing says that these are node-level data, but the run does.
    bare = [Data(x=graph.x, edge_index=graph.edge_index) for graph in graphs]
    unlabelled = hg.predict(run, bare, model=model)
    assert np.array_equal(unlabelled.outputs, found.outputs)
    assert unlabelled.ids == found.ids
    assert unlabelled.labels is None


def test_link_level_run(tmp_path: Path) -> None:
    write_source(NodeModel, tmp_path / "node_model.py")
    torch.manual_seed(0)
    torch.save(NodeModel().state_dict(), tmp_path / "model.pt")
    data = ("--data", "demo:", "--data-args", "num_graphs=8", "--data-args", "level=link")
    model = (
        "--model",
        f"{tmp_path}/node_model.py:NodeModel",
        "--checkpoint",
        tmp_path / "model.pt",
    )
    result = histograph("cache", *model, *data, "-o", tmp_path / "a.cache")
    assert result.exit_code == 0, result.output
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    # level=link comes from the run, and with it the same pairs to score.
    code = f"{tmp_path}/node_model.py:NodeModel"
    found = hg.predict(run, "demo:", data_args={"num_graphs": 8}, node_budget=50, model=code)
    assert found.task.level == "link"
    assert_stored(run, found, "p_1")
    with pytest.raises(DataError, match="edge_label_index"):
        hg.predict(run, demo_graphs(8), model=code)


class Mixing(nn.Module):
    """Forgets `batch`: every graph sees the mean of all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index)
        return self.second(x - x.mean(dim=0), edge_index)


def test_backbone_that_mixes_graphs_predicts_one_at_a_time(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Mixing()
    hg.cache(model, demo_graphs(), tmp_path / "a.cache", node_budget=1)
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    found = hg.predict(run, demo_graphs(), model=model)
    assert any("one at a time" in note for note in found.notes)
    assert_stored(run, found, "p_1")
