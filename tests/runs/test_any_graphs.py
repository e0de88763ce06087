"""Prediction on whatever graphs a user has: alone, in batches, unlabelled, broken."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch_geometric.data import Batch, Data

import histograph_post as hg
from histograph_post.errors import ConfigError, DataError
from histograph_post.models import build_model
from histograph_post.runs.run import Run

from ..helpers import NUM_GRAPHS, demo_graphs, histograph
from .conftest import SHORT


def test_graph_alone_and_in_any_batch_predicts_the_same(run: Run) -> None:
    graphs = demo_graphs()
    predictor = hg.load(run)
    together = predictor.predict(graphs)
    with torch.no_grad():
        for at in (0, 11, NUM_GRAPHS - 1):
            alone = predictor(Batch.from_data_list([graphs[at]])).numpy()
            np.testing.assert_allclose(alone, together.outputs[at : at + 1], rtol=1e-4, atol=1e-5)
    for budget in (1, 100):
        cut = predictor.predict(graphs, node_budget=budget)
        np.testing.assert_allclose(cut.outputs, together.outputs, rtol=1e-4, atol=1e-5)
    backwards = predictor.predict(graphs[::-1])
    np.testing.assert_allclose(backwards.outputs[::-1], together.outputs, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="node_budget"):
        predictor.predict(graphs, node_budget=0)


def test_unlabelled_graphs(run: Run, tmp_path: Path) -> None:
    graphs = demo_graphs()
    labelled = hg.predict(run, graphs, tmp_path / "labelled.csv")
    bare = [Data(x=graph.x, edge_index=graph.edge_index) for graph in graphs]
    unlabelled = hg.predict(run, bare, tmp_path / "unlabelled.csv")
    assert np.array_equal(unlabelled.outputs, labelled.outputs)
    assert unlabelled.scores == {}
    header, first = (tmp_path / "unlabelled.csv").read_text().splitlines()[:2]
    assert header == "id,class,p_1,spread"
    with_labels = (tmp_path / "labelled.csv").read_text().splitlines()
    assert with_labels[0] == "id,class,p_1,spread,label_y"
    assert with_labels[1].startswith(first)
    right = labelled.classes == np.array([float(graph.y) for graph in graphs])
    assert labelled.scores["accuracy"] == right.mean()


def test_single_logit_is_not_taken_for_a_probability(run: Run) -> None:
    predictor = hg.load(run)
    for graph in demo_graphs()[:8]:
        found = predictor.predict([graph])
        logit = float(found.outputs[0, 0])
        assert found.probabilities[0, 0] == pytest.approx(1 / (1 + np.exp(-logit)))
        with torch.no_grad():
            assert float(predictor.probabilities(graph)) == pytest.approx(
                found.probabilities[0, 0], rel=1e-5
            )


def test_labels_the_head_does_not_know_are_not_scored_but_told(run: Run) -> None:
    graphs = demo_graphs(6)
    graphs[3].y = torch.tensor([7])
    found = hg.predict(run, graphs)
    assert found.scores == {}
    assert any("labels not scored" in note and "7" in note for note in found.notes)
    for graph in graphs:
        graph.y = torch.zeros(1, 2)
    other = hg.predict(run, graphs)
    assert other.scores == {}
    assert any("expected graph labels y" in note for note in other.notes)
    assert np.array_equal(other.outputs, found.outputs)


def test_prediction_that_is_not_finite_names_the_graph(run: Run) -> None:
    graphs = demo_graphs(6)
    graphs[4].x = graphs[4].x * 1e38
    with pytest.raises(DataError, match=r"memory: 4: .*not finite \(1 of 6 rows\)"):
        hg.predict(run, graphs)


def test_new_data_of_the_same_kind_gets_the_features_of_the_run(tmp_path: Path) -> None:
    graphs = [Data(edge_index=g.edge_index, y=g.y, num_nodes=g.num_nodes) for g in demo_graphs()]
    torch.save(graphs, tmp_path / "old.pt")
    torch.save(graphs[:9], tmp_path / "new.pt")
    torch.manual_seed(0)
    model = build_model("gcn", {"hidden": 8, "num_layers": 2}, in_dim=1, out_dim=1)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    data = ("--data", tmp_path / "old.pt", "--data-args", "features=log-degree")
    files = ("--checkpoint", tmp_path / "model.safetensors", "-o", tmp_path / "a.cache")
    assert histograph("cache", "--model", "gcn", *files, *data).exit_code == 0
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT)
    found = hg.predict(run, tmp_path / "new.pt")
    assert any("features=log-degree" in note for note in found.notes)
    told = hg.predict(run, tmp_path / "new.pt", data_args={"features": "log-degree"})
    assert np.array_equal(found.outputs, told.outputs)
    other = hg.predict(run, tmp_path / "new.pt", data_args={"features": "degree"})
    assert not np.allclose(found.outputs, other.outputs)


def test_gradients_reach_the_features_of_the_nodes(run: Run) -> None:
    predictor = hg.load(run).double()  # so that the step can be too small to meet a kink of a ReLU
    graph = demo_graphs()[3]
    noise = 0.01 * torch.randn(graph.x.shape, generator=torch.manual_seed(0)).double()
    graph.x = graph.x.double() + noise  # else a column may be at its limit, another kink
    direction = torch.randn(graph.x.shape, generator=torch.manual_seed(1)).double()

    def output(step: float) -> Tensor:
        moved = graph.clone()
        moved.x = graph.x + step * direction
        return predictor(moved).squeeze()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    output(step).backward()
    with torch.no_grad():
        expected = (output(1e-7) - output(-1e-7)) / 2e-7
    torch.testing.assert_close(step.grad, expected, rtol=1e-4, atol=1e-6)
