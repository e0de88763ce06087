"""A warm-started head begins where the checkpoint stands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.data import from_graphs, load_data
from histograph_post.errors import ConfigError
from histograph_post.experiments.finetuning import finetune
from histograph_post.experiments.head_fits import own_classifier
from histograph_post.experiments.head_training import train_head
from histograph_post.heads.histograph import HistoGraphHead
from histograph_post.models import build_model
from histograph_post.tasks import infer_task
from histograph_post.training.batches import HeadBatches, HeadNetwork
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Trainer
from histograph_post.training.options import TrainingOptions

from ..helpers import make_model


def demo_cache(folder: Path, **args: object) -> Cache:
    written = cache(make_model(**args), load_data("demo:", args={"num_graphs": 60}), folder)
    assert written is not None
    return written


def first_outputs(written: Cache) -> np.ndarray:
    """What a warm-started head predicts before its first step."""
    loaded = LoadedCache(written)
    task = infer_task(loaded.labels, loaded.level)
    split = written.splits.folds[0]
    history = loaded.history(split.train)
    head = HistoGraphHead(written.widths, task.out_dim, dim=8, heads=2, level=task.level)
    head.warm_start(*own_classifier(loaded, task, split.train, standardize=True))
    source = HeadBatches(loaded, history, task, torch.device("cpu"))
    trainer = Trainer(HeadNetwork(head), source, split, task, TrainingOptions(), seed=0)
    return trainer.predict(np.arange(len(loaded.labels)))


def test_step_zero_predicts_what_the_checkpoint_predicts(tmp_path: Path) -> None:
    written = demo_cache(tmp_path / "a.cache")
    np.testing.assert_allclose(first_outputs(written), written.outputs(), rtol=1e-3, atol=1e-4)


def test_two_logits_become_one(tmp_path: Path) -> None:
    model = build_model("gcn", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=2)
    written = cache(model, load_data("demo:", args={"num_graphs": 40}), tmp_path / "a.cache")
    assert written is not None
    outputs = written.outputs()
    assert outputs is not None
    difference = outputs[:, 1:] - outputs[:, :1]
    np.testing.assert_allclose(first_outputs(written), difference, rtol=1e-3, atol=1e-4)


def test_regression_starts_in_the_units_of_the_labels(tmp_path: Path) -> None:
    graphs = [
        Data(
            x=torch.randn(4, 3, generator=torch.Generator().manual_seed(i)),
            edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
            y=torch.tensor([100.0 + 10.5 * i]),
        )
        for i in range(30)
    ]
    model = build_model("sage", {"hidden": 8, "num_layers": 2}, in_dim=3, out_dim=1)
    written = cache(model, from_graphs(graphs, level="graph"), tmp_path / "a.cache")
    assert written is not None
    np.testing.assert_allclose(first_outputs(written), written.outputs(), rtol=1e-2, atol=1e-2)


def test_other_readouts_are_refused(tmp_path: Path) -> None:
    written = demo_cache(tmp_path / "a.cache", pool="max")
    with pytest.raises(ConfigError, match="no linear map"):
        train_head(written, tmp_path / "run", warm_start=True, dim=8, heads=2)


def test_heads_that_cannot_start_warm_are_refused(tmp_path: Path) -> None:
    written = demo_cache(tmp_path / "a.cache")
    for head in ("concat", "mean"):
        with pytest.raises(
            ConfigError, match=f"found head '{head}', expected .*: histograph, histograph-paper"
        ):
            train_head(written, tmp_path / "run", head=head, warm_start=True)
    with pytest.raises(ConfigError, match="found head 'concat'"):
        finetune(written, tmp_path / "run", head="concat", warm_start=True)
    assert not (tmp_path / "run").exists()


def test_warm_started_run_is_no_worse_at_its_first_epoch(tmp_path: Path) -> None:
    written = demo_cache(tmp_path / "a.cache")
    run = train_head(
        written,
        tmp_path / "run",
        warm_start=True,
        training=TrainingOptions(epochs=1, lr=1e-9),
        dim=8,
        heads=2,
    )
    readouts = run.results["readouts"]
    assert readouts["histograph"]["test"]["mean"] == readouts["own readout"]["test"]["mean"]


class NodeClassifier(torch.nn.Module):
    """Layers of several widths, of which the last has the width of the first."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 6, 5, 6]
        self.layers = torch.nn.ModuleList(map(GCNConv, widths, widths[1:]))
        self.classifier = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index).relu()
        return self.classifier(x)


@pytest.mark.parametrize("mix", ["statistics", "all", "last"])
def test_nodes_start_at_the_checkpoint_unless_the_probe_is_better(mix: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, edges, x = NodeClassifier(), torch.randint(90, (2, 300)), torch.randn(90, 4)
    own = model(x, edges)
    parts = torch.arange(90) // 30
    for name, known in (("right", own.argmax(1)), ("wrong", own.argmin(1))):
        learned = torch.where(parts == 0, torch.randint(3, (90,)), known)
        graph = Data(x=x, edge_index=edges, y=learned if name == "right" else known)
        graph.train_mask, graph.val_mask, graph.test_mask = (parts == part for part in range(3))
        written = cache(model, [graph], tmp_path / f"{name}.cache")
        assert written is not None
        training = TrainingOptions(epochs=1, lr=1e-9)
        options = {"probe": 1.0, "mix": mix, "dim": 8, "heads": 2, "seeds": [0]}
        run = train_head(written, tmp_path / name, training=training, **options)
        (score,) = run.scores("histograph", "test").values()
        assert score == 1.0 if name == "right" else score > 0.5
