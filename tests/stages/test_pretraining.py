"""The pretraining stage: checkpoints per fold that need nothing else, and survive a kill."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from histograph_post.data import load_data
from histograph_post.errors import ConfigError, ModelError, NotFoundError, OutputExistsError
from histograph_post.experiments.checkpoints import fold_checkpoints
from histograph_post.experiments.folds import open_caches
from histograph_post.experiments.options import ExperimentOptions, FitProgress, with_keywords
from histograph_post.experiments.pretraining import Pretraining, plan_pretraining
from histograph_post.experiments.stage import run_experiment
from histograph_post.models.spec import load_pretrained
from histograph_post.runs.run import Run
from histograph_post.runs.verdict import OWN
from histograph_post.splits import Splits, resolve_splits
from histograph_post.tasks import infer_task
from histograph_post.training.options import TrainingOptions

from ..helpers import contents, histograph

SMALL = {"hidden": 8, "num_layers": 2}
QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2)


def plan(**changes: Any) -> Any:
    options = {
        "data_args": {"num_graphs": 40},
        "model_args": SMALL,
        "split": "kfold:3",
        "training": QUICK,
        **changes,
    }
    model, data = options.pop("model", "gin"), options.pop("data", "demo:")
    shared, others = with_keywords(None, options)
    return plan_pretraining(model, data, shared, **others)


def run_pretraining(pretraining: Pretraining, out: Path, **options: Any) -> Run:
    return run_experiment(pretraining, out, chosen=OWN, options=ExperimentOptions(**options))


def output_of(*words: object, code: int = 0) -> str:
    """Type a command, and return its output."""
    result = histograph(*words)
    assert result.exit_code == code, result.output
    # Usage errors come in a box that breaks lines.
    return result.output if code == 0 else " ".join(result.output.replace("│", " ").split())


def test_every_fold_is_a_checkpoint_with_its_own_split(tmp_path: Path) -> None:
    pretraining = plan()
    run = run_pretraining(pretraining, tmp_path / "p")
    found = fold_checkpoints(tmp_path / "p")
    assert [fold.folder.name for fold in found] == ["fold-0", "fold-1", "fold-2"]
    labels = pretraining.dataset.labels()
    for fold, split, results in zip(
        found, pretraining.splits.folds, run.results["folds"], strict=True
    ):
        assert Splits.load(Path(fold.split or "")).folds == (split,)
        loaded = load_pretrained(fold.model, fold.data)
        with torch.inference_mode():
            outputs = [
                loaded.model(g.x, g.edge_index, batch=torch.zeros(g.num_nodes, dtype=torch.long))
                for g in (loaded.dataset.graphs[row] for row in split.test)
            ]
        right = (torch.cat(outputs).numpy()[:, 0] > 0) == (labels[split.test, 0] == 1)
        assert results["scores"]["test"]["accuracy"] == pytest.approx(right.mean())
    accuracies = [fold["scores"]["test"]["accuracy"] for fold in run.results["folds"]]
    assert run.results["test"]["mean"] == pytest.approx(np.mean(accuracies))
    assert run.results["test"]["deviation"] == pytest.approx(np.std(accuracies, ddof=1))


def test_training_learns_what_the_labels_say(tmp_path: Path) -> None:
    options = TrainingOptions(epochs=15, batch_size=16, lr=1e-2)
    run = run_pretraining(
        plan(data_args={"num_graphs": 120}, training=options, only=[0]), tmp_path / "p"
    )
    assert run.results["folds"][0]["scores"]["train"]["accuracy"] > 0.7


def test_same_seed_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run_pretraining(plan(seeds=(seed,)), tmp_path / name)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    weights = [(tmp_path / name / "fold-0/model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] != weights[1]


def test_folds_can_be_trained_one_call_at_a_time(tmp_path: Path) -> None:
    run_pretraining(plan(), tmp_path / "whole")
    run_pretraining(plan(only=[2]), tmp_path / "parts")
    assert not (tmp_path / "parts/fold-0").exists()
    assert json.loads((tmp_path / "parts/results.json").read_text())["test"]["count"] == 1
    run_pretraining(plan(only=[0, 1]), tmp_path / "parts")
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    with pytest.raises(ConfigError, match="found 3, expected 0 to 2"):
        plan(only=[3])


def test_the_root_of_the_data_can_be_a_text(tmp_path: Path) -> None:
    run_pretraining(plan(only=[0], data_root=str(tmp_path)), tmp_path / "run")
    (fold,) = fold_checkpoints(tmp_path / "run")
    assert fold.data.root == tmp_path


KILLED = """
import os, signal
from histograph_post.experiments.pretraining import plan_pretraining
from histograph_post.experiments.options import ExperimentOptions
from histograph_post.experiments.stage import run_experiment
from histograph_post.training.options import TrainingOptions
from histograph_post.training.loop import train_resumably
def epoch_done(progress):
    if (progress.fold, progress.measured["epoch"]) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
plan = plan_pretraining(
    "gin", "demo:",
    ExperimentOptions(split="kfold:3", training=TrainingOptions(epochs=4, batch_size=8)),
    data_args={"num_graphs": 40}, model_args={"hidden": 8, "num_layers": 2, "dropout": 0.2},
)
train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds
options = ExperimentOptions(on_epoch=epoch_done)
run_experiment(plan, out, chosen="own readout", options=options)
"""


@pytest.mark.long
def test_killed_and_resumed_gives_the_same_bytes(
    tmp_path: Path, forked: Callable[..., int]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    pretraining = plan(
        model_args={**SMALL, "dropout": 0.2}, training=TrainingOptions(epochs=4, batch_size=8)
    )
    run_pretraining(pretraining, whole)
    assert forked(KILLED, out=broken) == -9
    with pytest.raises(ConfigError, match="finished fold"):
        fold_checkpoints(broken)
    epochs: list[tuple[int, int]] = []

    def epoch_done(progress: FitProgress) -> None:
        epochs.append((progress.fold, int(progress.measured["epoch"]) + 1))

    run_pretraining(pretraining, broken, on_epoch=epoch_done)
    assert epochs == [(1, 4), (2, 1), (2, 2), (2, 3), (2, 4)]
    assert contents(whole) == contents(broken)


def test_other_options_are_refused_unless_to_overwrite(tmp_path: Path) -> None:
    folder = tmp_path / "p"
    run_pretraining(plan(), folder)
    before = contents(folder)
    run_pretraining(plan(), folder)
    assert contents(folder) == before
    with pytest.raises(OutputExistsError, match="found a run with seed 0, expected 1"):
        run_pretraining(plan(seeds=(1,)), folder)
    run_pretraining(plan(split="stratified"), folder, overwrite=True)
    assert [fold.folder.name for fold in fold_checkpoints(folder)] == ["fold-0"]
    foreign = tmp_path / "thesis" / "fold-0"
    foreign.mkdir(parents=True)
    with pytest.raises(OutputExistsError, match="not a run's"):
        run_pretraining(plan(), tmp_path / "thesis", overwrite=True)
    assert foreign.is_dir()


def test_command_line_from_nothing_to_per_fold_caches(tmp_path: Path) -> None:
    folder, caches = tmp_path / "p", tmp_path / "caches"
    data = ("--model", "gin", "--data", "demo:", "--data-args", "num_graphs=40")
    training = ("--model-args", "hidden=8", "--folds", 3, "--epochs", 2)
    said = json.loads(output_of("pretrain", *data, *training, "-o", folder, "--json", "-q"))
    output_of("cache", folder, "-o", caches, "-q")
    opened = open_caches(caches)
    assert [cache.path.name for cache in opened] == [f"fold-{k}.cache" for k in range(3)]
    for cache, fold in zip(opened, said["folds"], strict=True):
        assert len(cache.splits.folds) == 1
        assert cache.weights_sha256 == fold["weights_sha256"]
        assert cache.manifest.own_metrics is not None
        own = cache.manifest.own_metrics["folds"][0]["test"]
        assert own["accuracy"] == fold["scores"]["test"]["accuracy"]
        assert own["roc_auc"] == pytest.approx(fold["scores"]["test"]["roc_auc"])
    output_of("cache", "--checkpoint", folder / "fold-1", "-o", tmp_path / "one.cache", "-q")
    (one,) = open_caches(tmp_path / "one.cache")
    assert one.weights_sha256 == opened[1].weights_sha256
    assert one.splits == opened[1].splits
    assert "brings its own" in output_of(
        "cache", folder, "-o", tmp_path / "x", "--split", "random", code=2
    )
    assert "--data is missing" in output_of(
        "cache", "--model", "gin", "--checkpoint", folder / "fold-1/model.safetensors",
        "-o", tmp_path / "x", code=2,
    )  # fmt: skip
    shutil.rmtree(folder / "fold-1")
    lost = output_of("cache", folder, "-o", tmp_path / "x", code=1)
    assert "fold-1: found no folder, expected that of a fold" in lost


def test_folder_of_anything_else_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="histograph pretrain"):
        fold_checkpoints(tmp_path)


def test_depth_64_trains_with_a_finite_loss(tmp_path: Path) -> None:
    losses: list[float] = []

    def epoch_done(progress: FitProgress) -> None:
        losses.append(progress.measured["loss"])

    deep = plan(
        model_args={"hidden": 8, "num_layers": 64},
        training=TrainingOptions(epochs=1, batch_size=40),
        only=[0],
    )
    run_pretraining(deep, tmp_path / "p", on_epoch=epoch_done)
    assert np.isfinite(losses).all()
    (fold,) = fold_checkpoints(tmp_path / "p/fold-0")
    weights = load_pretrained(fold.model, fold.data).model.state_dict()
    before = deep.model.state_dict()
    assert not torch.equal(weights["convs.0.nn.0.weight"], before["convs.0.nn.0.weight"])


GRAPHS = """
import torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, global_mean_pool

def make(kind="graph"):
    random = torch.Generator().manual_seed(0)
    graphs = []
    for index in range(30):
        edges = torch.randint(6, (2, 14), generator=random)
        x = torch.randint(3, (6, 2), generator=random)
        if kind == "categories":
            graphs.append(Data(x=x, edge_index=edges, y=torch.tensor([index % 2])))
        elif kind == "quantities":
            y = 1000.0 + 50 * x.float().mean().reshape(1, 1)
            graphs.append(Data(x=x.float(), edge_index=edges, y=y))
        elif kind == "nodes":
            graphs.append(Data(x=x.float(), edge_index=edges, y=x[:, 0]))
        else:
            graphs.append(Data(x=x.float(), edge_index=edges, y=torch.tensor([index % 2])))
    return graphs

class Own(nn.Module):
    def __init__(self, num_features, num_classes, columns=None):
        super().__init__()
        self.conv = GCNConv(num_features, 8)
        self.last = nn.Linear(8, columns or num_classes)

    def forward(self, x, edge_index, batch):
        return self.last(global_mean_pool(self.conv(x, edge_index).relu(), batch))

ready = Own(2, 1)
"""


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(GRAPHS)
    return path


def own_scores(folder: Path, out: Path, *named: object) -> list[dict[str, float]]:
    """Cache what was trained; return the scores the caches give the models themselves."""
    output_of("cache", folder, *named, "-o", out, "-q")
    owns = [cache.manifest.own_metrics for cache in open_caches(out)]
    return [own["folds"][0]["test"] for own in owns if own is not None]


def test_integer_features_are_embedded_by_category(graphs: Path, tmp_path: Path) -> None:
    pretraining = plan(data=f"{graphs}:make", data_args={"kind": "categories"})
    assert pretraining.model.settings.in_dim == [3, 3]
    run = run_pretraining(pretraining, tmp_path / "p")
    scores = own_scores(tmp_path / "p", tmp_path / "caches", "--data", f"{graphs}:make")
    assert [s["accuracy"] for s in scores] == [
        fold["scores"]["test"]["accuracy"] for fold in run.results["folds"]
    ]


def test_nodes_are_predicted_without_a_pool(graphs: Path, tmp_path: Path) -> None:
    pretraining = plan(data=f"{graphs}:make", data_args={"kind": "nodes"})
    run = run_pretraining(pretraining, tmp_path / "p")
    scores = own_scores(tmp_path / "p", tmp_path / "caches", "--data", f"{graphs}:make")
    assert [s["accuracy"] for s in scores] == pytest.approx(
        [fold["scores"]["test"]["accuracy"] for fold in run.results["folds"]]
    )


@pytest.mark.parametrize("model", ["gin", "own"])
def test_quantities_are_predicted_in_their_own_units(
    graphs: Path, tmp_path: Path, model: str
) -> None:
    """A built-in model that learned scaled targets gives them unscaled."""
    changes: dict[str, Any] = {"model": f"{graphs}:Own", "model_args": {}} if model == "own" else {}
    changes |= {"data_args": {"kind": "quantities"}, "only": [0]}
    pretraining = plan(data=f"{graphs}:make", **changes)
    run = run_pretraining(pretraining, tmp_path / "p")
    named = ("--data", f"{graphs}:make", "--model", pretraining.model_spec.spec)
    (scores,) = own_scores(tmp_path / "p", tmp_path / "caches", *named)
    assert scores["rmse"] == pytest.approx(run.results["test"]["mean"], rel=1e-4)
    if model == "gin":
        assert scores["rmse"] < 100  # of values near 1000, after two epochs


def test_own_model_with_a_column_per_class(graphs: Path, tmp_path: Path) -> None:
    pretraining = plan(model=f"{graphs}:Own", data=f"{graphs}:make", data_args={},
                       model_args={"columns": 2})  # fmt: skip
    assert pretraining.task.kind == "multiclass"
    run = run_pretraining(pretraining, tmp_path / "p")
    named = ("--data", f"{graphs}:make", "--model", f"{graphs}:Own")
    scores = own_scores(tmp_path / "p", tmp_path / "caches", *named)
    assert [s["accuracy"] for s in scores] == [
        fold["scores"]["test"]["accuracy"] for fold in run.results["folds"]
    ]


def test_own_model_that_fits_no_label_is_refused(graphs: Path) -> None:
    with pytest.raises(ModelError, match="found an output of 5 columns, expected 1"):
        plan(model=f"{graphs}:Own", data=f"{graphs}:make", data_args={}, model_args={"columns": 5})


def test_folds_of_a_finished_module_do_not_share_weights(graphs: Path, tmp_path: Path) -> None:
    """Fold 1 starts where fold 0 started, not where it ended."""
    spec = {"model": f"{graphs}:ready", "data": f"{graphs}:make", "data_args": {}, "model_args": {}}
    pretraining = plan(**spec)
    run_pretraining(pretraining, tmp_path / "both")
    run_pretraining(replace(pretraining, folds=(1,)), tmp_path / "second")
    both, second = (
        (tmp_path / name / "fold-1/model.safetensors").read_bytes() for name in ("both", "second")
    )
    assert both == second


def test_link_data_is_refused(tmp_path: Path) -> None:
    graph = Data(
        x=torch.ones(4, 2),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        edge_label_index=torch.tensor([[0, 1], [1, 3]]),
        edge_label=torch.tensor([1, 0]),
    )
    torch.save([graph], tmp_path / "links.pt")
    with pytest.raises(ConfigError, match="link labels"):
        plan(data=str(tmp_path / "links.pt"), data_args={})


def test_cora_trains_without_a_pool(shared_data: Path, tmp_path: Path) -> None:
    pretraining = plan(
        model="gcn",
        data="planetoid:Cora",
        data_args={},
        data_root=shared_data,
        split=None,
        model_args={"num_layers": 2, "hidden": 16, "dropout": 0.5},
        training=TrainingOptions(epochs=30, lr=1e-2),
    )
    run = run_pretraining(pretraining, tmp_path / "p")
    assert run.results["test"]["mean"] > 0.6  # 7 classes


def test_ogb_molecules_train_with_their_categories(shared_data: Path, tmp_path: Path) -> None:
    dataset = load_data("ogbg:molesol", root=shared_data)
    labels = dataset.labels()
    assert infer_task(labels, dataset.level).kind == "regression"
    pretraining = plan(
        data="ogbg:molesol", data_args={}, data_root=shared_data, split=None,
        training=TrainingOptions(epochs=3, lr=1e-2),
    )  # fmt: skip
    run = run_pretraining(pretraining, tmp_path / "p")
    split = resolve_splits(dataset, None).folds[0]
    guess = np.sqrt(np.mean((labels[split.test] - labels[split.train].mean()) ** 2))
    assert run.results["test"]["mean"] < guess
