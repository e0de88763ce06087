"""Link prediction on cached activations: drawn negatives, resuming, and a real citation graph."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.utils import stochastic_blockmodel_graph

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.data import DataSpec, LinkOptions, from_graphs, load_data
from histograph_post.errors import SplitError
from histograph_post.experiments.head_training import compare, train_head
from histograph_post.heads.ragged import Graphs
from histograph_post.heads.registry import build_head, head_names
from histograph_post.models import build_model
from histograph_post.models.spec import ModelSpec, load_pretrained
from histograph_post.tasks import infer_task
from histograph_post.training.batches import HeadBatches, HeadInputs, HeadNetwork
from histograph_post.training.loaded_cache import LoadedCache
from histograph_post.training.loop import Progress, Step, Trainer
from histograph_post.training.options import TrainingOptions

from ..helpers import make_model

CPU = torch.device("cpu")


def community_graph(sizes: list[int], *, seed: int) -> Data:
    """Return a graph whose nodes mostly know their own community, which features hint at."""
    torch.manual_seed(seed)
    inside, between = 0.4, 0.02
    chances = torch.full((len(sizes), len(sizes)), between).fill_diagonal_(inside)
    community = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    hints = torch.nn.functional.one_hot(community, 8) + 0.5 * torch.randn(sum(sizes), 8)
    return Data(x=hints, edge_index=stochastic_blockmodel_graph(sizes, chances))


@pytest.fixture(scope="module")
def link_cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    graphs = [community_graph([25, 25, 25], seed=0), community_graph([30, 15], seed=1)]
    dataset = from_graphs(graphs, level="link", links=LinkOptions((0.7, 0.15, 0.15)))
    torch.manual_seed(0)
    model = build_model("gcn", {"hidden": 16, "num_layers": 2}, in_dim=8, out_dim=1)
    written = cache(model, dataset, tmp_path_factory.mktemp("links") / "a.cache")
    assert written is not None
    return written


def source(stored: Cache) -> HeadBatches:
    loaded = LoadedCache(stored)
    return HeadBatches(loaded, loaded.history(None), infer_task(stored.labels(), "link"), CPU)


def cache_pairs(step: Step, order: list[int], stored: Cache) -> list[tuple[int, int]]:
    """Return a step's pairs, lower node first, as they are numbered through the cache."""
    inputs = step.inputs
    assert isinstance(inputs, HeadInputs)
    assert inputs.pairs is not None
    assert isinstance(inputs.batch, Graphs)
    first_in_batch = torch.tensor([0, *inputs.batch.counts.cumsum(0)[:-1].tolist()])
    first_in_cache = torch.from_numpy(np.cumsum(stored.num_nodes) - stored.num_nodes)[order]
    owner = inputs.batch.index[inputs.pairs]  # [2, pairs]
    assert torch.equal(owner[0], owner[1])  # never between graphs
    pairs = inputs.pairs - first_in_batch[owner] + first_in_cache[owner]
    return [(min(pair), max(pair)) for pair in pairs.t().tolist()]


def graph_order(step: Step, stored: Cache) -> list[int]:
    sizes = step.inputs.batch.counts.tolist()
    return [stored.num_nodes.tolist().index(size) for size in sizes]  # all sizes differ


def test_a_training_step_gets_as_many_true_non_links_as_links(link_cache: Cache) -> None:
    train = link_cache.splits.folds[0].train
    stored_pairs = {(min(p), max(p)) for p in link_cache.label_pairs().t().tolist()}
    everything = link_cache.gather(np.arange(2), edges=True)
    assert everything.edge_index is not None
    edges = {(min(e), max(e)) for e in everything.edge_index.t().tolist()}
    drawn = {}
    for seed in (5, 6):
        (step,) = source(link_cache).batches(train, batch_size=2, seed=seed)
        order = graph_order(step, link_cache)
        pairs = cache_pairs(step, order, link_cache)
        links, negatives = pairs[: len(train)], pairs[len(train) :]
        assert len(negatives) == len(set(negatives)) == len(links) == len(step.rows)
        assert step.targets[:, 0].tolist() == [1.0] * len(links) + [0.0] * len(negatives)
        assert set(links) <= edges
        assert not set(negatives) & (stored_pairs | edges)
        for low, high in ((0, 75), (75, 120)):  # as many in each graph
            inside = [[low <= u < high for u, _ in found] for found in (links, negatives)]
            assert sum(inside[0]) == sum(inside[1])
        drawn[seed] = set(negatives)
    assert drawn[5] != drawn[6]  # fresh in every epoch


def test_the_seed_decides_the_negatives_and_evaluation_has_none(link_cache: Cache) -> None:
    train, valid, _ = link_cache.splits.folds[0].parts
    one, other = (
        [step.inputs.pairs for step in source(link_cache).batches(train, batch_size=1, seed=3)]
        for _ in range(2)
    )
    assert len(one) == 2
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    for rows in (train, valid):
        steps = list(source(link_cache).batches(rows, batch_size=1, seed=None))
        assert sum(len(step.targets) for step in steps) == len(rows)
        assert sorted(np.concatenate([step.rows for step in steps])) == sorted(rows)


def test_training_links_that_bring_their_own_negatives_get_no_others(tmp_path: Path) -> None:
    graph = community_graph([10, 10], seed=0)
    graph.edge_label_index = torch.tensor([[0, 1, 2, 3, 4, 5], [11, 12, 13, 14, 15, 16]])
    graph.edge_label = torch.tensor([1.0, 0, 1, 0, 1, 0])
    model = build_model("gcn", {"hidden": 4, "num_layers": 2}, in_dim=8, out_dim=1)
    stored = cache(model, from_graphs([graph]), tmp_path / "a.cache", splits="random:0.7,0.1,0.2")
    assert stored is not None
    rows = np.arange(4)
    (step,) = source(stored).batches(rows, batch_size=1, seed=0)
    assert step.targets[:, 0].tolist() == [1, 0, 1, 0]
    assert step.inputs.pairs.shape == (2, 4)


def make_trainer(stored: Cache, epochs: int) -> Trainer:
    torch.manual_seed(0)
    head = build_head("histograph", stored.widths, 1, "link", dim=8, heads=2, dropout=0.3)
    options = TrainingOptions(epochs=epochs, batch_size=1, patience=0)
    task = infer_task(stored.labels(), "link")
    return Trainer(HeadNetwork(head), source(stored), stored.splits.folds[0], task, options, seed=1)


def test_a_resumed_run_draws_what_an_unbroken_one_draws(link_cache: Cache) -> None:
    whole, broken, resumed = (make_trainer(link_cache, 4) for _ in range(3))
    whole.run()

    class Stopped(Exception):
        """Stands for a kill."""

    states = []

    def stop_after_two(_: Progress) -> None:
        states.append(copy.deepcopy(broken.state()))
        if len(states) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        broken.run(stop_after_two)
    resumed.restore(states[-1])
    resumed.run()

    assert resumed.progress.log == whole.progress.log
    ours, theirs = resumed.network.state_dict(), whole.network.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("head", head_names("link"))
def test_every_link_readout_finds_communities(link_cache: Cache, tmp_path: Path, head: str) -> None:
    training = TrainingOptions(epochs=25, batch_size=1, lr=1e-2)
    given = {"heads": [head], "dim": 16, "training": training, "device": "cpu"}
    run = compare(link_cache, tmp_path / "run", **given)
    scores = run.results["fits"][0]["scores"]
    # Chance is 0.5, and 1 is out of reach: negatives inside a community look like links.
    assert scores["test"]["roc_auc"] > 0.65
    assert scores["train"] == {}
    assert run.results["metric"] == "roc_auc"
    assert {"mrr", "hits@20", "hits@50", "ap"} <= set(scores["test"])
    predictions = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    test = link_cache.splits.folds[0].test
    assert len(predictions) == 1 + len(test)
    # A row is called by its graph and its two nodes, counted within the graph.
    graph = int(np.searchsorted(link_cache.label_ptr, test[0], side="right") - 1)
    u, v = link_cache[graph].edge_label_index[:, test[0] - link_cache.label_ptr[graph]].tolist()
    assert predictions[1].startswith(f"{link_cache.ids()[graph]}:{u}-{v},0,")


def test_another_split_of_the_cached_links_would_leak(link_cache: Cache, tmp_path: Path) -> None:
    with pytest.raises(SplitError, match="messages run along"):
        compare(link_cache, tmp_path / "run", heads=["mlp"], split="kfold:5")


def test_cora_from_its_checkpoint_to_the_table(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    example = Path(__file__).parents[2] / "examples" / "uvadlc_node_gcn.py"
    pretrained = load_pretrained(
        ModelSpec(
            f"{example}:GNNModel",
            checkpoint=shared_data / "checkpoints" / "uvadlc_tutorial7" / "NodeLevelGNN.ckpt",
        ),
        DataSpec("planetoid:Cora", {"level": "link"}, shared_data),
    )
    stored = cache(pretrained.model, pretrained.dataset, tmp_path / "cora.cache")
    assert stored is not None
    assert stored.widths == (1433, 16, 7)
    assert stored.manifest.own_metrics is None
    training = TrainingOptions(epochs=5, lr=1e-2)
    results = train_head(stored, tmp_path / "run", dim=16, heads=2, training=training).results
    assert list(results["readouts"]) == ["mlp", "histograph"]  # links have no readout of their own
    for fit in results["fits"]:
        assert fit["scores"]["test"]["roc_auc"] > 0.7


def test_links_of_many_small_graphs(tmp_path: Path) -> None:
    dataset = load_data("demo:", args={"num_graphs": 30, "level": "link"})
    model = make_model(num_layers=2)
    stored = cache(model, dataset, tmp_path / "a.cache", node_budget=200)
    assert stored is not None
    training = TrainingOptions(epochs=3, batch_size=8)
    results = compare(stored, tmp_path / "run", heads=["mlp"], training=training).results
    assert 0 < results["fits"][0]["scores"]["test"]["roc_auc"] < 1
