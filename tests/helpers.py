"""What many tests do: type a command, build a small model, take a few graphs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from typer.testing import CliRunner, Result

import histograph_post as hg
from histograph_cli.app import app
from histograph_post.models import build_model


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


def demo_graphs(count: int = 48) -> list[Data]:
    return hg.load_data("demo:", args={"num_graphs": count}).graphs


def node_labelled(count: int) -> list[Data]:
    """Demo graphs whose nodes have a class each."""
    graphs = demo_graphs(count)
    for graph in graphs:
        graph.y = graph.x.argmax(dim=1) % 3
    return graphs
