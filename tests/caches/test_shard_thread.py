"""Shards are hashed when they are complete: at once, or while the model waits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from histograph_post.caches.caching import cache
from histograph_post.data import GraphDataset, load_data
from histograph_post.errors import CacheError
from histograph_post.models import build_model


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return build_model("gin", {"hidden": 8, "num_layers": 3}, in_dim=4, out_dim=1)


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return load_data("demo:", args={"num_graphs": 60})


@pytest.fixture(params=[1, max(2, os.cpu_count() or 1)])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Leave PyTorch one thread, and as many as there are cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_hashes_are_those_of_the_shards(
    model: nn.Module, dataset: GraphDataset, tmp_path: Path, threads: int
) -> None:
    written = cache(model, dataset, tmp_path / "a", shard_bytes=10_000, node_budget=100)
    assert written is not None
    assert len(written.manifest.shards) > 8
    for shard in written.manifest.shards:
        content = (tmp_path / "a" / f"shard-{shard.index:05d}.h5").read_bytes()
        assert shard.sha256 == hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("threads", [max(2, os.cpu_count() or 1)], indirect=True)
def test_shard_that_is_gone_before_it_is_hashed_is_told(
    model: nn.Module, dataset: GraphDataset, tmp_path: Path, threads: int
) -> None:
    def remove(done: int, total: int) -> None:
        (tmp_path / "a" / "shard-00001.h5").unlink(missing_ok=True)

    with pytest.raises(CacheError, match=r"shard-00001\.h5: found nothing, expected a regular"):
        cache(model, dataset, tmp_path / "a", on_progress=remove, shard_bytes=20_000)
    assert not (tmp_path / "a" / "manifest.json").exists()
