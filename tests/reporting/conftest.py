"""Small caches and runs of every kind of task, shared by the tests of reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import histograph_post as hg
from histograph_post.data import GraphDataset, from_graphs, load_data
from histograph_post.reporting import Report
from histograph_post.training.options import TrainingOptions

from ..helpers import demo_graphs, make_model

QUICK = TrainingOptions(epochs=3, batch_size=16, lr=1e-2)


def relabelled(make: Callable[[Data, np.random.Generator], object]) -> GraphDataset:
    """Return the demo graphs with labels of another kind."""
    random = np.random.default_rng(0)
    graphs = []
    for graph in demo_graphs(36):
        graph.y = torch.tensor(make(graph, random))
        graphs.append(graph)
    return from_graphs(graphs)


def _multilabel(graph: Data, random: np.random.Generator) -> object:
    labels = random.integers(0, 2, 3).astype(np.float32)
    labels[random.random(3) < 0.3] = np.nan
    return [labels.tolist()]


def datasets() -> dict[str, Callable[[], GraphDataset]]:
    return {
        "binary": lambda: load_data("demo:", args={"num_graphs": 48}),
        "multiclass": lambda: relabelled(lambda graph, random: [int(random.integers(3))]),
        "multilabel": lambda: relabelled(_multilabel),
        "regression": lambda: relabelled(lambda graph, random: [float(graph.num_edges) / 7]),
        "node": lambda: relabelled(lambda graph, random: graph.x.argmax(1).tolist()),
        "link": lambda: from_graphs(demo_graphs(6), level="link"),
    }


KINDS = tuple(datasets())


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


@pytest.fixture(scope="session")
def make_run(workshop: Path) -> Callable[[str], Path]:
    """Return the folder of a run of some kind of task; it is trained on first use."""

    def make(kind: str) -> Path:
        folder = workshop / kind
        if not folder.exists():
            split = None if kind == "link" else "kfold:3" if kind == "binary" else "random"
            hg.cache(make_model(), datasets()[kind](), workshop / f"{kind}.cache", splits=split)
            options = {"training": QUICK, "dim": 8, "heads": 2, "seeds": [0]}
            hg.train_head(workshop / f"{kind}.cache", folder, **options)
        return folder

    return make


@pytest.fixture(scope="session")
def binary_run(make_run: Callable[[str], Path]) -> Path:
    return make_run("binary")


@pytest.fixture(scope="session")
def binary_report(binary_run: Path, workshop: Path) -> Report:
    return hg.report(binary_run, workshop / "binary.html")
