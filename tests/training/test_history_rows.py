"""Activations in memory and from the file: the same rows, the same results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv

from histograph_post.caches import Cache
from histograph_post.caches.caching import cache
from histograph_post.data import load_data
from histograph_post.experiments.head_training import train_head
from histograph_post.heads.history import TableRows
from histograph_post.models import build_model
from histograph_post.training.batches import prefetch
from histograph_post.training.history_rows import RowMemory, RowsInMemory, RowsOnDisk
from histograph_post.training.loaded_cache import (
    BATCHES_IN_USE,
    KEPT_SHARE,
    LoadedCache,
    MemoryBudget,
)
from histograph_post.training.options import TrainingOptions

from ..helpers import histograph, make_model


class Mixed(torch.nn.Module):
    """A network whose layers differ in width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GCNConv(4, 8), GCNConv(8, 6)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index).relu()


def make_cache(
    folder: Path,
    *,
    hidden: int = 8,
    num_graphs: int = 60,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> Cache:
    torch.manual_seed(0)
    if model is None:
        model = build_model("gin", {"hidden": hidden, "num_layers": 3}, in_dim=4, out_dim=1)
    dataset = load_data("demo:", args={"num_graphs": num_graphs})
    made = cache(model, dataset, folder, **options)
    assert made is not None
    return made


def float32_bytes(stored: Cache, graphs: np.ndarray | None = None) -> int:
    num_nodes = stored.num_nodes if graphs is None else stored.num_nodes[graphs]
    return int(num_nodes.sum()) * sum(stored.widths) * 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_are_the_same_in_memory_and_on_disk(tmp_path: Path, dtype: str) -> None:
    stored = make_cache(tmp_path / "a.cache", dtype=dtype)
    train = stored.splits.folds[0].train
    needed = int(float32_bytes(stored) / KEPT_SHARE)
    memory, disk = (
        LoadedCache(stored, memory_limit=limit).history(train) for limit in (needed + 1, needed - 1)
    )
    assert isinstance(memory, RowsInMemory)
    assert isinstance(disk, RowsOnDisk)
    graphs = np.array([7, 3, 4, 59, 0])
    rows = memory.select(graphs)
    assert isinstance(rows, TableRows)
    found = rows.copy()
    assert torch.equal(found, disk.select(graphs))
    assert torch.equal(memory.select(np.arange(60)), disk.select(np.arange(60)))
    # By hand: the statistics of all nodes of the training graphs.
    stored_rows = stored.gather(np.sort(train)).history.double()
    mean, deviation = stored_rows.mean(0), stored_rows.std(0, correction=0)
    floor = 0.1 * deviation.square().mean(-1, keepdim=True).sqrt()
    expected = (stored.gather(graphs).history.double() - mean) / torch.maximum(deviation, floor)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16"}, {"compression": "gzip"}, {"shard_bytes": 5000}], ids=str
)
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_as_they_are_stored(tmp_path: Path, options: dict[str, Any], mixed: bool) -> None:
    stored = make_cache(tmp_path / "a.cache", model=Mixed() if mixed else None, **options)
    assert stored.manifest.layout.is_uniform != mixed
    graphs = np.array([5, 6, 1, 59])
    expected = stored.gather(graphs).history
    for limit in (None, 0):
        found = LoadedCache(stored, memory_limit=limit).history(None).select(graphs)
        if isinstance(found, TableRows):
            found = found.copy()
        for layer, other in zip(found, expected, strict=True):
            assert torch.equal(layer, other.float())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("mixed", [False, True])
def test_means_of_graphs_are_means_of_their_rows(tmp_path: Path, dtype: str, mixed: bool) -> None:
    stored = make_cache(tmp_path / "a.cache", model=Mixed() if mixed else None, dtype=dtype)
    train, graphs = stored.splits.folds[0].train, np.array([7, 3, 4, 59, 0])
    loaded = LoadedCache(stored)
    means, rows = loaded.means(train), loaded.history(train)
    assert means is not None
    assert means.ptr.tolist() == list(range(61))
    found, expected = (
        chosen.copy() if isinstance(chosen, TableRows) else chosen
        for chosen in (means.select(graphs), rows.select(graphs))
    )
    layers = zip(found, expected, strict=True) if mixed else [(found, expected)]
    for layer, other in layers:
        by_hand = [part.mean(0) for part in other.split(stored.num_nodes[graphs].tolist())]
        torch.testing.assert_close(layer, torch.stack(by_hand), rtol=1e-4, atol=1e-5)
    assert LoadedCache(stored, memory_limit=1000).means(train) is None


def test_means_of_values_that_hardly_differ_keep_their_difference(tmp_path: Path) -> None:
    model = make_model(num_layers=2)
    with torch.no_grad():  # every channel is 1000, and moves by thousandths of it
        for name, value in model.named_parameters():
            value.mul_(1e-3 if name.endswith("weight") else 0).add_(1e3 * name.endswith("bias"))
    stored = make_cache(tmp_path / "a.cache", model=model)
    train, graphs = stored.splits.folds[0].train, np.arange(60)
    loaded = LoadedCache(stored)
    means, rows = loaded.means(train), loaded.history(train)
    assert means is not None
    sizes = torch.from_numpy(stored.num_nodes)
    expected = torch.segment_reduce(rows.select(graphs).double(), "mean", lengths=sizes, axis=0)
    assert expected[:, -1].std() > 0.01
    torch.testing.assert_close(means.select(graphs).double(), expected, rtol=1e-5, atol=1e-5)


def test_memory_of_rows_is_used_again_when_they_are_gone_and_not_before() -> None:
    memory = RowMemory()
    first = memory.empty((1000, 2, 5), torch.float32).fill_(1.0)
    second = memory.empty((1000, 2, 5), torch.float32).fill_(2.0)
    assert bool((first == 1).all())
    place, part = first.data_ptr(), first[7]
    del first
    third = memory.empty((1000, 2, 5), torch.float32).fill_(3.0)  # a part is in use yet
    assert bool((part == 1).all())
    del part
    fourth = memory.empty((900, 2, 5), torch.bfloat16)
    assert fourth.shape == (900, 2, 5)
    assert fourth.data_ptr() == place
    assert bool((second == 2).all())
    assert bool((third == 3).all())
    assert memory.empty((0, 2, 5), torch.float32).shape == (0, 2, 5)


def test_a_cache_that_does_not_fit_gives_the_same_results(tmp_path: Path) -> None:
    stored = make_cache(tmp_path / "a.cache")
    training = TrainingOptions(epochs=3, batch_size=16)
    fits, scores = tmp_path / "fits", []
    for name, limit in (("memory", None), ("disk", 0)):
        run = train_head(stored, fits / name, training=training, memory_limit=limit, dim=8, heads=2)
        scores.append(run.results)
    assert scores[0] == scores[1]


def test_several_seeds_that_do_not_fit_give_close_results(tmp_path: Path) -> None:
    stored = make_cache(tmp_path / "a.cache")
    training = TrainingOptions(epochs=3, batch_size=16)
    logs = []
    for name, limit in (("memory", None), ("disk", 0)):  # trained as one, and one after the other
        out = tmp_path / "fits" / name
        train_head(stored, out, training=training, seeds=(0, 1), memory_limit=limit, dim=8, heads=2)
        lines = (out / "metrics.jsonl").read_text().splitlines()
        logs.append([json.loads(line) for line in lines])
    assert len(logs[0]) == 2 * 2 * 3  # readouts, seeds, epochs
    for found, expected in zip(*logs, strict=True):
        assert (found["head"], found["seed"]) == (expected["head"], expected["seed"])
        for name in ("epoch", "loss", "valid_loss"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4)


def test_prefetching_keeps_the_order_and_hands_errors_on() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise ValueError("the file is gone")

    ahead = prefetch(items())
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="the file is gone"):
        next(ahead)


def test_reading_ahead_needs_room_for_one_batch_more(tmp_path: Path) -> None:
    stored = make_cache(tmp_path / "a.cache")
    batches = [np.array([0, 1]), np.array([2, 3, 4])]
    largest = max(float32_bytes(stored, graphs) for graphs in batches)
    room = (BATCHES_IN_USE + 1) * largest
    assert MemoryBudget(stored, room).fits_ahead(batches)
    assert not MemoryBudget(stored, room - 1).fits_ahead(batches)


def test_batches_that_will_not_stay_within_the_limit_are_told(tmp_path: Path) -> None:
    stored = make_cache(tmp_path / "a.cache")
    limit = 7 * BATCHES_IN_USE * float32_bytes(stored) // 60 + 60  # seven graphs of average size

    def notes(name: str, batch_size: int, limit: int) -> list[str]:
        words = ["train-head", stored.path, "-o", tmp_path / name, "--epochs", 1]
        words += ["--batch-size", batch_size, "--memory-limit", limit]
        done = histograph(*words)
        assert done.exit_code == 0, done.output
        return [line for line in done.stderr.splitlines() if "memory limit" in line]

    (told,) = notes("many", 30, limit)
    assert "batches of 30 graphs" in told
    assert told.endswith("7 would fit")
    assert notes("seven", 7, limit) == []
    (told,) = notes("none", 1, 1000)
    assert told.endswith("the largest graph alone is too large")


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's account of a process's memory")
def test_batches_from_the_file_stay_within_the_memory_they_may_use(
    tmp_path: Path, forked: Callable[..., int]
) -> None:
    stored = make_cache(tmp_path / "a.cache", hidden=512, num_graphs=600)
    limit = float32_bytes(stored) // 3
    code = (
        "import re, torch\n"
        "from pathlib import Path\n"
        "from histograph_post.training.batches import HeadBatches\n"
        "from histograph_post.training.loaded_cache import LoadedCache\n"
        "from histograph_post.caches import Cache\n"
        "from histograph_post.tasks import infer_task\n"
        "def peak():\n"
        "    return int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "def read(path):\n"
        "    loaded = LoadedCache(Cache.open(path), memory_limit=allowed)\n"
        "    task, train = infer_task(loaded.labels, 'graph'), loaded.cache.splits.folds[0].train\n"
        "    source = HeadBatches(loaded, loaded.history(train), task, torch.device('cpu'))\n"
        "    for step in source.batches(train, batch_size=4, seed=0): pass\n"
        "read(small)\n"  # loads libraries, which take memory too
        "before = peak()\n"
        "read(stored)\n"
        "Path(out).write_text(str(1024 * (peak() - before)))\n"
    )
    small = make_cache(tmp_path / "small.cache")
    used = {}
    for name, allowed in (("disk", limit), ("memory", 5 * limit)):
        out = tmp_path / name
        assert forked(code, small=small.path, stored=stored.path, allowed=allowed, out=out) == 0
        used[name] = int(out.read_text())
    assert used["disk"] < limit < used["memory"]
