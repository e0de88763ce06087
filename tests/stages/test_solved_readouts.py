"""Readouts that are solved: fitted, resumed, predicted, exported and tuned like any other."""

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
from safetensors.torch import load_file
from torch import Tensor
from torch_geometric.data import Data

import histograph_post as hg
from histograph_post.caches.caching import cache
from histograph_post.data import load_data
from histograph_post.errors import ConfigError
from histograph_post.experiments import solved_fits
from histograph_post.experiments.search import Values
from histograph_post.heads import Readout, build_head
from histograph_post.heads.base import last_layer
from histograph_post.heads.registry import is_solved
from histograph_post.models import build_model
from histograph_post.splits import Split
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.options import TrainingOptions
from histograph_post.training.solving import STRENGTHS, USUAL_STRENGTH

from ..helpers import make_model

SOLVED = ["linear", "concat", "probe"]
QUICK = TrainingOptions(epochs=2, batch_size=16)


@pytest.fixture(scope="module")
def demo_cache(make_demo_cache: Callable[..., Path]) -> Path:
    return make_demo_cache("kfold:3", num_graphs=90)


@pytest.fixture(scope="module")
def run(demo_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> hg.Run:
    out = tmp_path_factory.mktemp("runs") / "run"
    heads = [*SOLVED, "mean", "max"]
    return hg.compare(demo_cache, out, heads=heads, seeds=[3, 5], training=QUICK)


def stored(run: hg.Run, head: str, fold: int, seed: int) -> dict[str, Any]:
    folder = run.folder / "fits" / head / f"fold-{fold}-seed-{seed}"
    found: dict[str, Any] = json.loads((folder / "fit.json").read_text())
    return found


def weights(run: hg.Run, head: str, fold: int, seed: int) -> dict[str, Tensor]:
    return load_file(run.folder / "fits" / head / f"fold-{fold}-seed-{seed}" / "head.safetensors")


@pytest.mark.parametrize("head", SOLVED)
def test_the_log_is_the_path_and_the_seeds_share_it(run: hg.Run, head: str) -> None:
    for fold in range(3):
        fit, other = (stored(run, head, fold, seed) for seed in (3, 5))
        assert [entry["epoch"] for entry in fit["log"]] == list(range(fit["epochs"]))
        assert [entry["strength"] for entry in fit["log"]] == list(STRENGTHS[: fit["epochs"]])
        assert fit["strength"] == STRENGTHS[fit["best_epoch"]]
        best = fit["log"][fit["best_epoch"]]
        assert best["valid_accuracy"] == fit["scores"]["valid"]["accuracy"]
        assert best["valid_accuracy"] == max(entry["valid_accuracy"] for entry in fit["log"])
        assert (fit["seed"], other["seed"]) == (3, 5)
        assert {**fit, "seed": 5} == other
        found, others = (weights(run, head, fold, seed) for seed in (3, 5))
        assert all(torch.equal(value, others[name]) for name, value in found.items())


def test_results_have_every_seed_but_count_one(run: hg.Run) -> None:
    for head in SOLVED:
        row = run.results["readouts"][head]
        assert row["test"]["count"] == 3  # of each fold once
        assert row["versus_baseline"]["baseline"] == "mean"
    strengths = [fit.get("strength") for fit in run.results["fits"]]
    assert sum(strength is not None for strength in strengths) == 18
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["head"] for line in lines} == {*SOLVED, "mean", "max"}


def test_it_is_solved_once_for_all_seeds(
    demo_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[int] = []
    solve = solved_fits.solve_linear

    def counted(*args: Any, **options: Any) -> Any:
        solved.append(1)
        return solve(*args, **options)

    monkeypatch.setattr(solved_fits, "solve_linear", counted)
    options: dict[str, Any] = {"heads": ["probe"], "seeds": [0, 1, 2], "jobs": 1}
    run = hg.compare(demo_cache, tmp_path / "run", training=QUICK, **options)
    assert len(solved) == 3
    # What was lost is taken over from a seed that is left.
    shutil.rmtree(run.folder / "fits" / "probe" / "fold-1-seed-0")
    expected = (run.folder / "results.json").read_bytes()
    (run.folder / "results.json").unlink()
    again = hg.compare(demo_cache, tmp_path / "run", training=QUICK, **options)
    assert len(solved) == 3
    assert (again.folder / "results.json").read_bytes() == expected


@pytest.mark.parametrize("head", SOLVED)
def test_the_run_predicts_what_was_scored(demo_cache: Path, tmp_path: Path, head: str) -> None:
    run = hg.train_head(demo_cache, tmp_path / "run", head=head, training=QUICK)
    exported = hg.export(run, tmp_path / "head.pt2")
    assert exported.difference is not None
    assert exported.difference < 1e-4
    assert hg.report(run).path.exists()


@pytest.mark.parametrize("name", [*SOLVED, "mean", "max"])
def test_what_is_pooled_stays_in_the_range_of_the_training_graphs(run: hg.Run, name: str) -> None:
    written, train = hg.Cache.open(run.backbone.cache), run.splits.folds[0].train
    statistics = LoadedCache(written).all_statistics(train)  # [graphs, 3, sum of widths]
    assert statistics is not None
    mean, largest = statistics[train.copy(), :2].unbind(1)
    probed = statistics[train.copy()].flatten(1)
    pooled = {"probe": probed, "concat": mean, "max": largest[:, -written.widths[-1] :]}.get(
        name, mean[:, -written.widths[-1] :]
    )
    tensors = weights(run, name, 0, 3)
    low, high = next(value for key, value in tensors.items() if key.endswith("bounds"))
    torch.testing.assert_close(low, pooled.amin(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(high, pooled.amax(0), rtol=1e-4, atol=1e-5)

    own = {key.removeprefix("head."): value for key, value in tensors.items() if "head." in key}
    head = build_head(name, **stored(run, name, 0, 3)["config"]).eval()
    far = [torch.randn(5, width) for width in written.widths]
    large, larger = ([scale * layer for layer in far] for scale in (1e5, 1e6))
    head.load_state_dict(own)
    torch.testing.assert_close(head(large), head(larger))
    # A run of an earlier version has no limits, and predicts as it did.
    head.load_state_dict({key: value for key, value in own.items() if "bounds" not in key})
    assert not torch.allclose(head(large), head(larger), rtol=0.5)


def test_features_that_do_not_fit_give_the_same(
    run: hg.Run, demo_cache: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"heads": SOLVED, "seeds": [3, 5], "training": QUICK}
    small = hg.compare(demo_cache, tmp_path / "run", memory_limit=20_000, **options)
    for head in SOLVED:
        found, expected = (weights(each, head, 0, 3) for each in (small, run))
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=1e-3, rtol=1e-2)


def test_a_part_of_the_rows_is_drawn_where_memory_is_short() -> None:
    rows = np.arange(10_000, 20_000)
    all_rows = int(4 * 100 * 10_000 / solved_fits.FEATURES_SHARE)
    assert solved_fits.rows_that_fit(rows, 100, all_rows) is rows
    drawn = solved_fits.rows_that_fit(rows, 100, all_rows // 2)
    assert len(np.unique(drawn)) == 5_000
    assert set(drawn) <= set(rows)
    assert len(solved_fits.rows_that_fit(rows, 100, 0)) == solved_fits.FEWEST_ROWS


def test_without_a_validation_part_the_strength_is_the_usual_one(
    demo_cache: Path, tmp_path: Path
) -> None:
    own = hg.Cache.open(demo_cache).splits
    fold = Split(train=np.arange(60), valid=np.empty(0, np.int64), test=np.arange(60, 90))
    replace(own, folds=(fold,)).save(tmp_path / "splits.json")
    options: dict[str, Any] = {"split": str(tmp_path / "splits.json"), "training": QUICK}
    run = hg.compare(demo_cache, tmp_path / "run", heads=["probe"], seeds=[0], **options)
    assert stored(run, "probe", 0, 0)["strength"] == USUAL_STRENGTH
    assert run.results["readouts"]["probe"]["test"]["count"] == 1


@pytest.mark.parametrize("head", SOLVED)
def test_nodes_are_solved_and_probed_by_their_layers(tmp_path: Path, head: str) -> None:
    torch.manual_seed(0)
    edges = torch.randint(60, (2, 200))
    graph = Data(x=torch.randn(60, 4), edge_index=edges, y=torch.randint(3, (60,)))
    graph.train_mask, graph.val_mask, graph.test_mask = (
        torch.arange(60) // 20 == part for part in range(3)
    )
    model = build_model("gcn", {"hidden": 8, "num_layers": 2, "pool": "none"}, in_dim=4, out_dim=3)
    cache(model, [graph], tmp_path / "nodes.cache")
    run = hg.train_head(tmp_path / "nodes.cache", tmp_path / "run", head=head, training=QUICK)
    fit = stored(run, head, 0, 0)
    assert fit["strength"] == STRENGTHS[fit["best_epoch"]]
    width = weights(run, head, 0, 0)["head.classifier.weight"].size(1)
    assert width == (8 if head == "linear" else 8 * 3)


def test_links_are_trained_with_steps() -> None:
    for head in ("linear", "concat"):
        assert is_solved(head, "graph")
        assert is_solved(head, "node")
        assert not is_solved(head, "link")
        assert not build_head(head, [4, 4], 1, "link").is_solved
    assert not is_solved("mean", "graph")


def test_the_layers_of_a_solved_readout_can_be_searched(demo_cache: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"trials": 2, "seeds": [0], "training": QUICK, "head": "probe"}
    run = hg.tune(demo_cache, tmp_path / "run", **options)
    assert set(run.results["tuning"]["values"]) == {"history_layers"}
    with pytest.raises(ConfigError, match="'lr', expected one of history_layers"):
        hg.tune(demo_cache, tmp_path / "other", space={"lr": Values((1, 2))}, **options)
    with pytest.raises(ConfigError, match="'linear': found a readout that is solved"):
        hg.tune(demo_cache, tmp_path / "other", **{**options, "head": "linear"})


class Largest(Readout):
    """The largest values of the last layer, and a linear map, solved."""

    solved = True

    def build(self) -> None:
        self.finish(self.in_dims[-1], linear=True)

    def pool_graphs(self, history: Any, graphs: Any, edge_index: Tensor | None) -> Tensor:
        return graphs.max(last_layer(history))


def test_a_readout_of_ones_own_can_be_solved(demo_cache: Path, tmp_path: Path) -> None:
    run = hg.train_head(demo_cache, tmp_path / "run", head=Largest, training=QUICK)
    assert stored(run, "Largest", 0, 0)["strength"] in STRENGTHS


def test_finetuning_steps_from_the_solution(tmp_path: Path) -> None:
    model = make_model(num_layers=2)
    data = load_data("demo:", args={"num_graphs": 40})
    cache(model, data, tmp_path / "demo.cache")
    run = hg.compare(tmp_path / "demo.cache", tmp_path / "run", heads=["probe"], training=QUICK)
    still = replace(QUICK, epochs=1, lr=1e-9)
    options: dict[str, Any] = {"model": model, "data": data, "jobs": 1, "training": still}
    tuned = hg.finetune(run, tmp_path / "tuned", backbone_lr=1e-9, **options)
    assert tuned.results["head"] == "probe-finetuned"
    found = load_file(tuned.folder / "fits" / "probe-finetuned" / "fold-0-seed-0/head.safetensors")
    for name, value in weights(run, "probe", 0, 0).items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-4)
