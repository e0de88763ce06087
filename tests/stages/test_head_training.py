"""The head stage as a whole, on small real caches."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from histograph_post.caches.caching import cache
from histograph_post.data import from_graphs, load_data
from histograph_post.errors import CacheError, ConfigError, OutputExistsError
from histograph_post.experiments.head_training import compare, train_head
from histograph_post.heads.registry import head_names
from histograph_post.models import build_model
from histograph_post.training.options import TrainingOptions

QUICK = TrainingOptions(epochs=3, batch_size=16)


@pytest.fixture(scope="module")
def demo_cache(make_demo_cache: Callable[..., Path]) -> Path:
    return make_demo_cache("kfold:3")


def test_the_best_epoch_is_never_worse_on_validation_than_the_solved_probe(
    demo_cache: Path, tmp_path: Path
) -> None:
    given = {"training": QUICK, "metric": "roc_auc", "seeds": [0], "jobs": 1, "dim": 8, "heads": 2}
    run = train_head(demo_cache, tmp_path / "run", **given)
    alone = train_head(demo_cache, tmp_path / "probe", probe=1.0, **given)  # its share is all
    found, solved = (each.scores("histograph", "valid") for each in (run, alone))
    assert all(found[key] >= score for key, score in solved.items())
    best = [fit["best_epoch"] for fit in run.results["fits"] if fit["head"] == "histograph"]
    assert min(best) == -1  # before the first epoch


def test_folds_that_test_rows_the_checkpoint_may_have_seen_are_noted(
    make_demo_cache: Callable[..., Path], tmp_path: Path
) -> None:
    one = make_demo_cache("stratified:0.6,0.2,0.2")
    for split, seen in (("kfold:3", "36 of 60 rows that are tested are training rows"), (None, "")):
        said: list[str] = []
        train_head(
            *(one, tmp_path / f"run-{split}"),
            head="mean",
            seeds=[0],
            split=split,
            training=TrainingOptions(epochs=1),
            on_start=lambda metric, notes, said=said: said.extend(notes),
        )
        found = [note for note in said if "fair only if the checkpoint" in note]
        assert len(found) == bool(seen)
        assert all(seen in note for note in found)


def test_run_folder_holds_what_it_promises(demo_cache: Path, tmp_path: Path) -> None:
    run = train_head(demo_cache, tmp_path / "run", seeds=(0, 1), training=QUICK, dim=8, heads=2)
    results = run.results
    assert list(results["readouts"]) == ["own readout", "mean", "histograph"]
    assert results["readouts"]["histograph"]["test"]["count"] == 6
    assert len(results["fits"]) == 12
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {
        *("run.json", "splits.json", "metrics.jsonl", "results.json"),
        *("head.safetensors", "head.json", "predictions.csv"),
    } <= names
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 12 * 3
    assert {"head", "fold", "seed", "epoch", "loss", "valid_accuracy"} <= set(json.loads(lines[0]))
    with (tmp_path / "run" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60  # every graph is in one test part; two seeds are averaged
    right = [
        np.mean([row["class"] == row["label_y"] for row in rows if row["fold"] == str(fold)])
        for fold in range(3)
    ]
    averaged = results["readouts"]["histograph"]["averaged"]["test"]
    assert averaged["mean"] == pytest.approx(np.mean(right))
    assert averaged["deviation"] == pytest.approx(np.std(right, ddof=1))


def test_same_seed_same_results_file(demo_cache: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train_head(demo_cache, tmp_path / name, training=QUICK, dim=8, heads=2)
    for file in ("results.json", "predictions.csv", "metrics.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_finished_run_is_not_trained_again_and_another_is_refused(
    demo_cache: Path, tmp_path: Path
) -> None:
    train_head(demo_cache, tmp_path / "run", training=QUICK, dim=8, heads=2)
    epochs = []
    train_head(demo_cache, tmp_path / "run", training=QUICK, dim=8, heads=2, on_epoch=epochs.append)
    assert epochs == []
    with pytest.raises(OutputExistsError, match="heads options dim 8, expected 16"):
        train_head(demo_cache, tmp_path / "run", training=QUICK, dim=16, heads=2)
    with pytest.raises(OutputExistsError, match=r"training lr 0\.001, expected 0\.02;"):
        train_head(demo_cache, tmp_path / "run", epochs=3, batch_size=16, lr=0.02, dim=8, heads=2)
    train_head(demo_cache, tmp_path / "run", training=QUICK, dim=16, heads=2, overwrite=True)


TRAIN = """
train_head(cache, out, training=TrainingOptions(epochs=4, batch_size=16), dim=8, heads=2,
           dropout=0.5, on_epoch=epoch_done)
"""


def test_killed_and_resumed_gives_the_same_results(
    demo_cache: Path, tmp_path: Path, killed_training: Callable[[str, Path, Path, int], int]
) -> None:
    def run(folder: str, moment: int) -> int:
        return killed_training(TRAIN, demo_cache, tmp_path / folder, moment)

    assert run("whole", 0) == 0
    assert run("broken", 6) == -9  # in the middle of the second fit
    assert not (tmp_path / "broken" / "results.json").exists()
    assert run("broken", 0) == 0
    for file in ("results.json", "predictions.csv", "metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "broken" / file).read_bytes()


@pytest.mark.parametrize("head", head_names("graph"))
def test_every_readout_trains_on_the_same_cache(
    demo_cache: Path, tmp_path: Path, head: str
) -> None:
    training = TrainingOptions(epochs=2, batch_size=16)
    given = {"heads": [head], "dim": 8, "training": training, "split": "stratified"}
    run = compare(demo_cache, tmp_path / "run", **given)
    fit = run.results["fits"][0]
    assert 0 <= fit["scores"]["test"]["accuracy"] <= 1
    assert np.isfinite(run.results["readouts"][head]["test"]["mean"])


def test_per_fold_caches_use_their_own_split(tmp_path: Path) -> None:
    dataset = load_data("demo:", args={"num_graphs": 40})
    for fold in range(3):
        torch.manual_seed(fold)
        model = build_model("gcn", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=1)
        cache(model, dataset, tmp_path / "caches" / f"fold-{fold}.cache", splits="kfold:3")
    options = {"training": QUICK, "dim": 8, "heads": 2, "seeds": [0]}
    run = train_head(tmp_path / "caches", tmp_path / "run", **options)
    assert {fit["fold"] for fit in run.results["fits"]} == {0, 1, 2}
    assert run.results["readouts"]["own readout"]["test"]["count"] == 3
    with pytest.raises(CacheError, match="own splits"):
        compare(tmp_path / "caches", tmp_path / "x", heads=["mean"], split="kfold:4")
    shutil.copytree(tmp_path / "caches/fold-0.cache", tmp_path / "caches/fold-\u00b2.cache")
    with pytest.raises(CacheError, match=r"found the weights and the split of fold-0\.cache"):
        train_head(tmp_path / "caches", tmp_path / "run", **options)


def test_missing_labels_and_one_class_columns_are_no_crash(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for index in range(30):
        x = torch.randn(5, 4, generator=generator)
        y = torch.tensor([[float(x.mean() > 0), 1.0, float("nan")]])
        y[0, 0] = float("nan") if index % 7 == 0 else y[0, 0]
        graphs.append(Data(x=x, edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]), y=y))
    model = build_model("gin", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=3)
    cache(model, from_graphs(graphs, level="graph"), tmp_path / "a.cache", splits="random")
    run = train_head(tmp_path / "a.cache", tmp_path / "run", training=QUICK, dim=8, heads=2)
    assert run.results["task"]["kind"] == "multilabel"
    assert run.results["fits"][0]["scores"]["test"]["accuracy"] >= 0


def test_node_task_on_one_graph(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 3
    x = torch.nn.functional.one_hot(labels, 4) + 0.3 * torch.randn(60, 4, generator=generator)
    edges = torch.randint(0, 60, (2, 100), generator=generator)
    graph = Data(x=x.float(), edge_index=edges, y=labels)
    model = build_model("gcn", {"hidden": 8, "num_layers": 2, "pool": "none"}, in_dim=4, out_dim=3)
    cache(model, from_graphs([graph], level="node"), tmp_path / "a.cache", splits="stratified")
    run = train_head(tmp_path / "a.cache", tmp_path / "run", training=QUICK, dim=8, heads=2)
    assert list(run.results["readouts"]) == ["own readout", "mlp", "histograph"]
    with pytest.raises(ConfigError, match="expected graph"):
        compare(tmp_path / "a.cache", tmp_path / "x", heads=["set2set"])
