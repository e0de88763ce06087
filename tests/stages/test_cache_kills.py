"""A cache that is killed with a real SIGKILL and goes on ends with the same bytes."""

from __future__ import annotations

import os
import subprocess
import sys
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
import os, signal, sys
from histograph_post.data import DataSpec
from histograph_post.models import ModelSpec
from histograph_post.models.spec import load_pretrained
from histograph_post.caches.caching import cache
from pathlib import Path
checkpoint, data, root, out, moment, shard_bytes, budget = sys.argv[1:]
source = load_pretrained(
    ModelSpec("gin", checkpoint=Path(checkpoint)), DataSpec(data, root=Path(root))
)
calls = 0
def progress(done, total):
    global calls
    calls += done > 0  # after a batch, not before the first
    if done and calls == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)
cache(source.model, source.dataset, out, shard_bytes=int(shard_bytes), node_budget=int(budget),
      on_progress=progress)
"""


def run_until_killed(
    checkpoint: Path,
    data: str,
    root: Path,
    out: Path,
    moment: int,
    *,
    shard_bytes: int,
    budget: int,
) -> int:
    arguments = (checkpoint, data, root, out, moment, shard_bytes, budget)
    if moment == 0:  # never killed: no process is needed
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["-c", *map(str, arguments)])
            exec(KILLED, {})
        return 0
    command = [sys.executable, "-W", "ignore", "-c", KILLED, *map(str, arguments)]
    return subprocess.run(command, check=False, env=os.environ).returncode


def assert_kills_leave_no_trace(
    checkpoint: Path, data: str, root: Path, tmp_path: Path, moments: list[int], **sizes: int
) -> None:
    whole, broken = tmp_path / "whole.cache", tmp_path / "broken.cache"
    assert run_until_killed(checkpoint, data, root, whole, 0, **sizes) == 0
    for moment in moments:
        assert run_until_killed(checkpoint, data, root, broken, moment, **sizes) == -9
        assert not (broken / "manifest.json").exists()
    assert run_until_killed(checkpoint, data, root, broken, 0, **sizes) == 0
    bytes_of = {path.name: path.read_bytes() for path in whole.iterdir()}
    assert bytes_of == {path.name: path.read_bytes() for path in broken.iterdir()}


def save_model(folder: Path, in_dim: int, **sizes: int) -> Path:
    torch.manual_seed(0)
    checkpoint = folder / "model.safetensors"
    save_file(build_model("gin", sizes, in_dim=in_dim, out_dim=1).state_dict(), checkpoint)
    return checkpoint


def test_killed_twice_and_resumed_gives_the_same_bytes(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path, 4, hidden=8, num_layers=3)
    assert_kills_leave_no_trace(
        checkpoint, "demo:", tmp_path, tmp_path, [7, 12], shard_bytes=100_000, budget=300
    )


@pytest.mark.parametrize(
    ("shard_bytes", "budget"), [(100_000, 150), pytest.param(20_000, 300, marks=pytest.mark.long)]
)
def test_a_kill_costs_the_shard_in_hand_and_the_batches_that_wait(
    tmp_path: Path, shard_bytes: int, budget: int
) -> None:
    checkpoint = save_model(tmp_path, 4, hidden=8, num_layers=3)
    num_nodes = load_data("demo:").num_nodes
    shards = plan_shards(num_nodes, row_bytes=4 * 8 * 4, shard_bytes=shard_bytes)
    batches = [len(list(budget_batches(num_nodes[slice(*shard)], budget))) for shard in shards]
    assert len(shards) > 2
    for killed_after in (sum(batches[:2]), sum(batches[:2]) + 2):
        out = tmp_path / f"{killed_after}.cache"
        sizes = {"shard_bytes": shard_bytes, "budget": budget}
        assert run_until_killed(checkpoint, "demo:", tmp_path, out, killed_after, **sizes) == -9
        safe = np.cumsum(batches) <= killed_after - 2
        found = sorted(path.name for path in out.glob("shard-*.h5"))
        assert found[: safe.sum()] == [shard_name(index) for index in range(safe.sum())]
        assert len(list(out.glob("shard-*.partial"))) <= 1


@pytest.mark.long
def test_killed_on_nci1_and_resumed_gives_the_same_bytes(shared_data: Path, tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path, 37)
    moment = int(np.random.default_rng().integers(1, 15))
    assert_kills_leave_no_trace(
        checkpoint,
        "tu:NCI1",
        shared_data,
        tmp_path,
        [moment],
        shard_bytes=32 * 2**20,
        budget=8192,
    )
