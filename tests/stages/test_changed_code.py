"""A model's code that changed after caching is refused, and what it makes of a canary is shown."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import histograph_post as hg
from histograph_post.caches.manifest import CANARY_NAME, read_manifest
from histograph_post.errors import CacheError, HistographError, ModelError

from ..helpers import demo_graphs, histograph, make_model

CODE = """
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool
from histograph_post.data import load_data

class Net(nn.Module):
    def __init__(self, in_channels, num_classes, width=8):
        super().__init__()
        self.first, self.second = GCNConv(in_channels, width), GCNConv(width, width)
        self.last = nn.Linear(width, num_classes)

    def forward(self, x, edge_index, batch):
        x = self.second(self.first(x, edge_index).relu(), edge_index)
        return self.last(global_mean_pool(x, batch))

def graphs():
    return load_data("demo:", args={"num_graphs": 24}).graphs
"""
MODEL = ("--model", "mine.py:Net")
DATA = ("--data", "mine.py:graphs")
QUICK = ("--epochs", 1, "--dim", 8, "--seeds", 0, "-q")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a user's own, its weights, a cache and a run, by command."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        scope: dict[str, Callable[..., torch.nn.Module]] = {}
        exec(CODE, scope)
        torch.manual_seed(0)
        torch.save(scope["Net"](4, 1).state_dict(), "net.pt")
        for words in (
            ("cache", *MODEL, "--checkpoint", "net.pt", *DATA, "-o", "demo.cache", "-q"),
            ("train-head", "demo.cache", "-o", "run", *QUICK),
        ):
            done = histograph(*words)
            assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def work(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that to edit, which is also the current folder."""
    shutil.copytree(made, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


COMMANDS: dict[str, tuple[object, ...]] = {
    "predict": ("predict", "run", *DATA, "-o", "out.csv"),
    "finetune-run": ("finetune", "run", *DATA, "-o", "out", "--epochs", 1),
    "finetune-cache": ("finetune", "demo.cache", *DATA, "-o", "out", "--epochs", 1, "--dim", 8),
    "export": ("export", "run", "--whole", "-o", "out"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_edit_that_changes_activations_is_refused_with_both_hashes(name: str, work: Path) -> None:
    _, manifest = read_manifest("demo.cache")
    assert manifest.provenance is not None
    (recorded,) = manifest.provenance.sources.values()
    Path("mine.py").write_text(CODE.replace("relu()", "tanh()"))
    done = histograph(*COMMANDS[name], *MODEL)
    assert done.exit_code == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert recorded[:12] in line
    assert len(set(re.findall(r"\b[0-9a-f]{12}\b", line))) == 2
    assert "layer 'first' differs by" in line
    assert "cache again" in line
    assert not Path("out").exists()
    assert not Path("out.csv").exists()


def test_edit_of_a_comment_changes_nothing(work: Path) -> None:
    edited = CODE.replace("(nn.Module):", '(nn.Module):\n    """Mine."""').replace("24", "25")
    Path("mine.py").write_text(f"# the same\n{edited}")
    done = histograph(*COMMANDS["predict"], *MODEL)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", ["predict", "finetune-run", "export"])
def test_edit_that_the_canary_does_not_reach_is_refused(name: str, work: Path) -> None:
    rare = "x = x if len(x) < 9999 else 2 * x\n        return self.last"
    Path("mine.py").write_text(CODE.replace("return self.last", rare))
    done = histograph(*COMMANDS[name], *MODEL)
    assert done.exit_code == 1
    assert "other graphs may reach what was edited" in done.stderr
    assert len(set(re.findall(r"\b[0-9a-f]{12}\b", done.stderr))) == 2


def test_same_file_in_another_place_is_the_same(work: Path) -> None:
    Path("models").mkdir()
    Path("mine.py").rename("models/other.py")
    hg.load("run", model="models/other.py:Net")


def test_load_needs_no_sizes_and_no_cache(work: Path) -> None:
    graphs = demo_graphs(6)
    expected = hg.load("run", model="mine.py:Net").predict(graphs).outputs
    done = histograph("export", "run", "--whole", *MODEL, "-o", "whole")
    assert done.exit_code == 0, done.output
    shutil.rmtree("demo.cache")
    Path("net.pt").unlink()
    usage = next(line for line in done.stdout.splitlines() if "hg.load(" in line)
    loaded = eval(usage[usage.index("hg.load(") : usage.index("(batch)")], {"hg": hg})
    assert (loaded.predict(graphs).outputs == expected).all()
    Path("mine.py").write_text(CODE.replace("relu()", "tanh()"))
    with pytest.raises(ModelError, match="differs by"):
        hg.load("whole", model="mine.py:Net")


def test_module_that_is_handed_over_is_tried_too(work: Path) -> None:
    model = make_model().eval()
    hg.cache(model, demo_graphs(24), "memory.cache")
    run = hg.train_head("memory.cache", "memory", head="mean", seeds=[0])
    hg.load(run, model=model)
    handle = model.convs[1].register_forward_hook(lambda module, args, output: output * 1.01)
    with pytest.raises(ModelError, match=r"activations are not those.*its source is the same"):
        hg.load(run, model=model)
    handle.remove()
    hg.load(run, model=model)


def test_cache_is_not_completed_by_other_code(work: Path) -> None:
    words = ("cache", *MODEL, "--checkpoint", "net.pt", *DATA, "-o", "demo.cache", "-q")
    assert histograph(*words).exit_code == 0  # there already
    Path("mine.py").write_text(CODE.replace("relu()", "tanh()"))
    for _ in range(2):  # complete, and then as if it had been killed
        done = histograph(*words)
        assert done.exit_code == 1
        assert "by code with other activations (layer 'first'" in done.stderr
        Path("demo.cache/manifest.json").unlink(missing_ok=True)
    assert histograph(*words, "--overwrite").exit_code == 0


def test_canary_that_was_changed_is_refused(work: Path) -> None:
    canary = Path("run") / CANARY_NAME
    contents = bytearray(canary.read_bytes())
    contents[-1] ^= 1
    canary.write_bytes(contents)
    with pytest.raises(CacheError, match=r"canary\.safetensors: found checksum"):
        hg.load("run", model="mine.py:Net")
    canary.unlink()
    with pytest.raises(HistographError, match=r"canary\.safetensors"):
        hg.load("run", model="mine.py:Net")


def test_changed_canary_of_a_cache_goes_into_no_run(work: Path) -> None:
    shutil.copy("run/head.json", Path("demo.cache") / CANARY_NAME)
    done = histograph("train-head", "demo.cache", "-o", "again", *QUICK)
    assert done.exit_code == 1
    assert re.fullmatch(
        r"error: .*canary\.safetensors: found checksum .*, expected .*\n", done.stderr
    )


def test_tuned_backbone_has_a_canary_of_its_own(work: Path) -> None:
    rate = ("--backbone-lr", 0.05)
    done = histograph("finetune", "run", *MODEL, *DATA, "-o", "tuned", "--epochs", 2, *rate)
    assert done.exit_code == 0, done.output
    hg.load("tuned", model="mine.py:Net")
    Path("mine.py").write_text(CODE.replace("relu()", "tanh()"))
    with pytest.raises(ModelError, match="differs by"):
        hg.load("tuned", model="mine.py:Net")


def test_another_working_directory_changes_nothing(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (work / "names.toml").write_text('"*" = "*"\n')
    data = hg.load_data("demo:", args={"num_graphs": 24}).graphs
    torch.save(data, work / "graphs.pt")
    model = ("--model", "mine.py:Net", "--key-map", "names.toml", "--data", "graphs.pt")
    far = tmp_path / "far"
    done = histograph("cache", *model, "--checkpoint", "net.pt", "-o", far / "a.cache", "-q")
    assert done.exit_code == 0, done.output
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    for words in (
        ("train-head", far / "a.cache", "-o", "run", *QUICK),
        ("finetune", "run", "--model", work / "mine.py:Net", "-o", "tuned", "--epochs", 1),
        ("predict", "run", "--model", work / "mine.py:Net", "--data", "demo:", "-o", "p.csv"),
    ):
        done = histograph(*words)
        assert done.exit_code == 0, done.output
