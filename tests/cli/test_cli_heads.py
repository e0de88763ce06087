"""The commands that train readouts, as a user types them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv, global_mean_pool

from histograph_post.caches.caching import cache
from histograph_post.data import from_graphs, load_data

from ..helpers import histograph, make_model


def test_compare_ranks_the_readouts_by_validation(demo_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare"
    arguments = ["--heads", "linear,concat,mean,max,svm", "--epochs", "3", "--lr", "0.02"]
    found = histograph("compare", demo_cache, "-o", out, *arguments)
    assert found.exit_code == 0, found.output
    lines = [line.split("│")[1:-1] for line in found.stdout.splitlines() if line.startswith("│")]
    rows = [[cell.strip() for cell in line] for line in lines]
    # The checkpoint's own readout has no place: it may have seen the validation part.
    assert [row[0] for row in rows] == ["-", "1", "2", "3", "4", "5"]
    assert rows[0][1:3] == ["own readout", "-"]
    results = json.loads((out / "results.json").read_text())
    valid = [float(row[2]) for row in rows[1:]]
    assert valid == sorted(valid, reverse=True)
    for _, name, _, test, _ in rows[1:]:
        averaged = results["readouts"][name.removesuffix(" *")]["averaged"]
        assert test.split()[0] == f"{averaged['test']['mean']:.4f}"
    assert [row[1] for row in rows if row[1].endswith("*")] == ["svm *"]
    assert "* compared only" in found.stderr
    assert results["head"] == next(row[1] for row in rows[1:] if row[1] != "svm *")
    assert results["verdict"]["text"] in found.stdout
    assert f"next: histograph report {out}" in found.stdout.replace("\n", "")


def test_the_verdict_stays_where_all_else_is_quiet(demo_cache: Path, tmp_path: Path) -> None:
    given = ("-o", tmp_path / "run", "--epochs", 1, "--dim", 8, "--seeds", 0, "-q")
    done = histograph("train-head", demo_cache, *given)
    assert done.stderr == ""
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert done.stdout.splitlines()[-1] == results["verdict"]["text"]


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("mean", "mean was best at its last epoch in 1 of 1 fit"),
        ("histograph", "No epoch of histograph was better on validation than its start"),
    ],
)
def test_a_best_epoch_at_either_end_is_said(
    head: str, expected: str, demo_cache: Path, tmp_path: Path
) -> None:
    given = ("--head", head, "--epochs", 1, "--lr", 1e-12, "--dim", 8, "--seeds", 0)
    done = histograph("train-head", demo_cache, "-o", tmp_path / "run", *given)
    assert done.exit_code == 0, done.output
    assert expected in " ".join(done.stderr.split())


def test_without_an_own_readout_the_table_compares_with_the_last_layer(tmp_path: Path) -> None:
    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)

        def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edge_index).relu(), edge_index).relu()

    torch.manual_seed(0)
    dataset = load_data("demo:", args={"num_graphs": 60})
    assert cache(Encoder(), dataset, tmp_path / "a.cache") is not None
    arguments = ["--epochs", "2", "--seeds", "0-2", "--dim", "8"]
    found = histograph("train-head", tmp_path / "a.cache", "-o", tmp_path / "run", *arguments)
    assert found.exit_code == 0, found.output
    assert "against mean" in found.stdout
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    scores = {
        name: np.array(
            [fit["scores"]["test"]["accuracy"] for fit in results["fits"] if fit["head"] == name]
        )
        for name in ("mean", "histograph")
    }
    gained = (scores["histograph"] - scores["mean"]).mean()
    assert results["readouts"]["histograph"]["versus_baseline"]["mean"] == pytest.approx(gained)
    # The table gives the gain of the seeds averaged.
    averaged = results["readouts"]["histograph"]["averaged"]
    line = next(line for line in found.stdout.splitlines() if "│ histograph" in line)
    assert f"{averaged['test']['mean']:.4f} " in line
    assert f"{averaged['versus_baseline']['mean']:+.4f} [" in line


@pytest.mark.parametrize(
    "words",
    [
        ["--head-args", "foo=1"],
        ["--dim", "17"],
        ["--head", "concat", "--warm-start"],
        ["--head", "mean", "--heads", "3"],
    ],
    ids=str,
)
def test_options_are_checked_before_anything_is_trained(
    demo_cache: Path, tmp_path: Path, words: list[str]
) -> None:
    done = histograph("train-head", demo_cache, "-o", tmp_path / "run", "--epochs", 1, *words)
    assert done.exit_code == 1
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_options_in_a_comparison_are_for_all_that_have_them_or_for_one(
    demo_cache: Path, tmp_path: Path
) -> None:
    out, heads = tmp_path / "run", "mean,gmt,set-transformer"
    words = ["compare", demo_cache, "-o", out, "--heads", heads, "--epochs", 1, "--seeds", 0]
    given = ["heads=4", "gmt.heads=2", "dropout=0.25", "mean.dim=16"]
    options = [word for pair in given for word in ("--head-args", pair)]
    done = histograph(*words, "--dim", 8, *options)
    assert done.exit_code == 0, done.output
    found = {
        name: json.loads((out / f"fits/{name}/fold-0-seed-0/fit.json").read_text())["config"]
        for name in heads.split(",")
    }
    assert {name: config.get("heads") for name, config in found.items()} == {
        "mean": None,
        "gmt": 2,
        "set-transformer": 4,
    }
    assert {config["dropout"] for config in found.values()} == {0.25}
    assert [config["dim"] for config in found.values()] == [16, 8, 8]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("heds=4", "head option 'heds': found no such option of mean, gmt, expected one of dim, "),
        ("mean.heads=4", "head option 'mean.heads': found no such option of mean, expected one of"),
        ("gtm.heads=4", "'gtm.heads': found no readout 'gtm', expected one of those that are comp"),
        ("gmt.heads", "argument 'gmt.heads' is not of the form name=value"),
    ],
)
def test_an_option_that_no_compared_readout_has_is_refused(
    demo_cache: Path, tmp_path: Path, option: str, said: str
) -> None:
    words = ["compare", demo_cache, "-o", tmp_path / "run", "--heads", "mean,gmt", "--head-args"]
    done = histograph(*words, option)
    assert done.exit_code == 1
    (line,) = done.stderr.splitlines()
    assert said in line
    assert not (tmp_path / "run").exists()


def test_the_readout_to_beat_is_as_wide(demo_cache: Path, tmp_path: Path) -> None:
    given = ("-o", tmp_path / "run", "--epochs", 1, "--dim", 8, "--json", "-q")
    done = histograph("train-head", demo_cache, *given)
    alone = histograph(
        "train-head", demo_cache, "--head", "mean", *("-o", tmp_path / "mean"), *given[2:]
    )
    rows = [json.loads(result.stdout)["readouts"]["mean"] for result in (done, alone)]
    assert rows[0] == rows[1]


def test_a_readout_that_is_named_twice_is_trained_once(demo_cache: Path, tmp_path: Path) -> None:
    words = ("--heads", "mean,linear,mean", "--epochs", 1, "--seeds", 0, "-o", tmp_path / "run")
    done = histograph("compare", demo_cache, *words)
    assert done.exit_code == 0, done.output
    assert "[1/2] linear" in done.stderr


def test_errors_where_less_is_better_are_said_to_be(tmp_path: Path) -> None:
    model = make_model(num_layers=2)
    graphs = load_data("demo:", args={"num_graphs": 40})
    assert cache(model, graphs, tmp_path / "a.cache") is not None
    words = ("--task", "regression", "--epochs", 1, "--dim", 8, "--seeds", 0)
    done = histograph("train-head", tmp_path / "a.cache", *words, "-o", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "Test rmse over 1 fold and 1 seed; lower is better" in done.stdout
    row = next(line for line in done.stdout.splitlines() if "│ histograph" in line)
    assert "±" not in row  # of one score


def test_a_memory_limit_without_a_unit_is_refused(demo_cache: Path, tmp_path: Path) -> None:
    done = histograph("train-head", demo_cache, "-o", tmp_path / "run", "--memory-limit", "4")
    assert done.exit_code == 2
    assert "found 4 bytes, expected 4GB or so" in " ".join(done.stderr.split())


def test_folders_of_caches_are_verified_and_others_named(demo_cache: Path, tmp_path: Path) -> None:
    for fold in range(2):
        shutil.copytree(demo_cache, tmp_path / "caches" / f"fold-{fold}.cache")
    done = histograph("verify", tmp_path / "caches", "--json", "-q")
    assert done.exit_code == 0, done.output
    one = json.loads(histograph("verify", demo_cache, "--json", "-q").stdout)
    assert json.loads(done.stdout) == {"ok": True, "files": 2 * one["files"]}
    shard = tmp_path / "caches" / "fold-1.cache" / "shard-00000.h5"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert histograph("verify", tmp_path / "caches").exit_code == 1
    given = ("-o", tmp_path / "run", "--epochs", 1, "--dim", 8, "-q")
    assert histograph("train-head", demo_cache, *given).exit_code == 0
    (tmp_path / "empty").mkdir()
    for folder, what in ((tmp_path / "run", "a run"), (tmp_path / "empty", "no manifest.json")):
        for command in (("verify",), ("train-head", "-o", tmp_path / "x")):
            done = histograph(*command, folder)
            assert done.exit_code == 1
            assert f"{folder}: found {what}, expected a cache" in done.stderr


def test_a_normalization_can_be_asked_for(demo_cache: Path, tmp_path: Path) -> None:
    given = ("--epochs", 1, "--dim", 8, "-q", "--head-args", "normalization=none")
    done = histograph("train-head", demo_cache, "-o", tmp_path / "run", *given)
    assert done.exit_code == 0, done.output
    stored = json.loads((tmp_path / "run" / "head.json").read_text())
    assert stored["config"]["normalization"] == "none"


def test_parts_that_are_missing_are_said_to_be(demo_cache: Path, tmp_path: Path) -> None:
    given = ("-o", tmp_path / "run", "--epochs", 1, "--dim", 8, "--splits", "random:0.8,0,0.2")
    done = histograph("train-head", demo_cache, *given)
    assert done.exit_code == 0, done.output
    assert "1 fold without a valid part" in done.stderr
    assert "without a test part" not in done.stderr


class Knows(torch.nn.Module):
    """Its own readout is told what is true; the layers that a head reads are not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        batch: torch.Tensor,
        truth: torch.Tensor,
    ) -> torch.Tensor:
        x = self.second(self.first(x, edge_index).relu(), edge_index).relu()
        return global_mean_pool(x, batch).mean(dim=1, keepdim=True) * 0 + truth - 0.5


@pytest.mark.parametrize("seeds", ["0", "0-1"])
def test_an_own_readout_that_is_better_is_to_be_kept(tmp_path: Path, seeds: str) -> None:
    torch.manual_seed(0)
    graphs = load_data("demo:", args={"num_graphs": 100}).graphs
    for graph in graphs:
        graph.truth = graph.y.float().view(1, 1)
    assert cache(Knows(), from_graphs(graphs), tmp_path / "a.cache") is not None
    arguments = ["--epochs", "1", "--lr", "1e-5", "--seeds", seeds, "--dim", "4", "--heads", "1"]
    arguments += ["--head-args", "probe=0"]
    found = histograph("train-head", tmp_path / "a.cache", "-o", tmp_path / "run", *arguments)
    assert found.exit_code == 0, found.output
    kept = "Keep your own readout: histograph has test accuracy"
    assert kept in found.stdout
    assert f"next: histograph report {tmp_path / 'run'}" in found.stdout
    assert histograph("report", tmp_path / "run").exit_code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Keep your own readout" in page
    bold = page[page.index('<tr class="chosen">') :].partition("</th>")[0]
    assert bold.endswith("own readout")


@pytest.mark.parametrize("best", [False, True])
def test_a_search_that_ends_at_the_defaults_says_so_and_trains_them_once(
    demo_cache: Path, tmp_path: Path, best: bool
) -> None:
    space, out = tmp_path / "space.toml", tmp_path / "run"
    # The other trial learns nothing; or it is the only one that does.
    space.write_text("[lr]\nvalues = [1e-9, 3e-2]\n")
    words = ["tune", demo_cache, "-o", out, "--trials", 4, "--space", space, "--no-prune"]
    words += ["--head", "mean", "--epochs", 8, "--batch-size", 16, "--seeds", "0-1"]
    done = histograph(*words, "--metric", "roc_auc", "--lr", 3e-2 if best else 1e-9)
    assert done.exit_code == 0, done.output
    said = "No trial had a better validation score than the defaults, so these are kept." in (
        " ".join(done.stderr.split())
    )
    assert said == best
    names = sorted(path.name for path in (out / "fits").iterdir())
    assert names == (["mean"] if best else ["mean", "mean-tuned"])
    results = json.loads((out / "results.json").read_text())
    assert results["head"] == names[-1]
    assert len(results["fits"]) == 2 * len(names)
    facts = json.loads(histograph("inspect", out, "--json").stdout)["facts"]
    assert facts["predicts with"] == f"2 `{names[-1]}` heads averaged (2 seeds)"


def test_a_width_that_is_given_is_not_searched(demo_cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["tune", demo_cache, "-o", out, "--trials", 2, "--head", "mean", "--dim", 8]
    done = histograph(*words, "--epochs", 1, "--seeds", 0)
    assert done.exit_code == 0, done.output
    results = json.loads((out / "results.json").read_text())
    assert "dim" not in results["tuning"]["values"]
    assert "dim = 8\n" in (out / "best.toml").read_text()
