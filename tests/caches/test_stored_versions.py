"""Caches that earlier versions wrote stay readable (made by ``fixtures/make_v1.py``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from histograph_post.caches import Cache, verify_cache

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.mark.parametrize(
    ("name", "widths", "dtype"),
    [("v1.cache", (4, 4, 4), torch.float32), ("v1-mixed-gzip.cache", (4, 2), torch.bfloat16)],
)
def test_version_1(name, widths, dtype):
    report = verify_cache(FIXTURES / name)
    assert report.ok, report.problems
    cache = Cache.open(FIXTURES / name)
    assert (cache.num_graphs, cache.widths, cache.dtype) == (3, widths, dtype)
    assert cache.num_nodes.tolist() == [3, 1, 4]
    assert cache.ids() == ["graph 0", "graph 1", "graph 2"]
    np.testing.assert_array_equal(cache.labels(), [[0.0], [np.nan], [1.0]])
    np.testing.assert_array_equal(cache.outputs(), [[0.0], [0.5], [1.0]])
    assert cache.weights_sha256 == "a" * 64
    assert cache.manifest.own_metrics == {"accuracy": 0.5}
    (fold,) = cache.splits.folds
    assert [part.tolist() for part in fold.parts] == [[0], [1], [2]]

    batch = cache.gather([2, 0, 1], edges=True)
    history = batch.history.unbind(1) if isinstance(batch.history, torch.Tensor) else batch.history
    nodes = [4, 5, 6, 7, 0, 1, 2, 3]
    for layer, width in enumerate(widths):
        expected = [[node * 16 + layer * 4 + channel for channel in range(width)] for node in nodes]
        assert history[layer].dtype == dtype
        assert history[layer].tolist() == expected
    assert batch.ptr.tolist() == [0, 4, 7, 8]
    assert batch.edge_index.tolist() == [[0, 1, 2, 4, 5], [1, 2, 3, 5, 6]]
