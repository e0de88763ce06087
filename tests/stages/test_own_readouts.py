"""A readout of one's own goes through every command, named on its command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from safetensors.torch import save_file
from torch_geometric.data import Batch
from typer.testing import CliRunner

import histograph_post as hg
from histograph_cli.app import app
from histograph_post.heads import registry

from ..helpers import make_model

HEAD = f"{Path(__file__).parents[2] / 'examples' / 'my_head.py'}:MeanAndMax"
QUICK = ("--epochs", 2, "--dim", 8, "-q")
DEMO = ("--data", "demo:", "--data-args", "num_graphs=40")


@pytest.fixture(autouse=True)
def no_names_left() -> Iterator[None]:
    """Every command starts as a process of its own does: no readout has been given a name."""
    registry._registered.clear()
    yield
    registry._registered.clear()


def histograph(*words: object, fails: bool = False) -> Result:
    registry._registered.clear()
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == int(fails), result.output + result.stderr
    return result


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache and a run of the example."""
    folder = tmp_path_factory.mktemp("work")
    save_file(make_model(num_layers=2).state_dict(), folder / "model.safetensors")
    from_file = ("--model", "gin", "--checkpoint", folder / "model.safetensors")
    histograph("cache", *from_file, *DEMO, "-o", folder / "demo.cache")
    histograph("train-head", folder / "demo.cache", "--head", HEAD, *QUICK, "-o", folder / "run")
    return folder


def test_train_head_names_it_in_its_results(work: Path) -> None:
    results = json.loads((work / "run" / "results.json").read_text())
    assert list(results["readouts"]) == ["own readout", "mean", "MeanAndMax"]
    assert results["head"] == "MeanAndMax"


def test_predict_wants_it_named_and_then_predicts(work: Path, tmp_path: Path) -> None:
    refused = histograph("predict", work / "run", *DEMO, "-o", tmp_path / "no.csv", fails=True)
    assert "--head my_head.py:MeanAndMax" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    histograph("predict", work / "run", "--head", HEAD, *DEMO, "-o", tmp_path / "yes.csv")
    assert len((tmp_path / "yes.csv").read_text().splitlines()) == 41


def test_one_that_was_edited_is_refused(work: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    text = Path(HEAD.partition(":")[0]).read_text()
    file.write_text(text)
    own, out = ("--head", f"{file}:MeanAndMax"), tmp_path / "run"
    train = ("train-head", work / "demo.cache", *own, *QUICK, "-o", out)
    histograph(*train)
    histograph("export", out, "--whole", *own, "-o", tmp_path / "whole")
    file.write_text(f"# A comment.\n{text}")
    histograph("predict", out, *own, *DEMO, "-o", tmp_path / "same.csv")
    file.write_text(f"{text}\nSCALE = 2\n")
    for run in (out, tmp_path / "whole"):
        said = histograph("predict", run, *own, *DEMO, "-o", tmp_path / "no.csv", fails=True)
        assert "own.py:MeanAndMax: found code" in said.stderr
    said = histograph(*train, fails=True).stderr
    assert re.search("found a run with heads code [0-9a-f]{12}, expected", said)


def test_trusted_it_need_not_be_named(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    histograph("trust", work / "run", "--yes")
    histograph("predict", work / "run", *DEMO, "-o", tmp_path / "predictions.csv")
    histograph("export", work / "run", "-o", tmp_path / "head.pt2")
    page = tmp_path / "page.html"
    done = histograph("report", work / "run", "-o", page, "--json")
    assert not any("my_head.py:MeanAndMax" in note for note in json.loads(done.stdout)["notes"])


def test_export_gives_a_program_without_it(work: Path, tmp_path: Path) -> None:
    histograph("export", work / "run", "--head", HEAD, "-o", tmp_path / "head.pt2")
    program = torch.export.load(tmp_path / "head.pt2").module()
    assert program(torch.randn(5, 3, 8), torch.tensor([2, 3])).shape == (2, 1)


def test_report_leaves_out_what_needs_it_unless_it_is_named(work: Path, tmp_path: Path) -> None:
    written = {}
    for name, words in (("without", ()), ("with", ("--head", HEAD))):
        page = tmp_path / f"{name}.html"
        done = histograph("report", work / "run", *words, "-o", page, "--json")
        written[name] = json.loads(done.stdout)
    assert any("--head my_head.py:MeanAndMax" in note for note in written["without"]["notes"])
    assert set(written["without"]["figures"]) < set(written["with"]["figures"])


def test_what_tune_leaves_can_be_used(work: Path, tmp_path: Path) -> None:
    tuned, runner = tmp_path / "tuned", ("--trials", 1, "--epochs", 1, "--seeds", 0)
    done = histograph("tune", work / "demo.cache", "--head", HEAD, *runner, "-o", tuned)
    assert f"next: histograph report {tuned} --head {HEAD}" in done.stdout
    best = ("--config", tuned / "best.toml", "--seeds", 0, "-q")
    histograph("train-head", work / "demo.cache", *best, "-o", tmp_path / "again")
    refused = histograph("finetune", tuned, "--head", HEAD, "-o", tmp_path / "no", fails=True)
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "found a run of tune, expected one of train-head" in refused.stderr


def test_the_line_that_export_prints_names_it(work: Path, tmp_path: Path) -> None:
    words = ("export", work / "run", "--whole", "--head", HEAD, "-o", tmp_path / "whole", "--json")
    usage = json.loads(histograph(*words).stdout)["usage"]
    batch = Batch.from_data_list(list(hg.load_data("demo:", args={"num_graphs": 3})))
    assert eval(usage, {"hg": hg, "batch": batch}).shape[0] == 3


def test_compare_tune_and_finetune_take_it(work: Path, tmp_path: Path) -> None:
    histograph(
        *("compare", work / "demo.cache", "--heads", f"mean,{HEAD}", *QUICK),
        *("-o", tmp_path / "compared"),
    )
    readouts = json.loads((tmp_path / "compared" / "results.json").read_text())["readouts"]
    assert {"mean", "MeanAndMax"} <= set(readouts)
    histograph(
        *("tune", work / "demo.cache", "--head", HEAD, "--trials", 2, "--epochs", 2, "-q"),
        *("--seeds", 0, "-o", tmp_path / "tuned"),
    )
    finetune = ("finetune", work / "run", "--epochs", 1, "-q")
    refused = histograph(*finetune, "-o", tmp_path / "no", fails=True)
    assert "--head my_head.py:MeanAndMax" in refused.stderr
    histograph(*finetune, "--head", HEAD, "-o", tmp_path / "finetuned")
    results = json.loads((tmp_path / "finetuned" / "results.json").read_text())
    assert results["head"] == "MeanAndMax-finetuned"


def test_options_in_a_comparison_name_it_as_the_command_line_does(
    work: Path, tmp_path: Path
) -> None:
    words = ("compare", work / "demo.cache", *QUICK, "--seeds", 0, "--heads", f"mean,{HEAD}")
    for number, name in enumerate((HEAD, "MeanAndMax")):
        out = tmp_path / f"run-{number}"
        histograph(*words, "--head-args", f"{name}.history_layers=1", "-o", out)
        fit = json.loads((out / "fits/MeanAndMax/fold-0-seed-0/fit.json").read_text())
        assert fit["config"]["history_layers"] == 1
    twin = tmp_path / "my_head.py"
    twin.write_text(Path(HEAD.rpartition(":")[0]).read_text())
    heads = f"{HEAD},{twin}:MeanAndMax"
    refused = histograph("compare", work / "demo.cache", "--heads", heads, "-o", "no", fails=True)
    assert "which are both called MeanAndMax" in refused.stderr


def test_python_takes_the_class_or_its_registered_name(work: Path, tmp_path: Path) -> None:
    registry.head_name(HEAD)
    given: Any = registry.head_info("MeanAndMax").load()
    registry._registered.clear()
    quick = {"dim": 8, "training": {"epochs": 2}}
    by_class = hg.train_head(work / "demo.cache", tmp_path / "class", head=given, **quick)
    assert by_class.results["head"] == "MeanAndMax"
    hg.register_head("mine")(given)
    by_name = hg.train_head(work / "demo.cache", tmp_path / "name", head="mine", **quick)
    np.testing.assert_equal(
        by_name.results["readouts"]["mine"], by_class.results["readouts"]["MeanAndMax"]
    )


def test_a_run_under_a_registered_name_takes_its_class(work: Path, tmp_path: Path) -> None:
    file, run = tmp_path / "pooled.py", tmp_path / "run"
    text = Path(HEAD.partition(":")[0]).read_text()
    file.write_text(text)
    registry.head_name(f"{file}:MeanAndMax")
    given: Any = registry.head_info("MeanAndMax").load()
    registry._registered.clear()
    hg.register_head("pooled-twice")(given)
    hg.train_head(
        *(work / "demo.cache", run), head="pooled-twice", dim=8, training={"epochs": 2}, seeds=(0,)
    )
    out, own = tmp_path / "predictions.csv", ("--head", f"{file}:MeanAndMax")
    refused = histograph("predict", run, *DEMO, "-o", out, fails=True).stderr
    assert "as in --head FILE.py:CLASS" in refused
    assert "trust" not in refused
    assert "named by --model, --data and --head" in histograph("trust", run).stderr
    histograph("predict", run, *own, *DEMO, "-o", out)
    finetune = ("finetune", run, *own, "--epochs", 1, "--seeds", 0, "--jobs", 2, "-q")
    histograph(*finetune, "-o", tmp_path / "tuned")
    histograph("predict", tmp_path / "tuned", *own, *DEMO, "-o", tmp_path / "tuned.csv")
    stranger = ("--head", f"{file}:MeanAndMin")
    refused = histograph("predict", run, *stranger, *DEMO, "-o", "no", fails=True).stderr
    assert f"expected a class of it, as {file}:MeanAndMax" in refused
    file.write_text(f"{text}\nSCALE = 2\n")
    refused = histograph("predict", run, *own, *DEMO, "-o", "no", fails=True).stderr
    assert "MeanAndMax: found code" in refused


def test_a_decorator_in_the_file_says_which_readout_of_the_run_a_class_is(
    work: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "two.py", tmp_path / "compared"
    text = Path(HEAD.partition(":")[0]).read_text()
    file.write_text(
        f"{text}\nfrom histograph_post import register_head\n"
        "register_head('first')(MeanAndMax)\n"
        "@register_head('second')\nclass Other(MeanAndMax): ...\n"
    )
    registry.head_name(f"{file}:Other")
    quick = {"dim": 8, "training": {"epochs": 1}, "seeds": (0,)}
    hg.compare(work / "demo.cache", out, heads=["first", "second"], **quick)
    for name, known in (("Other", "second"), ("MeanAndMax", "first")):
        registry._registered.clear()
        file.write_text(f"{file.read_text()}# for {name}: a new file is run again\n")
        own = hg.Run.open(out).with_head(f"{file}:{name}")
        assert own.head == known


BROKEN = """
from histograph_post.heads import Readout
class Wide(Readout):
    def build(self): self.finish(2)
    def pool_graphs(self, history, graphs, edge_index): return graphs.mean(self.layers(history)[-1])
class Fails(Wide):
    def pool_graphs(self, history, graphs, edge_index):
        return graphs.mean(history) @ graphs.nothing
class Fixed(Wide):
    def pool_graphs(self, history, graphs, edge_index):
        if len(graphs.index) < 20:
            raise RuntimeError("graphs of this data are larger")
        return graphs.mean(self.layers(history)[-1][:, :2])
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wide", "Wide.pool_graphs: found [2, 8], expected [2, 2]"),
        ("Fails", "'Fails' failed at broken.py:8: AttributeError"),
        ("path", "found broken.py:path, expected a subclass"),
    ],
)
def test_one_that_fails_is_refused_before_anything_is_trained(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "broken.py").write_text(f"from os import path\n{BROKEN.lstrip()}")
    monkeypatch.chdir(tmp_path)
    words = ("compare", work / "demo.cache", "--heads", f"mean,broken.py:{name}", *QUICK)
    assert message in histograph(*words, "-o", "run", fails=True).stderr
    assert not list(tmp_path.glob("run*"))


def test_one_for_graphs_of_the_users_data_alone_is_trained(work: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ("--head", f"{tmp_path / 'broken.py'}:Fixed", *QUICK, "--seeds", 0)
    histograph("train-head", work / "demo.cache", *words, "-o", tmp_path / "run")


def test_inspect_says_what_code_a_run_names(work: Path) -> None:
    shown = histograph("inspect", work / "run").stdout
    assert "MeanAndMax: custom readout" in shown
    assert "my_head.py:MeanAndMax" in shown
    assert re.search("readout +. validation +. +test", shown)


def test_a_folder_that_is_not_there_is_what_the_command_takes(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    said = histograph("inspect", nowhere, fails=True).stderr
    assert "expected a checkpoint, a cache or a run" in said
    said = histograph("finetune", nowhere, "-o", tmp_path / "run", fails=True).stderr
    assert "expected a run, a cache or several caches" in said


GATED = '''
import torch
from histograph_post.heads import Readout
from histograph_post.heads import Explanation


class Gated(Readout):
    """A sum over nodes, each weighed by a gate that is not normalised."""

    def build(self, *, temperature: float = 1.0) -> None:
        self.require("temperature", temperature > 0, "a positive number")
        self.gate = torch.nn.Linear(self.in_dims[-1], 1)
        self.finish(self.in_dims[-1])

    def pool_graphs(self, history, graphs, edge_index):
        last = self.layers(history)[-1]
        return graphs.sum(last * torch.sigmoid(self.gate(last) / self.temperature))

    def explain(self, history, batch=None, *, num_graphs=None, edge_index=None):
        layers, graphs = self.read(history, batch, num_graphs)
        last = self.layers(layers)[-1]
        weights = torch.zeros(graphs.num_graphs, len(self.in_dims))
        weights[:, -1] = 1
        return Explanation(weights, 100 * torch.sigmoid(self.gate(last)).flatten())
'''


def test_report_draws_an_explanation_with_gradients_and_of_any_scale(
    work: Path, tmp_path: Path
) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    head, run, page = f"{tmp_path / 'gated.py'}:Gated", tmp_path / "run", tmp_path / "page.html"
    histograph("train-head", work / "demo.cache", "--head", head, *QUICK, "-o", run)
    histograph("report", run, "--head", head, "-o", page)
    factors = re.findall(r"at most ([\d.]+) times the mean attention", page.read_text())
    # Gates of an untrained map are near a half: no node has twice the mean of its graph.
    assert factors
    assert all(float(factor) < 3 for factor in factors)


def test_an_option_can_be_refused_while_a_readout_is_built(work: Path, tmp_path: Path) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    words = ("--head", f"{tmp_path / 'gated.py'}:Gated", "--head-args", "temperature=-1")
    refused = histograph(
        "train-head", work / "demo.cache", *words, "-o", tmp_path / "r", fails=True
    )
    assert "found temperature=-1" in refused.stderr
    assert "expected a positive number" in refused.stderr
