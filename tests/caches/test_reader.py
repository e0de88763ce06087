"""Reading a cache gives back what was written, without copying it."""

from __future__ import annotations

import pickle
import tempfile
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch_geometric.data import Batch, Data

from histograph_post.caches import Cache
from histograph_post.errors import CacheError, DataError, NotFoundError


def stored(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(getattr(torch, dtype))


def layers(history: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return list(history.unbind(1)) if isinstance(history, torch.Tensor) else history


@st.composite
def settings_of_a_cache(draw):
    num_nodes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6))
    cuts = draw(st.sets(st.integers(1, max(1, len(num_nodes) - 1))))
    bounds = sorted({0, len(num_nodes), *(cut for cut in cuts if cut < len(num_nodes))})
    width = draw(st.integers(1, 5))
    mixed = st.lists(st.integers(1, 5), min_size=1, max_size=4)
    level = draw(st.sampled_from(["graph", "node", "link"]))
    output_levels = ["graph", "node"] + (["link"] if level == "link" else [])
    return {
        "num_nodes": num_nodes,
        "shards": list(pairwise(bounds)),
        "widths": draw(st.one_of(st.just([width] * draw(st.integers(1, 4))), mixed)),
        "level": level,
        "targets": draw(st.integers(0, 3)),
        "output_width": draw(st.sampled_from([None, 1, 3])),
        "output_level": draw(st.sampled_from(output_levels)),
        "dtype": draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        "compression": draw(st.sampled_from([None, "gzip"])),
        "has_edges": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


@given(settings_of_a_cache())
@settings(max_examples=50)
def test_round_trip(example, options):
    shards = options.pop("shards")
    made = example(**options)
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder), shards)
        cache = Cache.open(folder)
        assert len(cache) == cache.num_graphs == made.num_graphs
        assert cache.num_nodes.tolist() == made.num_nodes.tolist()
        assert cache.ids() == made.ids
        assert (cache.widths, cache.layer_names) == (made.layout.widths, made.layout.layer_names)
        assert cache.weights_sha256 == "a" * 64
        if sum(map(len, made.labels)):
            assert cache.splits == made.splits()
        np.testing.assert_array_equal(cache.labels(), np.concatenate(made.labels))
        rows = [len(label) for label in made.labels]
        assert cache.label_ptr.tolist() == [0, *np.cumsum(rows).tolist()]
        if made.edge_label_index is not None:
            first_nodes = np.cumsum(made.num_nodes) - made.num_nodes
            shifted = [
                pairs + int(first)
                for pairs, first in zip(made.edge_label_index, first_nodes, strict=True)
            ]
            assert torch.equal(cache.label_pairs(), torch.cat(shifted, dim=1))
        if made.outputs is None:
            assert cache.outputs() is None
        else:
            np.testing.assert_array_equal(cache.outputs(), torch.cat(made.outputs).numpy())
        for index, graph in enumerate(cache):
            assert graph.id == made.ids[index]
            assert isinstance(graph.history, torch.Tensor) == (len(set(made.layout.widths)) == 1)
            for found, expected in zip(layers(graph.history), made.histories[index], strict=True):
                assert found.dtype == cache.dtype
                assert torch.equal(found, stored(expected, made.layout.dtype))
            np.testing.assert_array_equal(graph.labels.numpy(), made.labels[index])
            if made.outputs is not None:
                assert torch.equal(graph.outputs, made.outputs[index])
            if made.layout.has_edges:
                assert torch.equal(graph.edge_index, made.edge_index[index])
            else:
                assert graph.edge_index is None
            if made.edge_label_index is not None:
                assert torch.equal(graph.edge_label_index, made.edge_label_index[index])


@given(settings_of_a_cache(), st.data())
@settings(max_examples=30)
def test_gather_is_the_batch_that_pyg_makes(example, options, data):
    shards = options.pop("shards")
    made = example(**{**options, "has_edges": True})
    indices = data.draw(st.lists(st.integers(0, made.num_graphs - 1), max_size=8))
    with tempfile.TemporaryDirectory() as folder:
        made.write(Path(folder), shards)
        batch = Cache.open(folder).gather(indices, edges=True)
    expected = [
        torch.cat([made.histories[index][layer] for index in indices])
        if indices
        else torch.empty(0, width)
        for layer, width in enumerate(made.layout.widths)
    ]
    for found, layer in zip(layers(batch.history), expected, strict=True):
        assert torch.equal(found, stored(layer, made.layout.dtype))
    if indices:
        together = Batch.from_data_list(
            [
                Data(edge_index=made.edge_index[index], num_nodes=int(made.num_nodes[index]))
                for index in indices
            ]
        )
        assert torch.equal(batch.ptr, together.ptr)
        assert torch.equal(batch.edge_index, together.edge_index)
    else:
        assert batch.ptr.tolist() == [0]
        assert batch.edge_index.shape == (2, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("widths", [(8, 8), (8, 4)])
def test_histories_are_views_of_the_mapped_file(example, tmp_path, dtype, widths):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc/self/maps")
    example([5, 6, 7], widths, dtype=dtype).write(tmp_path)
    cache = Cache.open(tmp_path)
    graph = cache[1]
    mapped = [
        [int(bound, 16) for bound in line.split()[0].split("-")]
        for line in maps.read_text().splitlines()
        if line.endswith(str(tmp_path / "shard-00000.h5"))
    ]
    for layer in layers(graph.history):
        assert any(start <= layer.data_ptr() < stop for start, stop in mapped)


def test_reading_graphs_allocates_nothing_of_their_size(example, tmp_path):
    made = example([400] * 8, [64, 64, 64])
    made.write(tmp_path)
    cache = Cache.open(tmp_path)
    num_bytes = int(made.num_nodes.sum()) * made.layout.row_bytes
    kept = [cache[0]]
    tracemalloc.start()
    kept += [cache[index] for index in range(1, len(cache))]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    edges = sum(edge_index.nbytes for edge_index in made.edge_index)
    assert sum(graph.history.nbytes for graph in kept) == num_bytes
    assert peak < edges + 100_000 < num_bytes / 4


def test_every_dataset_is_aligned(example, tmp_path):
    example([5, 6, 7], (8, 4), level="link").write(tmp_path)
    cache = Cache.open(tmp_path)
    for shard in cache.manifest.shards:
        assert all(offset % 64 == 0 for pieces in shard.extents.values() for offset, _ in pieces)


def test_writing_into_a_view_never_reaches_the_file(example, tmp_path):
    made = example()
    made.write(tmp_path)
    before = (tmp_path / "shard-00000.h5").read_bytes()
    Cache.open(tmp_path)[0].history.zero_()
    assert (tmp_path / "shard-00000.h5").read_bytes() == before
    fresh = Cache.open(tmp_path)[0].history
    assert torch.equal(fresh[:, 0], made.histories[0][0])


def test_a_pickled_cache_reads_the_same(example, tmp_path, monkeypatch):
    example().write(tmp_path / "here", [(0, 2), (2, 5)])
    monkeypatch.chdir(tmp_path)
    cache = Cache.open("here")
    expected = [graph.history.clone() for graph in cache]
    text = pickle.dumps(cache)
    assert len(text) < 10_000, "maps must not travel"
    monkeypatch.chdir("/")
    again = pickle.loads(text)
    assert all(
        torch.equal(graph.history, history) for graph, history in zip(again, expected, strict=True)
    )


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_workers_of_a_data_loader(example, tmp_path, compression):
    made = example([3, 1, 4, 2, 5, 6], compression=compression)
    made.write(tmp_path, [(0, 2), (2, 4), (4, 6)])
    cache = Cache.open(tmp_path)
    cache[0]  # one shard is open before the fork, the others are not
    loader = DataLoader(
        range(len(cache)),
        batch_size=2,
        num_workers=2,
        collate_fn=lambda indices: cache.gather(indices).history,
        multiprocessing_context="fork",
    )
    expected = torch.cat([torch.stack(history, dim=1) for history in made.histories])
    assert torch.equal(torch.cat(list(loader)), expected)


def test_many_shards_do_not_exhaust_file_descriptors(example, tmp_path, monkeypatch):
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc/self/fd")
    made = example([2] * 6)
    made.write(tmp_path, [(index, index + 1) for index in range(6)])
    monkeypatch.setattr("histograph_post.caches.shard.MAX_OPEN_SHARDS", 2)
    cache = Cache.open(tmp_path)
    graphs = [cache[index] for index in range(6)]
    expected = [torch.stack(history, dim=1) for history in made.histories]
    assert all(torch.equal(g.history, h) for g, h in zip(graphs, expected, strict=True))
    del graphs
    open_files = [link.resolve() for link in descriptors.iterdir()]
    assert sum(path.parent == tmp_path.resolve() for path in open_files) == 2


def test_few_file_descriptors_are_enough_for_many_shards(example, tmp_path):
    resource = pytest.importorskip("resource")
    descriptors = Path("/proc/self/fd")
    if not descriptors.exists():
        pytest.skip("needs /proc/self/fd")
    used = max(int(path.name) for path in descriptors.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 2 * (used + 20)
    made = example([1] * limit)
    made.write(tmp_path, [(index, index + 1) for index in range(limit)])
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        found = Cache.open(tmp_path).gather(range(limit)).history
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    expected = torch.cat([torch.stack(history, dim=1) for history in made.histories])
    assert torch.equal(found, expected)


def test_an_incomplete_cache_says_how_to_resume(example, tmp_path):
    example().write(tmp_path, [(0, 2), (2, 5)])
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(
        CacheError, match=r"2 shards but no manifest\.json.*same `histograph cache`"
    ):
        Cache.open(tmp_path)


def test_no_cache_at_all(tmp_path):
    with pytest.raises(NotFoundError, match="nowhere"):
        Cache.open(tmp_path / "nowhere")


def test_indices_out_of_range(example, tmp_path):
    example().write(tmp_path)
    cache = Cache.open(tmp_path)
    assert cache[-1].id == cache[4].id
    assert [graph.id for graph in cache[1:9:2]] == [cache[1].id, cache[3].id]
    for index in (5, -6):
        with pytest.raises(IndexError):
            cache[index]
        with pytest.raises(IndexError):
            cache.gather([0, index])


@pytest.mark.parametrize(
    "graphs",
    [np.array([True, False, True, False, False]), [False, True], [1.0, 2.0], torch.ones(3).bool()],
)
def test_graphs_that_are_no_numbers_are_refused(example, tmp_path, graphs):
    example().write(tmp_path)
    cache = Cache.open(tmp_path)
    with pytest.raises(DataError, match=r"found graphs given as (bool|float64), expected their"):
        cache.gather(graphs)
    with pytest.raises(DataError, match="expected their numbers"):
        next(cache.pieces(graphs))


def test_graphs_may_be_any_integers_or_none(example, tmp_path):
    example().write(tmp_path)
    cache = Cache.open(tmp_path)
    expected = cache.gather([3, 1]).history
    for graphs in ((3, 1), torch.tensor([3, 1]), np.array([3, 1], np.uint8)):
        assert torch.equal(cache.gather(graphs).history, expected)
    for none in ([], np.array([]), range(0)):
        assert len(cache.gather(none).history) == 0


def test_edges_that_were_not_stored(example, tmp_path):
    example(has_edges=False).write(tmp_path)
    with pytest.raises(CacheError, match="found no edge_index"):
        Cache.open(tmp_path).gather([0], edges=True)


def test_repr(example, tmp_path):
    example().write(tmp_path)
    assert repr(Cache.open(tmp_path)) == (
        f"Cache({str(tmp_path)!r}, graphs=5, layers=3, dtype=float32)"
    )
