"""A fine-tuned run is a run: it resumes, predicts, is read beside others and is cached again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import histograph_post as hg
from histograph_post.errors import CacheError, CheckpointError, ConfigError, DataError, ModelError
from histograph_post.experiments.folds import open_caches
from histograph_post.experiments.options import FitProgress
from histograph_post.runs.predictions import Predictions
from histograph_post.runs.run import Run
from histograph_post.runs.verdict import reported
from histograph_post.training.options import TrainingOptions

from ...helpers import NodeModel, histograph, node_labelled

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2, warmup=0)
COMMAND = ("--epochs", 2, "--head-lr", "1e-2", "--backbone-lr", "1e-2", "-q")
DEMO = ("--data", "demo:", "--data-args", "num_graphs=48")


@pytest.fixture(scope="module")
def tuned(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tuned run: three folds, two seeds."""
    out = tmp_path_factory.mktemp("tuned") / "ft"
    result = histograph("finetune", folder / "run", "-o", out, *COMMAND)
    assert result.exit_code == 0, result.output
    return out


def assert_stored(folder: Path, found: Predictions) -> None:
    """Compare with what the chosen fit said of its test rows; its backbone is nobody else's."""
    run = Run.open(folder)
    assert len(run.saved_head.members) == 1
    stored = load_file(run.fit_folder(run.head, *run.chosen) / "test.safetensors")
    assert len(stored["rows"]) >= 5
    values = found.outputs[stored["rows"]] * run.saved_head.temperature
    np.testing.assert_allclose(values, stored["outputs"], rtol=1e-3, atol=1e-4)


def test_results_are_read_beside_those_of_the_head_stage(folder: Path, tuned: Path) -> None:
    head, run = Run.open(folder / "run").results, Run.open(tuned).results
    assert run["head"] == "histograph-finetuned"
    assert list(run["readouts"]) == ["own readout", "mean", "histograph", "histograph-finetuned"]
    for name, row in head["readouts"].items():
        row.pop("temperature", None)  # of the readouts that a run keeps
        assert run["readouts"][name] == row
    shown = {name: reported(row)["test"]["mean"] for name, row in run["readouts"].items()}
    gain = shown["histograph-finetuned"] - shown["histograph"]  # of the numbers in the table
    assert run["versus_frozen"]["baseline"] == "histograph"
    assert run["versus_frozen"]["mean"] == pytest.approx(gain)
    assert run["versus_baseline"]["baseline"] == "mean"
    assert len((tuned / "predictions.csv").read_text().splitlines()) == 1 + 48


def test_predict_says_so_where_the_verdict_is_to_keep_the_frozen_head(
    tuned: Path, tmp_path: Path
) -> None:
    shutil.copytree(tuned, tmp_path / "ft")
    results = json.loads((tuned / "results.json").read_text())
    frozen, after = (
        results["readouts"][name]["averaged"] for name in ("histograph", "histograph-finetuned")
    )
    frozen["versus_own"] |= {"mean": 0.2, "low": 0.1, "high": 0.3, "rows": None}
    for mean, said in ((after["valid"]["mean"], True), (after["valid"]["mean"] - 0.1, False)):
        frozen["valid"]["mean"] = mean
        (tmp_path / "ft/results.json").write_text(json.dumps(results))
        (tmp_path / "ft/SHA256SUMS").unlink(missing_ok=True)
        done = histograph("predict", tmp_path / "ft", *DEMO, "-o", tmp_path / f"{mean}.csv")
        note = "note: histograph-finetuned predicts, but the verdict on this run is: Keep the froz"
        assert (note in done.stderr) == said
    # The frozen head is not in this run: its name must not stand for the other one.
    words = ("predict", tuned, *DEMO, "-o", tmp_path / "p.csv", "--head", "histograph")
    refused = histograph(*words)
    assert refused.exit_code == 1
    assert "the run that was fine-tuned predicts with it, frozen" in refused.stderr


def test_predictions_are_those_the_run_stored(tuned: Path, tmp_path: Path) -> None:
    assert_stored(tuned, hg.predict(tuned, "demo:", data_args={"num_graphs": 48}))
    # The run brings its backbone: neither the cache nor the checkpoint is needed.
    moved = tmp_path / "moved"
    shutil.copytree(tuned, moved)
    result = histograph("predict", moved, *DEMO, "-o", tmp_path / "p.csv")
    assert result.exit_code == 0, result.output
    other = tuned / "fits/histograph-finetuned/fold-2-seed-1/model.safetensors"
    chosen = json.loads((tuned / "head.json").read_text())
    if (chosen["fold"], chosen["seed"]) == (2, 1):
        other = tuned / "fits/histograph-finetuned/fold-0-seed-0/model.safetensors"
    with pytest.raises(CheckpointError, match="found a backbone with weights"):
        hg.load(tuned, checkpoint=other)


def test_run_is_cached_again_with_a_cache_per_fold(tuned: Path, tmp_path: Path) -> None:
    result = histograph("cache", tuned, "-o", tmp_path / "caches", "-q")
    assert result.exit_code == 0, result.output
    caches = open_caches(tmp_path / "caches")
    splits = json.loads((tuned / "splits.json").read_text())["folds"]
    for number, cache in enumerate(caches):
        best = json.loads((tuned / f"fold-{number}" / "results.json").read_text())
        assert cache.weights_sha256 == best["weights_sha256"]
        assert cache.splits.folds[0].test.tolist() == splits[number]["test"]
        fits = [
            fit for fit in Run.open(tuned).results["fits"]
            if (fit["head"], fit["fold"]) == ("histograph-finetuned", number)
        ]  # fmt: skip
        top = max(fit["scores"]["valid"]["accuracy"] for fit in fits)
        assert best["scores"]["valid"]["accuracy"] == top
    # Of these caches the report finds the one that the run's head reads.
    page = tmp_path / "report.html"
    reported = histograph("report", tuned, "-o", page, "--cache", tmp_path / "caches", "-q")
    assert reported.exit_code == 0, reported.output
    assert "Layer weights by label" in page.read_text(encoding="utf-8")
    # Per-fold caches are fine-tuned as they are: every fold with its own backbone and split.
    again = histograph(
        "finetune", tmp_path / "caches", "-o", tmp_path / "again", *COMMAND, "--dim", 8
    )
    assert again.exit_code == 0, again.output
    run = Run.open(tmp_path / "again").results
    assert {fit["fold"] for fit in run["fits"]} == {0, 1, 2}
    head = histograph("train-head", tmp_path / "caches", "-o", tmp_path / "head", "--epochs", 1,
                      "--dim", 8, "-q")  # fmt: skip
    assert head.exit_code == 0, head.output
    more = histograph("finetune", tmp_path / "head", "-o", tmp_path / "more", *COMMAND)
    assert more.exit_code == 0, more.output


def test_a_seed_gets_what_it_gets_alone(folder: Path, tmp_path: Path) -> None:
    options = {"training": QUICK, "head_options": {"dim": 8}}
    cache, names = folder / "demo.cache", ("mean", "histograph-finetuned")
    run = hg.finetune(cache, tmp_path / "both", seeds=[0, 1], **options)
    planned = [(fold, head, seed) for fold in range(3) for head in names for seed in (0, 1)]
    fits = {(fit["fold"], fit["head"], fit["seed"]): fit for fit in run.results["fits"]}
    assert list(fits) == planned
    alone = hg.finetune(cache, tmp_path / "alone", seeds=[1], **options)
    for fit in alone.results["fits"]:
        assert fits[fit["fold"], fit["head"], 1] == fit


KILLED = """
import os, signal
import histograph_post as hg
from histograph_post.training.loop import train_resumably
from histograph_post.training.options import TrainingOptions
train_resumably.__kwdefaults__["save_every"] = 0.0  # these epochs take milliseconds
def epoch_done(progress):
    if (progress.fold, progress.measured["epoch"]) == (1, 2):
        os.kill(os.getpid(), signal.SIGKILL)
hg.finetune(
    run, out, bn="train", unfreeze_every=1, backbone_lr=1e-2,
    training=TrainingOptions(epochs=5, batch_size=16, lr=1e-2), seeds=[0], on_epoch=epoch_done,
)
"""


def test_killed_and_resumed_gives_the_same_bytes(
    folder: Path, tmp_path: Path, forked: Callable[..., int]
) -> None:
    """Also with statistics that are updated, and layers that are unfrozen on the way."""
    training = TrainingOptions(epochs=5, batch_size=16, lr=1e-2)
    options = {"bn": "train", "unfreeze_every": 1, "backbone_lr": 1e-2, "training": training}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    hg.finetune(folder / "run", whole, seeds=[0], **options)
    assert forked(KILLED, run=folder / "run", out=broken) == -9
    state = broken / "fits/histograph-finetuned/fold-1-seed-0/state.pt"
    assert torch.load(state, weights_only=True)["progress"]["epoch"] == 3
    assert not (broken / "results.json").exists()
    epochs: list[tuple[int, int]] = []

    def epoch_done(progress: FitProgress) -> None:
        epochs.append((progress.fold, int(progress.measured["epoch"]) + 1))

    hg.finetune(folder / "run", broken, seeds=[0], on_epoch=epoch_done, **options)
    assert epochs == [(1, 4), (1, 5), *((2, epoch) for epoch in range(1, 6))]
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    for name in ("results.json", "predictions.csv", "metrics.jsonl", "model.safetensors"):
        assert Path(name) in files
    for file in files:
        if file.name not in ("fit.json", "SHA256SUMS"):  # the seconds, and their hash
            assert (broken / file).read_bytes() == (whole / file).read_bytes(), file


def test_model_and_data_in_memory_are_handed_over_again(tmp_path: Path) -> None:
    graphs = node_labelled(8)
    torch.manual_seed(0)
    model = NodeModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    cache = hg.cache(model, graphs, tmp_path / "a.cache", splits="random")
    options = {"training": QUICK, "backbone_lr": 1e-2, "head_options": {"dim": 8}}
    run = hg.finetune(cache, tmp_path / "ft", model=model, data=graphs, **options)
    assert run.results["task"]["level"] == "node"
    found = hg.predict(run, graphs, model=model)
    assert_stored(run.folder, found)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    with pytest.raises(ModelError, match="handed over in memory"):
        hg.finetune(cache, tmp_path / "x", data=graphs, **options)
    with pytest.raises(DataError, match="handed over in memory"):
        hg.finetune(cache, tmp_path / "x", model=model, **options)
    with pytest.raises(CheckpointError, match="found a backbone with weights"):
        hg.finetune(cache, tmp_path / "x", model=NodeModel(), data=graphs, **options)
    graphs[0].x = graphs[0].x + 1
    with pytest.raises(DataError, match="fingerprint"):
        hg.finetune(cache, tmp_path / "x", model=model, data=graphs, **options)
    assert not (tmp_path / "x").exists()


def test_links_train_with_the_negatives_of_the_head_stage(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = NodeModel()
    dataset = hg.load_data("demo:", args={"num_graphs": 8, "level": "link"})
    cache = hg.cache(model, dataset, tmp_path / "a.cache")
    training = TrainingOptions(epochs=3, batch_size=4, lr=1e-2)
    head = hg.train_head(cache, tmp_path / "head", training=training, dim=8, seeds=[0])
    tuned = hg.finetune(
        cache, tmp_path / "ft", model=model, data=dataset, unfreeze=[], training=training,
        head_options={"dim": 8},
    )  # fmt: skip
    losses = [
        [entry["loss"]
         for entry in map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
         if entry["head"] == name]
        for run, name in ((head, "histograph"), (tuned, "histograph-finetuned"))
    ]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_stored(tuned.folder, hg.predict(tuned, dataset, model=model))


def test_quantities_stay_in_the_units_of_the_labels(tmp_path: Path) -> None:
    graphs: list[Data] = hg.load_data("demo:", args={"num_graphs": 60}).graphs
    for graph in graphs:
        graph.y = torch.tensor([5000.0 + 30.5 * graph.num_nodes])
    torch.manual_seed(0)
    model = NodeModel()
    hg.cache(model, graphs, tmp_path / "a.cache", splits="random")
    hg.train_head(tmp_path / "a.cache", tmp_path / "head", training=QUICK, dim=8)
    run = hg.finetune(tmp_path / "head", tmp_path / "ft", model=model, data=graphs, training=QUICK)
    found = hg.predict(run, graphs, model=model)
    assert 5000 < found.outputs.mean() < 7000
    assert_stored(run.folder, found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--unfreeze", "nothing.here"], "expected a module or parameter of the backbone"),
        (["--unfreeze", "classifier"], "that the history depends on"),
        (["--bn", "train", "--unfreeze", ""], "no running statistics"),
        (["--amp", "--device", "cpu"], "expected 'cuda'"),
        (["--head", "mean"], "brings its own"),
        (["--no-standardize"], "standardize: found one, but the run"),
        (["--split-seed", "3"], "split_seed: found one, but the run"),
        (["--seeds", "0-5"], "expected some of the run's"),
        (["--data", "smiles:/nowhere.csv"], "/nowhere.csv"),
        (["--checkpoint", "/nowhere/model.pt"], "expected the weights"),
    ],
)
def test_refusals_are_one_line(
    folder: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    result = histograph("finetune", folder / "run", "-o", tmp_path / "x", "-q", *options)
    assert result.exit_code == 1, result.output
    assert message in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_cache_is_not_given_twice(folder: Path, tmp_path: Path) -> None:
    place = folder / "demo.cache"
    with pytest.raises(ConfigError, match=r"is no run: give it as the source"):
        hg.finetune(place, tmp_path / "x", cache=place)
    with pytest.raises(ConfigError, match=r"is no run"):
        hg.finetune(hg.Cache.open(place), tmp_path / "x", cache=place)
    assert not (tmp_path / "x").exists()


def test_run_that_trained_its_backbone_is_to_be_cached_first(tuned: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="histograph cache"):
        hg.finetune(tuned, tmp_path / "x")


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = GCNConv(4, 8), GCNConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.two(self.one(x, edge_index).relu(), edge_index)


def test_caches_of_different_models_are_refused(tmp_path: Path) -> None:
    dataset = hg.load_data("demo:", args={"num_graphs": 12})
    models = [NodeModel(), Renamed()]
    for number, model in enumerate(models):
        hg.cache(model, dataset, tmp_path / "caches" / f"fold-{number}.cache")
    with pytest.raises(CacheError, match="found other layers"):
        hg.finetune(tmp_path / "caches", tmp_path / "x", model=models[0], data=dataset)
