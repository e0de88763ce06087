"""A cache that is killed with a real SIGKILL and goes on ends with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from histograph_post.caches.layout import shard_name
from histograph_post.caches.planning import plan_shards
from histograph_post.data import load_data
from histograph_post.data.batching import budget_batches
from histograph_post.models import build_model

KILLED = """
import os, signal
from histograph_post.data import DataSpec
from histograph_post.models import ModelSpec
from histograph_post.models.spec import load_pretrained
from histograph_post.caches.caching import cache
source = load_pretrained(ModelSpec("gin", checkpoint=checkpoint), DataSpec(data, root=root))
calls = 0
def progress(done, total):
    global calls
    calls += done > 0  # after a batch, not before the first
    if done and calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)
cache(source.model, source.dataset, out, shard_bytes=shard_bytes, node_budget=budget,
      on_progress=progress)
"""

Cache = Callable[..., int]


@pytest.fixture
def cache(forked: Callable[..., int]) -> Cache:
    """Cache in a process that is killed after a batch; batches are counted from 1, 0 is never."""

    def run(out: Path, moment: int, **names: object) -> int:
        names |= {"out": out, "moment": moment}
        if moment == 0:  # no process is needed
            exec(KILLED, names)
            return 0
        return forked(KILLED, **names)

    return run


def assert_kills_leave_no_trace(
    cache: Cache, tmp_path: Path, moments: list[int], **names: object
) -> None:
    whole, broken = tmp_path / "whole.cache", tmp_path / "broken.cache"
    assert cache(whole, 0, **names) == 0
    for moment in moments:
        assert cache(broken, moment, **names) == -9
        assert not (broken / "manifest.json").exists()
    assert cache(broken, 0, **names) == 0
    bytes_of = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert bytes_of == {path.name: path.read_bytes() for path in broken.iterdir()}


def save_model(folder: Path, in_dim: int, **sizes: int) -> Path:
    torch.manual_seed(0)
    checkpoint = folder / "model.safetensors"
    save_file(build_model("gin", sizes, in_dim=in_dim, out_dim=1).state_dict(), checkpoint)
    return checkpoint


def test_killed_twice_and_resumed_gives_the_same_bytes(cache: Cache, tmp_path: Path) -> None:
    names = {"checkpoint": save_model(tmp_path, 4, hidden=8, num_layers=3), "data": "demo:"}
    sizes = {"shard_bytes": 100_000, "budget": 300}
    assert_kills_leave_no_trace(cache, tmp_path, [7, 12], root=tmp_path, **names, **sizes)


@pytest.mark.parametrize(
    ("shard_bytes", "budget"), [(100_000, 150), pytest.param(20_000, 300, marks=pytest.mark.long)]
)
def test_a_kill_costs_the_shard_in_hand_and_the_batches_that_wait(
    cache: Cache, tmp_path: Path, shard_bytes: int, budget: int
) -> None:
    checkpoint = save_model(tmp_path, 4, hidden=8, num_layers=3)
    num_nodes = load_data("demo:").num_nodes
    shards = plan_shards(num_nodes, row_bytes=4 * 8 * 4, shard_bytes=shard_bytes)
    batches = [len(list(budget_batches(num_nodes[slice(*shard)], budget))) for shard in shards]
    assert len(shards) > 2
    for killed_after in (sum(batches[:2]), sum(batches[:2]) + 2):
        out = tmp_path / f"{killed_after}.cache"
        names = {"checkpoint": checkpoint, "data": "demo:", "root": tmp_path}
        names |= {"shard_bytes": shard_bytes, "budget": budget}
        assert cache(out, killed_after, **names) == -9
        safe = np.cumsum(batches) <= killed_after - 2
        found = sorted(path.name for path in out.glob("shard-*.h5"))
        assert found[: safe.sum()] == [shard_name(index) for index in range(safe.sum())]
        assert len(list(out.glob("shard-*.partial"))) <= 1


@pytest.mark.long
def test_killed_on_nci1_and_resumed_gives_the_same_bytes(
    cache: Cache, shared_data: Path, tmp_path: Path
) -> None:
    names = {"checkpoint": save_model(tmp_path, 37), "data": "tu:NCI1", "root": shared_data}
    moment = int(np.random.default_rng().integers(1, 15))
    sizes = {"shard_bytes": 32 * 2**20, "budget": 8192}
    assert_kills_leave_no_trace(cache, tmp_path, [moment], **names, **sizes)
