"""Shards are written and hashed while the model runs, and what goes wrong is told."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from pathlib import Path

import pytest
from torch import nn

from histograph_post.caches.caching import cache
from histograph_post.data import GraphDataset, load_data
from histograph_post.errors import CacheError

from ..helpers import make_model


@pytest.fixture
def model() -> nn.Module:
    return make_model()


@pytest.fixture(scope="module")
def dataset() -> GraphDataset:
    return load_data("demo:", args={"num_graphs": 60})


def test_hashes_are_those_of_the_shards(
    model: nn.Module, dataset: GraphDataset, tmp_path: Path
) -> None:
    written = cache(model, dataset, tmp_path / "a", shard_bytes=10_000, node_budget=100)
    assert written is not None
    assert len(written.manifest.shards) > 8
    for shard in written.manifest.shards:
        content = (tmp_path / "a" / f"shard-{shard.index:05d}.h5").read_bytes()
        assert shard.sha256 == hashlib.sha256(content).hexdigest()


def test_shard_that_is_gone_before_the_end_is_told(
    model: nn.Module, dataset: GraphDataset, tmp_path: Path
) -> None:
    def remove(done: int, total: int) -> None:
        (tmp_path / "a" / "shard-00001.h5").unlink(missing_ok=True)

    with pytest.raises(CacheError, match=r"shard-00001\.h5: found nothing, expected a regular"):
        cache(model, dataset, tmp_path / "a", on_progress=remove, shard_bytes=20_000)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_interrupt_while_a_shard_is_closed_leaves_no_half_of_it(
    model: nn.Module, dataset: GraphDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, []

    def interrupted(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            synced.append(descriptor)
            # The second shard. Of the first its record, and then itself, were synced, each with its
            # folder, and so was the record of the second.
            if len(synced) == 7:
                os.kill(os.getpid(), signal.SIGINT)  # which the main thread takes meanwhile
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache(model, dataset, tmp_path / "a", shard_bytes=20_000)
    found = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert {"shard-00000.h5", "shard-00001.h5"} <= set(found)
    assert not [name for name in found if name.endswith(".partial")]
    assert cache(model, dataset, tmp_path / "a", shard_bytes=20_000) is not None
