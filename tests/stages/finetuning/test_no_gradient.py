"""Layers that no gradient reaches are found before training, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GCNConv, global_mean_pool

import histograph_post as hg
from histograph_post.errors import ConfigError
from histograph_post.training.options import TrainingOptions

from ...helpers import demo_graphs

SHORT = TrainingOptions(epochs=1)


class Net(nn.Module):
    """Three layers, the first two run in a way that is chosen."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.first, self.second, self.third = GCNConv(4, 8), GCNConv(8, 8), GCNConv(8, 8)
        self.last = nn.Linear(8, 1)

    def run(self, layer: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.way == "plain":
            return layer(x, edge_index)
        if self.way == "no_grad":
            with torch.no_grad():
                return layer(x, edge_index)
        if self.way == "detach":
            return layer(x, edge_index).detach()
        return checkpoint(layer, x, edge_index, use_reentrant=self.way == "reentrant")

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.run(self.first, x, edge_index).relu()
        x = self.run(self.second, x, edge_index).relu()
        return self.last(global_mean_pool(self.third(x, edge_index), batch))


@pytest.mark.parametrize("way", ["reentrant", "no_grad", "detach"])
def test_layers_without_gradient_are_refused_and_named(way: str, tmp_path: Path) -> None:
    model = Net(way).eval()
    graphs = demo_graphs(24)
    hg.cache(model, graphs, tmp_path / "c")

    def tune(out: str, **options: object) -> hg.Run:
        return hg.finetune(
            tmp_path / "c",
            tmp_path / out,
            head="mean",
            model=model,
            data=graphs,
            training=SHORT,
            **options,
        )

    with pytest.raises(ConfigError) as refused:
        tune("all")
    message = str(refused.value)
    assert "no gradient in first, first.lin, second, second.lin (112 parameters)" in message
    assert "use_reentrant=False" in message
    assert not (tmp_path / "all").exists()
    with pytest.raises(ConfigError, match=r"no gradient in second"):
        tune("second", unfreeze=["second"])
    # What it says to type instead trains just that.
    rest = message.rpartition("--unfreeze ")[2].strip("'").split(",")
    tuned = tune("rest", unfreeze=rest)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    after = hg.load(tuned, model=model).backbone.state_dict()
    changed = {name for name in weights if not torch.equal(weights[name], after[name])}
    assert changed == {"third.bias", "third.lin.weight"}
    assert tuned.results["moves"]["parameters"] == 72
    tune("last", unfreeze_last=1)


@pytest.mark.parametrize("way", ["plain", "checkpoint"])
def test_layers_with_gradient_are_trained_all(way: str, tmp_path: Path) -> None:
    model, graphs, notes = Net(way).eval(), demo_graphs(24), []
    hg.cache(model, graphs, tmp_path / "c")
    run = hg.finetune(
        tmp_path / "c",
        tmp_path / "run",
        head="mean",
        model=model,
        data=graphs,
        training=SHORT,
        on_start=lambda metric, said: notes.extend(said),
    )
    after = hg.load(run, model=model).backbone.state_dict()
    same = {name for name, value in model.state_dict().items() if torch.equal(value, after[name])}
    assert same == {"last.weight", "last.bias"}
    assert "not trained, since the history does not depend on it: last" in notes
