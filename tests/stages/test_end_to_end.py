"""Backbone and head from random weights: a run like any other, beside the backbone alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import histograph_post as hg
from histograph_post.errors import ConfigError, ModelError
from histograph_post.experiments.backbones import untrained_model
from histograph_post.experiments.end_to_end import plan_end_to_end
from histograph_post.experiments.options import HeadSpec, with_keywords
from histograph_post.heads.standardize import EachLayerNorm
from histograph_post.runs.run import Run
from histograph_post.training.options import TrainingOptions
from histograph_post.utils.text import difference

from ..helpers import histograph
from ..reporting.pages import Reader

QUICK = TrainingOptions(epochs=2, batch_size=16, lr=1e-2)
DEMO: dict[str, Any] = {
    "data_args": {"num_graphs": 40},
    "model_args": {"hidden": 8, "num_layers": 2},
    "split": "kfold:3",
    "training": QUICK,
    "head_options": {"dim": 8, "heads": 2},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "e2e"
    return hg.pretrain("gin", "demo:", out, head="histograph", seeds=(0, 1), **DEMO)


def test_results_pair_the_head_with_the_backbone_alone(run: Run) -> None:
    rows = run.results["readouts"]
    assert list(rows) == ["own readout", "histograph-end-to-end"]
    scores = {
        name: {
            (fit["fold"], fit["seed"]): fit["scores"]["test"]["accuracy"]
            for fit in run.results["fits"]
            if fit["head"] == name
        }
        for name in rows
    }
    assert len(scores["own readout"]) == 6
    gains = [
        scores["histograph-end-to-end"][key] - own for key, own in scores["own readout"].items()
    ]
    assert len(gains) == 6
    assert rows["histograph-end-to-end"]["versus_own"]["mean"] == pytest.approx(np.mean(gains))
    assert rows["own readout"]["versus_own"] is None


def test_report_has_one_column_against_the_own_readout(run: Run, tmp_path: Path) -> None:
    page = Reader(hg.report(run, tmp_path / "r.html").path.read_text(encoding="utf-8"))
    (column,) = [at for at, name in enumerate(page.tables[0][0]) if name == "against own readout"]
    gain = run.results["readouts"]["histograph-end-to-end"]["averaged"]["versus_own"]
    shown = {row[0]: row[column] for row in page.tables[0][1:]}
    assert shown["histograph-end-to-end"] == difference(gain)


def test_fits_are_done_by_fold_then_network_then_seed(run: Run) -> None:
    found = [(fit["fold"], fit["head"], fit["seed"]) for fit in run.results["fits"]]
    folds = sorted({fold for fold, _, _ in found})
    assert found == [
        (fold, head, seed)
        for fold in folds
        for head in ("own readout", "histograph-end-to-end")
        for seed in (0, 1)
    ]


def test_baseline_is_the_plain_pretraining(run: Run, tmp_path: Path) -> None:
    """The same initial weights and batches: the comparison is of the readouts alone."""
    options = {name: value for name, value in DEMO.items() if name != "head_options"}
    plain = hg.pretrain("gin", "demo:", tmp_path / "p", seed=1, **options)
    own = [fit for fit in run.results["fits"] if (fit["head"], fit["seed"]) == ("own readout", 1)]
    assert [fit["scores"] for fit in own] == [fold["scores"] for fold in plain.results["folds"]]


def test_predictions_are_those_the_run_stored(run: Run) -> None:
    found = hg.predict(run, "demo:", data_args={"num_graphs": 40})
    chosen = json.loads((run.folder / "head.json").read_text())
    assert chosen["layer_norm"]
    assert not chosen["standardize"]
    stored = load_file(run.fit_folder(run.head, *run.chosen) / "test.safetensors")
    assert len(stored["rows"]) >= 10
    values = found.outputs[stored["rows"]] * run.saved_head.temperature
    np.testing.assert_allclose(values, stored["outputs"], rtol=1e-3, atol=1e-4)


def test_every_fold_is_a_checkpoint_to_cache(run: Run, tmp_path: Path) -> None:
    result = histograph("cache", run.folder, "-o", tmp_path / "c")
    assert result.exit_code == 0, result.output
    # Its own classifier still has its random weights.
    assert "fold-2 was trained with the readout" in result.stderr
    for number in range(3):
        cache = hg.Cache.open(tmp_path / "c" / f"fold-{number}.cache")
        trained = json.loads((run.folder / f"fold-{number}" / "results.json").read_text())
        assert cache.weights_sha256 == trained["weights_sha256"]


def test_all_that_the_history_depends_on_moves_from_its_initial_weights(run: Run) -> None:
    options, others = with_keywords(None, _without_head(DEMO))
    stage = plan_end_to_end("gin", "demo:", HeadSpec("mean"), options, **others)
    given = stage.pretraining
    fit = json.loads((run.folder / "head.json").read_text())
    before = untrained_model(given.model_spec, given.dataset, 1, seed=fit["seed"]).state_dict()
    after = load_file(run.folder / "model.safetensors")
    same = {name for name in before if torch.equal(before[name], after[name])}
    # The model's own classifier takes no part, and the settings are no weights.
    assert same == {"classifier.weight", "classifier.bias", "_extra_state"}


def _without_head(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "head_options"}


def test_rows_are_brought_to_one_scale_each() -> None:
    layers = [1e3 * torch.randn(5, 4) + 7, torch.randn(5, 6), torch.zeros(5, 3)]
    found = EachLayerNorm([4, 6, 3])(layers)
    for layer in found[:2]:
        torch.testing.assert_close(layer.mean(dim=1), torch.zeros(5), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            layer.std(dim=1, unbiased=False), torch.ones(5), atol=1e-4, rtol=0
        )
    assert torch.equal(found[2], torch.zeros(5, 3))
    torch.testing.assert_close(EachLayerNorm([4])([layers[0][2:3]])[0], found[0][2:3])


@pytest.mark.parametrize("depth", [2, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("data", ["demo:", "planetoid:Cora"])
def test_any_depth_trains_for_graphs_and_nodes(
    depth: int, data: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    level = "graph" if data == "demo:" else "node"
    root = None if level == "graph" else request.getfixturevalue("shared_data")
    epochs = 10 if level == "graph" else 4  # twenty graphs are few steps
    run = hg.pretrain(
        "gcn",
        data,
        tmp_path / "run",
        head="histograph",
        data_root=root,
        data_args={"num_graphs": 20} if level == "graph" else {},
        model_args={"hidden": 8, "num_layers": depth},
        training=TrainingOptions(epochs=epochs, lr=1e-2, warmup=0),
        head_options={"dim": 8, "node_attention": level == "graph"},
        checkpoint_layers=depth == 64,
    )
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * epochs
    for name in ("own readout", "histograph-end-to-end"):
        losses = [line["loss"] for line in lines if line["head"] == name]
        assert np.isfinite(losses).all()
        assert losses[-1] < losses[0]
    if level == "node":
        assert run.results["task"]["level"] == "node"


def test_embedding_network_needs_no_readout_of_its_own(tmp_path: Path) -> None:
    source = tmp_path / "mine.py"
    source.write_text(
        "import torch\n"
        "from torch_geometric.nn import GCNConv\n"
        "class Embed(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one, self.two = GCNConv(-1, 8), GCNConv(8, 8)\n"
        "    def forward(self, x, edge_index):\n"
        "        return self.two(self.one(x, edge_index).relu(), edge_index)\n"
    )
    options = {**_without_head(DEMO), "model_args": {}}
    with pytest.raises(ModelError):
        hg.pretrain(f"{source}:Embed", "demo:", tmp_path / "x", head="histograph", **options)
    run = hg.pretrain(
        f"{source}:Embed",
        "demo:",
        tmp_path / "run",
        head="histograph",
        baseline=False,
        only=[2],
        **options,
    )
    assert [fit["fold"] for fit in run.results["fits"]] == [2]
    assert [path.name for path in run.folder.glob("fold-*")] == ["fold-2"]
    assert list(run.results["readouts"]) == ["histograph-end-to-end"]
    found = hg.predict(run, "demo:", data_args={"num_graphs": 40}, model=f"{source}:Embed")
    assert len(found) == 40


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a readout such as"):
        hg.pretrain("gin", "demo:", tmp_path / "x", head="histogram", **DEMO)
    command = ["pretrain", "--model", "gin", "--data", "demo:", "-o", str(tmp_path / "x"), "-q"]
    for extra, code in ((["--dim", "8"], 2), (["--head", "mean", "--only", "7"], 1),
                        (["--head", "mean", "--amp", "--device", "cpu"], 1)):  # fmt: skip
        result = histograph(*command, *extra)
        assert result.exit_code == code, result.output
    assert not (tmp_path / "x").exists()
