"""Checkpoints as people have them, from the file to a cache and back to the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import histograph_post as hg
from histograph_post.models import build_model
from histograph_post.models.checkpoints import weights_sha256
from histograph_post.runs.saved_backbone import SavedBackbone

from ..helpers import histograph

MODEL = """
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool

class Net(nn.Module):
    def __init__(self, in_channels, num_classes, hidden=6):
        super().__init__()
        self.encoder = Encoder(in_channels, hidden)
        self.norm = nn.BatchNorm1d(hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x, edge_index, batch):
        h = self.encoder(x, edge_index)
        return self.head(self.norm(global_mean_pool(h, batch)))

class Encoder(nn.Module):
    def __init__(self, in_channels, hidden):
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(in_channels, hidden), GCNConv(hidden, hidden)])

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x

class Sealed(Net):
    def __reduce__(self):
        return rebuild, ([p.tolist() for p in self.state_dict().values()],)

def rebuild(values):
    model = Net(4, 1)
    model.load_state_dict(dict(zip(model.state_dict(), map(torch.tensor, values))))
    return model
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., nn.Module]:
    """Build the model of ``net.py``, with the initial weights of a seed."""
    (tmp_path / "net.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def build(out_dim: int = 1, name: str = "Net", seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return build_model(f"net.py:{name}", {}, in_dim=4, out_dim=out_dim)

    return build


def cache(
    checkpoint: str,
    *more: str,
    out: str = "a.cache",
    model: str = "net.py:Net",
    num_graphs: int = 24,
) -> str:
    """Cache a checkpoint on demo graphs; return what was printed beside the result."""
    words = ["--model", model, "--checkpoint", checkpoint, "--data", "demo:"]
    given = ["--data-args", f"num_graphs={num_graphs}", "-o", out]
    result = histograph("cache", *words, *given, *more)
    assert result.exit_code == 0, result.output
    return " ".join(result.stderr.split())


def rebuilt(folder: str = "a.cache") -> dict[str, Tensor]:
    """The weights of the model as later commands rebuild it."""
    saved = SavedBackbone.of_cache(hg.Cache.open(folder))
    built = saved.build(model="net.py:Net", in_dim=4)
    model = built[0] if isinstance(built, tuple) else built
    return dict(model.state_dict())


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return weights_sha256(found) == weights_sha256(expected)


def test_the_file_knows_how_many_outputs_there_are(net: Callable[..., nn.Module]) -> None:
    """Two logits for two classes, where the labels ask for one."""
    model = net(out_dim=2)
    torch.save({"state_dict": {f"net.{k}": v for k, v in model.state_dict().items()}}, "a.ckpt")
    assert "in_channels=4, num_classes=2" in cache("a.ckpt")
    manifest = hg.Cache.open("a.cache").manifest
    assert manifest.layout.output_width == 2
    assert manifest.own_metrics is not None
    assert same(rebuilt(), model.state_dict())


def test_an_encoder_without_the_head(net: Callable[..., nn.Module]) -> None:
    model = net()
    weights = {k: v for k, v in model.state_dict().items() if k.startswith("encoder.")}
    torch.save(weights, "encoder.pt")
    printed = cache("encoder.pt")
    assert "has no weights for norm.weight" in printed
    opened = hg.Cache.open("a.cache")
    assert opened.outputs() is None
    assert opened.manifest.own_metrics is None
    again = rebuilt()
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    # The history is that of the whole model.
    torch.save(model.state_dict(), "whole.pt")
    cache("whole.pt", out="b.cache")
    whole = hg.Cache.open("b.cache")
    assert whole.outputs() is not None
    for graph in range(3):
        for one, other in zip(opened[graph].history, whole[graph].history, strict=True):
            assert (one == other).all()


def test_a_weight_that_the_history_needs_must_be_there(net: Callable[..., nn.Module]) -> None:
    weights = net().state_dict()
    del weights["encoder.convs.1.bias"], weights["head.bias"]
    torch.save(weights, "cut.pt")
    words = ["cache", "--model", "net.py:Net", "--checkpoint", "cut.pt", "--data", "demo:"]
    result = histograph(*words, "-o", "a.cache")
    assert result.exit_code == 1
    assert "has no encoder.convs.1.bias, on which the captured layers depend" in result.stderr
    assert "head.bias" not in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("chosen", ["ema", "swa_model"])
def test_averaged_weights_by_choice(net: Callable[..., nn.Module], chosen: str) -> None:
    trained, averaged = net(seed=0), net(seed=1)
    swa = torch.optim.swa_utils.AveragedModel(averaged).state_dict()
    both = {"state_dict": trained.state_dict(), "ema": averaged.state_dict(), "swa_model": swa}
    torch.save(both, "both.pt")
    assert "it also holds ema (11 tensors)" in cache("both.pt")
    assert same(rebuilt(), trained.state_dict())
    cache("both.pt", "--state", chosen, out="b.cache")
    assert same(rebuilt("b.cache"), averaged.state_dict())


def test_a_folder_of_huggingface(net: Callable[..., nn.Module], tmp_path: Path) -> None:
    weights = dict(net().state_dict())
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gcn", "hidden": 6}')
    names = list(weights)
    files = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in files.items():
        safetensors.torch.save_file({name: weights[name].clone() for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    cache("published")
    assert same(rebuilt(), weights)
    cache("published/model.safetensors.index.json", out="index.cache")
    assert same(rebuilt("index.cache"), weights)
    shown = histograph("inspect", "published", "--json")
    assert json.loads(shown.stdout)["beside"]["hidden"] == 6
    for file in files:
        (folder / file).unlink()
    (folder / "model.safetensors.index.json").unlink()
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    cache("published", out="b.cache")
    assert same(rebuilt("b.cache"), weights)


def test_trust_is_asked_for_once(net: Callable[..., nn.Module], tmp_path: Path) -> None:
    torch.save(net(name="Sealed"), "sealed.pt")
    words = ["cache", "--model", "net.py:Net", "--checkpoint", "sealed.pt", "--data", "demo:"]
    refused = histograph(*words, "-o", "a.cache")
    assert refused.exit_code == 1
    assert "--trust-checkpoint" in refused.stderr
    cache("sealed.pt", "--trust-checkpoint")
    run = histograph("train-head", "a.cache", "-o", "run", "--head", "mean", "--epochs", "1")
    assert run.exit_code == 0, run.output
    words = ["--model", "net.py:Net", "--data", "demo:", "-o", "predicted.csv"]
    predicted = histograph("predict", "run", *words)
    assert predicted.exit_code == 0, predicted.output
    # A file that merely takes its place is another one.
    torch.save(net(name="Sealed", seed=1), "sealed.pt")
    refused = histograph("predict", "run", *words, "--overwrite")
    assert refused.exit_code == 1
    assert "--trust-checkpoint" in refused.stderr


def test_inspect_shows_what_a_file_holds(net: Callable[..., nn.Module]) -> None:
    weights = net().state_dict()
    torch.save({"state_dict": weights, "ema": weights | {}, "epoch": 7}, "both.pt")
    shown = histograph("inspect", "both.pt")
    assert shown.exit_code == 0, shown.output
    for text in ("State dicts in the file", "--state ema", "epoch", "encoder.convs.0.lin.weight"):
        assert text in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    torch.save({"first": weights, "second": weights | {}}, "two.pt")
    refused = histograph("inspect", "two.pt")
    assert "first (11 tensors), second (11 tensors); choose one, as in --state first" in (
        refused.stderr
    )
    assert histograph("inspect", "two.pt", "--state", "second").exit_code == 0


def test_a_key_map_is_proposed_whatever_the_number_of_outputs(
    net: Callable[..., nn.Module],
) -> None:
    """The labels of two classes ask for one output, the file has two and other names."""
    model = net(out_dim=2)
    renamed = {"encoder.convs": "gnn.layers", "norm": "bn", "head": "classifier"}
    weights = {}
    for name, value in model.state_dict().items():
        old = next(old for old in renamed if name.startswith(old))
        weights[renamed[old] + name.removeprefix(old)] = value
    torch.save(weights, "renamed.pt")
    words = ["--model", "net.py:Net", "--checkpoint", "renamed.pt", "--data", "demo:"]
    refused = histograph("cache", *words, "-o", "a.cache")
    assert refused.exit_code == 1
    _, _, proposed = refused.stderr.partition("A key map (--key-map FILE.toml) that fits:\n")
    Path("map.toml").write_text(proposed[: proposed.index("error: ")])
    cache("renamed.pt", "--key-map", "map.toml", num_graphs=200)
    assert same(rebuilt(), model.state_dict())
    trained = histograph("train-head", "a.cache", "-o", "run", "--head", "probe", "--seeds", 0)
    assert trained.exit_code == 0, trained.output
    assert "--model net.py:Net --key-map map.toml" in trained.stdout.replace("\n", " ")
    given = ["--data", "demo:", "--data-args", "num_graphs=6", "-o", "predictions.csv"]
    done = histograph("predict", "run", "--model", "net.py:Net", *given)
    assert done.exit_code == 0, done.output
