"""Training on some nodes of a large graph at a time is training on the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

import histograph_post as hg
from histograph_post.caches import Cache
from histograph_post.heads.registry import build_reader
from histograph_post.models import build_model
from histograph_post.tasks import infer_task
from histograph_post.training import node_batches
from histograph_post.training.batches import HeadBatches, HeadNetwork
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Source
from histograph_post.training.node_batches import NodeBatches, goes_by_nodes, whole_graph

NODES, CLASSES = 300, 3


@pytest.fixture(scope="module")
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(NODES) % CLASSES
    part = torch.rand(NODES, generator=random)
    graph = Data(
        x=torch.randn(NODES, 4, generator=random) + labels.unsqueeze(1),
        edge_index=torch.randint(NODES, (2, 5 * NODES), generator=random),
        y=labels,
        train_mask=part < 0.5,
        val_mask=(part >= 0.5) & (part < 0.75),
        test_mask=part >= 0.75,
    )
    torch.manual_seed(0)
    model = build_model("gcn", {"hidden": 8, "num_layers": 2}, in_dim=4, out_dim=CLASSES)
    made = hg.cache(model, [graph], tmp_path_factory.mktemp("large") / "cache", device="cpu")
    assert made is not None
    return made


def _by_nodes(monkeypatch: pytest.MonkeyPatch, per_batch: int) -> None:
    monkeypatch.setattr(node_batches, "EXACT_NODES", NODES - 1)
    monkeypatch.setattr(node_batches, "NODES_PER_BATCH", per_batch)


def _outputs(source: Source, network: HeadNetwork, rows: np.ndarray) -> torch.Tensor:
    """Return what a network says of label rows, in their order: ``[rows, out_dim]``."""
    steps = list(source.batches(rows, batch_size=1, seed=0))
    assert len(steps) == source.num_batches(rows, batch_size=1)
    found = torch.cat([network(step.inputs) for step in steps])
    return found[np.concatenate([step.rows for step in steps]).argsort()]


@pytest.mark.parametrize("kind", ["landmark", "neighbors", "none"])
@pytest.mark.parametrize("memory_limit", [None, 1], ids=["memory", "file"])
def test_a_batch_gives_what_the_graph_gives(
    graph_cache: Cache, monkeypatch: pytest.MonkeyPatch, kind: str, memory_limit: int | None
) -> None:
    _by_nodes(monkeypatch, 32)
    loaded = LoadedCache(graph_cache, memory_limit=memory_limit)
    rows, task = graph_cache.splits.folds[0].train, infer_task(loaded.labels, "node")
    torch.manual_seed(0)
    options = {"node_attention": kind, "landmarks": 16, "dim": 8}
    head = build_reader("histograph", graph_cache.widths, CLASSES, "node", **options)
    torch.nn.init.normal_(head.layer_weights.query)  # type: ignore[union-attr, arg-type]
    given = loaded, loaded.history(rows), task, torch.device("cpu")
    edges = head.needs_edge_index
    whole = whole_graph(head, loaded, rows, given[1])
    assert goes_by_nodes(head, loaded)
    network = HeadNetwork(head)
    expected = _outputs(HeadBatches(*given, edges=edges), network, rows)
    found = _outputs(NodeBatches(*given, edges=edges, whole=whole), network, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_large_graph_is_trained_on_by_nodes_and_the_cost_is_said_before(
    graph_cache: Cache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _by_nodes(monkeypatch, 64)
    monkeypatch.setattr(node_batches, "NODES_PER_BATCH", 64)
    monkeypatch.setattr(node_batches, "NOTED_NODES", NODES - 1)
    said: list[str] = []
    run = hg.train_head(
        graph_cache,
        tmp_path / "run",
        node_attention="landmark",
        seeds=[0],
        jobs=1,
        device="cpu",
        training={"epochs": 2},
        on_start=lambda metric, notes: said.extend(notes),
    )
    start = "node attention: landmark; a step on up to 64 of 300 nodes, 256 keys each: about "
    assert said[0].startswith(start)
    lines = (run.folder / "predictions.csv").read_text().splitlines()
    assert len(lines) - 1 == len(graph_cache.splits.folds[0].test)
