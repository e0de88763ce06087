"""What many tests do: type a command, build a small model, take a few graphs, read a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from typer.testing import CliRunner, Result

import histograph_post as hg
from histograph_cli.app import app
from histograph_post.models import build_model

NUM_GRAPHS = 48


def histograph(*words: object) -> Result:
    """Run a command as if it had been typed."""
    return CliRunner().invoke(app, [str(word) for word in words])


def make_model(kind: str = "gin", *, seed: int = 0, **args: object) -> nn.Module:
    """A built-in model for the demo graphs, with the initial weights of a seed."""
    torch.manual_seed(seed)
    return build_model(kind, {"hidden": 8, "num_layers": 3, **args}, in_dim=4, out_dim=1)


class NodeModel(nn.Module):
    """A model of one's own with a row of outputs per node."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


def demo_graphs(count: int = NUM_GRAPHS) -> list[Data]:
    return hg.load_data("demo:", args={"num_graphs": count}).graphs


def node_labelled(count: int) -> list[Data]:
    """Demo graphs whose nodes have a class each."""
    graphs = demo_graphs(count)
    for graph in graphs:
        graph.y = graph.x.argmax(dim=1) % 3
    return graphs


def make_run_folder(folder: Path, model: nn.Module, checkpoint: str = "model.safetensors") -> Path:
    """Fill a folder with weights, a cache of demo graphs in three folds, and a run of two seeds."""
    save_file(model.state_dict(), folder / checkpoint)
    demo = ("--data", "demo:", "--data-args", f"num_graphs={NUM_GRAPHS}", "--split", "kfold:3")
    from_file = ("--model", "gin", "--checkpoint", folder / checkpoint)
    made = histograph("cache", *from_file, *demo, "-o", folder / "demo.cache")
    assert made.exit_code == 0, made.output
    training = hg.TrainingOptions(epochs=3, lr=1e-2)
    options = {"seeds": (0, 1), "dim": 8, "heads": 2, "training": training}
    hg.train_head(folder / "demo.cache", folder / "run", **options)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, by its path in there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
