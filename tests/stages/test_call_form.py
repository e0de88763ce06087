"""What forward receives is shown, recorded and kept to: optional arguments, --no-pass, new data."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, global_mean_pool

import histograph_post as hg
from histograph_post.errors import CaptureError, HistographError
from histograph_post.training.options import TrainingOptions

from ..helpers import demo_graphs, histograph

SHORT = TrainingOptions(epochs=1)
CODE = """
import torch
from torch import nn
from torch_geometric.nn import GCNConv, global_mean_pool
import histograph_post as hg

class Net(nn.Module):
    def __init__(self, in_channels):
        super().__init__()
        self.first, self.second = GCNConv(in_channels, 8), GCNConv(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(self, x, edge_index, batch, edge_weight=None, pos=None, y=None):
        assert y is None
        x = self.first(x, edge_index, edge_weight).relu()
        x = self.second(x, edge_index, edge_weight)
        return self.last(global_mean_pool(x, batch))

def plain():
    return hg.load_data("demo:", args={"num_graphs": 30}).graphs

def weighted():
    graphs = plain()
    for graph in graphs:
        graph.edge_weight = torch.linspace(0.1, 3, graph.num_edges)
    return graphs
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 8)
        self.last = nn.Linear(8, 1)

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_weight: Tensor | None = None
    ) -> Tensor:
        x = self.first(x, edge_index, edge_weight).relu()
        return self.last(global_mean_pool(self.second(x, edge_index, edge_weight), batch))


class WholeNet(Net):
    def forward(self, data: Data) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.batch, data.edge_weight)


def weighted(count: int = 24) -> list[Data]:
    graphs = demo_graphs(count)
    for graph in graphs:
        graph.edge_weight = torch.linspace(0.1, 3, graph.num_edges)
    return graphs


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of one's own and its weights, which is also the current one."""
    (tmp_path / "mine.py").write_text(CODE)
    torch.save(Net().state_dict(), tmp_path / "net.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", [Net, WholeNet])
def test_what_is_not_passed_is_not_seen(model: type[Net], tmp_path: Path) -> None:
    without = hg.cache(model(), demo_graphs(24), tmp_path / "plain")
    hidden = hg.cache(model(), weighted(), tmp_path / "hidden", no_pass=["edge_weight"])
    seen = hg.cache(model(), weighted(), tmp_path / "seen")
    caches = [cache for cache in (without, hidden, seen) if cache is not None]
    assert len(caches) == 3
    for number in (0, 7, 23):
        histories = [cache[number].history[-1] for cache in caches]  # [num_nodes, 8] each
        assert torch.equal(histories[0], histories[1])
        assert not torch.allclose(histories[0], histories[2])
    with pytest.raises(CaptureError, match=r"--no-pass colour: the data has no such attribute"):
        hg.cache(model(), weighted(), tmp_path / "none", no_pass=["colour"])


def test_inspect_shows_what_forward_receives(work: Path) -> None:
    words = ("inspect", "net.pt", "--model", "mine.py:Net", "--data", "mine.py:weighted")
    done = histograph(*words)
    assert done.exit_code == 0, done.output
    row = next(line for line in done.stdout.splitlines() if "edge_weight [" in line)
    assert "optional; --no-pass edge_weight leaves it out" in row
    assert "its default: the data have none" in done.stdout  # pos
    assert "labels are not shown" in done.stdout  # y
    done = histograph(*words, "--no-pass", "edge_weight")
    assert "left out by --no-pass" in done.stdout
    assert "--no-pass edge_weight" in next(
        line for line in done.stdout.splitlines() if line.startswith("next: ")
    )


def test_predict_passes_what_the_cache_was_made_with(work: Path) -> None:
    model = ("--model", "mine.py:Net")
    data = ("--data", "mine.py:weighted")
    for words in (
        ("cache", *model, "--checkpoint", "net.pt", *data, "--no-pass", "edge_weight", "-o", "c"),
        ("cache", *model, "--checkpoint", "net.pt", *data, "-o", "weighted.cache"),
        ("train-head", "c", "-o", "run", "--epochs", 1, "--seeds", 0, "--dim", 8, "-q"),
        ("train-head", "weighted.cache", "-o", "other", "--epochs", 1, "--seeds", 0, "--dim", 8),
        ("predict", "run", *model, *data, "-o", "weighted.csv"),
        ("predict", "run", *model, "--data", "mine.py:plain", "-o", "plain.csv"),
        ("finetune", "run", *model, *data, "-o", "tuned", "--epochs", 1, "-q"),
    ):
        done = histograph(*words)
        assert done.exit_code == 0, done.output
    assert Path("weighted.csv").read_text() == Path("plain.csv").read_text()
    # What the cache was made with and new data lack is not filled with a default.
    done = histograph("predict", "other", *model, "--data", "mine.py:plain", "-o", "no.csv")
    assert done.exit_code == 1
    assert "was given 'edge_weight' when it was cached" in done.stderr
    with pytest.raises(HistographError, match="edge_weight"):
        hg.load("other", model="mine.py:Net")(demo_graphs(2)[0])


def test_more_than_was_passed_is_left_out_with_a_note(tmp_path: Path) -> None:
    model = Net().eval()
    hg.cache(model, demo_graphs(24), tmp_path / "c")
    run = hg.train_head(tmp_path / "c", tmp_path / "run", seeds=[0], dim=8, training=SHORT)
    plain = hg.predict(run, demo_graphs(6), model=model)
    more = hg.predict(run, weighted(6), model=model)
    assert (plain.outputs == more.outputs).all()
    assert any("edge_weight" in note and "not passed" in note for note in more.notes)
