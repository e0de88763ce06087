"""A run predicts with the mean of its heads, and says how much they differ."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch_geometric.data import Batch, Data

import histograph_post as hg
from histograph_post.data import from_graphs
from histograph_post.runs.run import Run
from histograph_post.training.batches import HeadInputs, HeadNetwork
from histograph_post.training.options import TrainingOptions

from ..helpers import NodeModel, make_model

SHORT = TrainingOptions(epochs=2, batch_size=16, lr=3e-2)
KINDS = ("binary", "multiclass", "multilabel", "regression", "regressions", "node", "link")
SEEDS = (0, 1)


def model_for(kind: str) -> nn.Module:
    if kind not in ("node", "link"):
        return make_model(num_layers=2)
    torch.manual_seed(0)
    return NodeModel()


def labelled(kind: str, count: int = 36) -> list[Data]:
    graphs = hg.load_data("demo:", args={"num_graphs": count}).graphs
    for number, graph in enumerate(graphs):
        size = graph.num_nodes
        graph.y = {
            "binary": graph.y,
            "multiclass": torch.tensor([number % 3]),
            "multilabel": torch.tensor([[float(number % 2), float(size > 12), number % 5 < 2]]),
            "regression": torch.tensor([500.0 + 9.5 * size]),
            "regressions": torch.tensor([[0.1 + size, 7.5 - graph.num_edges]]),
            "node": graph.x.argmax(dim=1) % 3,
            "link": None,
        }[kind]
    return graphs


class Trained:
    """A run of several folds and seeds, and the graphs it was trained on."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder, self.model = kind, folder, model_for(kind)
        level = kind if kind in ("node", "link") else "graph"
        self.data = from_graphs(labelled(kind), level=level)
        splits = None if level == "link" else "kfold:3"
        hg.cache(self.model, self.data, folder / "a.cache", splits=splits)
        given = {"seeds": SEEDS, "dim": 8, "heads": 2, "training": SHORT}
        self.run = hg.train_head(folder / "a.cache", folder / "run", **given)

    @property
    def folds(self) -> range:
        return range(1 if self.kind == "link" else 3)

    def outputs_of(self, fold: int, seed: int) -> np.ndarray:
        """Return what the head of one fit says, built by hand: ``[rows, out_dim]``."""
        head, standardizer = self.run.load_head(fold, seed)
        predictor = hg.load(self.run, model=self.model, device="cpu")
        batch = Batch.from_data_list(self.data.graphs)
        with torch.no_grad(), predictor.capture:
            layers = standardizer(predictor.capture.run(batch).history)
        uniform = len({layer.size(1) for layer in layers}) == 1
        inputs = HeadInputs(
            torch.stack(layers, dim=1) if uniform else layers,
            batch.batch,
            batch.num_graphs,
            pairs=batch.edge_label_index if self.kind == "link" else None,
        )
        with torch.no_grad():
            outputs = HeadNetwork(head.eval())(inputs).numpy()
        stored = json.loads(
            (self.run.fit_folder(self.run.head, fold, seed) / "fit.json").read_text()
        )
        scale = stored["target_scale"]
        return outputs * np.array(scale["deviation"] or 1.0) + np.array(scale["mean"] or 0.0)

    def each(self) -> np.ndarray:
        """Return what every head says: ``[heads, rows, out_dim]``."""
        return np.stack([self.outputs_of(fold, seed) for fold in self.folds for seed in SEEDS])


@pytest.fixture(scope="module", params=KINDS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(request.param, tmp_path_factory.mktemp(request.param))


def test_a_run_predicts_with_the_mean_of_all_folds_and_seeds(trained: Trained) -> None:
    found = hg.predict(trained.run, trained.data, model=trained.model, device="cpu")
    expected = trained.each().mean(axis=0) / trained.run.saved_head.temperature
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-4, atol=1e-5)
    predictor = hg.load(trained.run, model=trained.model, device="cpu")
    with torch.no_grad():
        loaded = predictor(Batch.from_data_list(trained.data.graphs))
    np.testing.assert_allclose(loaded.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_prediction_carries_its_spread(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "predictions.csv"
    found = hg.predict(trained.run, trained.data, out, model=trained.model, device="cpu")
    each = trained.each() / trained.run.saved_head.temperature  # [heads, rows, out_dim]
    task = trained.run.task
    values = np.stack([task.probabilities(torch.from_numpy(one)).numpy() for one in each])
    if task.kind == "multiclass":
        chosen = found.probabilities.argmax(axis=1)
        values = values[:, np.arange(len(chosen)), chosen][..., None]
    expected = values.std(axis=0, ddof=1)
    assert found.spread is not None
    np.testing.assert_allclose(found.spread, expected, rtol=1e-3, atol=1e-5)
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    several = trained.kind in ("multilabel", "regressions")
    names = [f"spread_{name}" for name in found.target_names] if several else ["spread"]
    assert [name for name in rows[0] if name.startswith("spread")] == names
    written = [[float(row[name]) for name in names] for row in rows]
    np.testing.assert_allclose(written, found.spread, rtol=1e-5)


# Tracing takes seconds a head.
@pytest.mark.parametrize(
    "trained", [pytest.param("regressions", marks=pytest.mark.long), "link"], indirect=True
)
def test_the_program_is_that_of_the_mean(trained: Trained, tmp_path: Path) -> None:
    hg.export(trained.run, tmp_path / "head.pt2")
    program = torch.export.load(str(tmp_path / "head.pt2")).module()
    predictor = hg.load(trained.run, model=trained.model, device="cpu")
    batch = Batch.from_data_list(trained.data.graphs[:7])
    with torch.no_grad(), predictor.capture:
        layers = predictor.capture.run(batch).history
        uniform = len({layer.size(1) for layer in layers}) == 1
        history = torch.stack(list(layers), 1) if uniform else list(layers)
        pairs = (batch.edge_label_index,) if trained.kind == "link" else ()
        found, expected = program(history, batch.ptr.diff(), *pairs), predictor(batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_runs_own_predictions_average_the_seeds_of_each_fold(trained: Trained) -> None:
    run = trained.run
    with (run.folder / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    task, names = run.task, trained.run.saved_head.target_names
    columns = {
        "binary": ["p_1"],
        "multiclass": [f"p_{value:g}" for value in task.classes],
        "multilabel": [f"p_{name}" for name in names],
        "regression": names,
    }[task.kind]
    for fold in trained.folds:
        test = run.splits.folds[fold].test
        own = [row for row in rows if row["fold"] == str(fold)]
        assert len(own) == len(test)
        stored = [
            load_file(run.fit_folder(run.head, fold, seed) / "test.safetensors")["outputs"]
            for seed in SEEDS
        ]
        mean = torch.stack(stored).mean(dim=0) / run.saved_head.temperature
        expected = task.probabilities(mean).numpy()
        written = [[float(row[name]) for name in columns] for row in own]
        np.testing.assert_allclose(written, expected, rtol=1e-5, atol=1e-9)
    assert "seed" not in rows[0]


def test_the_best_single_head_is_one_of_the_members(trained: Trained) -> None:
    run = trained.run
    members = [(member.fold, member.seed) for member in run.saved_head.members]
    assert members == [(fold, seed) for fold in trained.folds for seed in SEEDS]
    sign = 1 if run.results["higher_is_better"] else -1
    valid = run.scores(run.head, "valid")
    assert valid[run.chosen] == max(valid.values(), key=lambda score: sign * score)
    head, _ = run.load_head()
    stored = load_file(run.fit_folder(run.head, *run.chosen) / "head.safetensors")
    assert all(torch.equal(v, stored[f"head.{n}"]) for n, v in head.state_dict().items())
    assert len(run.load_ensemble().members) == len(members)


def test_a_whole_export_has_all_heads_without_the_run(trained: Trained, tmp_path: Path) -> None:
    hg.export(trained.run, tmp_path / "whole", whole=True, model=trained.model)
    found = hg.predict(tmp_path / "whole", trained.data, model=trained.model, device="cpu")
    expected = hg.predict(trained.run, trained.data, model=trained.model, device="cpu")
    np.testing.assert_array_equal(found.outputs, expected.outputs)
    assert found.spread is not None
    opened = Run.of(tmp_path / "whole")
    head, _ = opened.load_head(*trained.run.chosen)  # there are no fits beside an export
    assert head.out_dim == trained.run.task.out_dim


def test_a_single_head_has_no_spread(tmp_path: Path) -> None:
    graphs, model = labelled("binary"), model_for("binary")
    hg.cache(model, graphs, tmp_path / "a.cache")
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", dim=8, training=SHORT, seeds=[0])
    found = hg.predict(run, graphs, tmp_path / "new.csv", model=model)
    assert found.spread is None
    for path, columns in (
        (tmp_path / "new.csv", "id,class,p_1,label_y"),
        (run.folder / "predictions.csv", "id,fold,class,p_1,label_y"),
    ):
        assert path.read_text().splitlines()[0] == columns


def test_heads_of_other_backbones_are_no_members(tmp_path: Path) -> None:
    data = hg.load_data("demo:", args={"num_graphs": 36})
    for fold in range(3):
        model = make_model(seed=fold, num_layers=2)
        hg.cache(model, data, tmp_path / "caches" / f"fold-{fold}.cache", splits="kfold:3")
    run = hg.train_head(tmp_path / "caches", tmp_path / "run", dim=8, seeds=SEEDS, training=SHORT)
    fold, _ = run.chosen
    members = [(member.fold, member.seed) for member in run.saved_head.members]
    assert members == [(fold, seed) for seed in SEEDS]
    # Seeds of every fold are averaged where they were tested.
    lines = (run.folder / "predictions.csv").read_text().splitlines()
    assert len(lines) == 1 + 36


def test_a_solution_counts_once_whatever_the_seeds(tmp_path: Path) -> None:
    graphs, model = labelled("binary"), model_for("binary")
    hg.cache(model, graphs, tmp_path / "a.cache", splits="kfold:3")
    run = hg.train_head(tmp_path / "a.cache", tmp_path / "run", head="concat", seeds=SEEDS)
    assert [member.fold for member in run.saved_head.members] == [0, 1, 2]
    assert run.chosen in [(member.fold, member.seed) for member in run.saved_head.members]
    found = hg.predict(run, graphs, model=model)
    assert found.spread is not None  # folds differ
    columns = (run.folder / "predictions.csv").read_text().splitlines()[0]
    assert columns == "id,fold,class,p_1,label_y"  # seeds do not


def test_a_run_needs_no_fits_to_predict(tmp_path: Path) -> None:
    trained = Trained("binary", tmp_path)
    before = hg.predict(trained.run, trained.data, model=trained.model)
    shutil.rmtree(trained.run.folder / "fits")
    after = hg.predict(Run.open(trained.run.folder), trained.data, model=trained.model)
    np.testing.assert_array_equal(after.outputs, before.outputs)
