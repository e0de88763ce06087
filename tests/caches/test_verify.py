"""Verifying finds every changed byte, says where it is, and never raises for it."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch_geometric.data import Data

import histograph_post as hg
from histograph_post.caches import Cache, verify_cache
from histograph_post.caches.manifest import write_manifest
from histograph_post.caches.provenance import Canary
from histograph_post.errors import CacheError, NotFoundError

from ..helpers import NodeModel, demo_graphs, make_model

FILES = ("manifest.json", "splits.json", "shard-00000.h5", "shard-00001.h5")
KINDS = [{}, {"widths": (4, 2)}, {"compression": "gzip"}, {"dtype": "bfloat16"}]


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_cache(example, tmp_path, kind):
    manifest = example(**kind).write(tmp_path, [(0, 2), (2, 5)])
    seen = []
    report = verify_cache(tmp_path, lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.problems == ()
    assert sorted(row.file for row in report.rows) == sorted(FILES)
    sizes = [shard.num_bytes for shard in manifest.shards]
    assert seen == [(sizes[0], sum(sizes)), (sum(sizes), sum(sizes))]


def test_every_damaged_file_is_listed(example, tmp_path):
    example().write(tmp_path, [(0, 2), (2, 4), (4, 5)])
    flip(tmp_path / "shard-00000.h5", -5, 3)
    (tmp_path / "shard-00001.h5").unlink()
    flip(tmp_path / "splits.json", 10, 0)
    report = verify_cache(tmp_path)
    assert not report.ok
    problems = {row.file: row.problem for row in report.rows}
    assert "found checksum" in problems["shard-00000.h5"]
    assert "found nothing" in problems["shard-00001.h5"]
    assert "found checksum" in problems["splits.json"]
    assert problems["manifest.json"] is None
    assert problems["shard-00002.h5"] is None


def test_a_broken_manifest_is_listed(example, tmp_path):
    example().write(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    report = verify_cache(tmp_path)
    assert [row.file for row in report.rows] == ["manifest.json"]
    assert "broken JSON" in report.problems[0]


def test_a_changed_canary_is_listed(tmp_path):
    cache = hg.cache(make_model(), demo_graphs(6), tmp_path)
    assert verify_cache(tmp_path).ok
    path = tmp_path / "canary.safetensors"
    flip(path, -1, 0)
    (problem,) = verify_cache(tmp_path).problems
    assert "canary.safetensors: found checksum" in problem
    endless = {"names": [], "values": {}, "tolerances": [10**400]}
    for contents in (
        *(b"", b"nothing", save({"layer.0": torch.ones(2)}), save({}, {"canary": "{}"})),
        *(save({}, {"canary": "[" * 10**5}), save({}, {"canary": json.dumps(endless)})),
    ):
        path.write_bytes(contents)
        sha256 = hashlib.sha256(contents).hexdigest()
        provenance = replace(cache.manifest.provenance, canary_sha256=sha256)
        write_manifest(tmp_path, replace(cache.manifest, provenance=provenance))
        (problem,) = verify_cache(tmp_path).problems
        assert "expected a canary" in problem
    path.unlink()
    (problem,) = verify_cache(tmp_path).problems
    assert "found nothing, expected a regular file" in problem


def test_a_large_graph_has_a_small_canary(tmp_path):
    nodes = torch.arange(900)
    ring = torch.stack([nodes, nodes.roll(1)])
    x = torch.randn(900, 4)
    graph = Data(x=x, edge_index=torch.cat([ring, ring.flip(0)], 1), y=nodes % 2, name="secret")
    model = NodeModel().eval()
    hg.cache(model, [graph], tmp_path)
    canary = Canary.from_bytes((tmp_path / "canary.safetensors").read_bytes(), "canary")
    assert 1 < canary.graph.num_nodes <= 256
    assert canary.graph.num_edges > 0
    assert sorted(canary.graph.keys()) == ["edge_index", "x"]  # no labels, masks or names
    assert canary.history[-1].shape == (canary.graph.num_nodes, 3)


def test_no_cache_at_all(tmp_path):
    with pytest.raises(NotFoundError):
        verify_cache(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("widths", [(4, 4), (4, 3)])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_named(example, sign, tmp_path, dtype, widths, value):
    made = example([3, 2, 4], widths, dtype=dtype)
    manifest = made.write(tmp_path)
    name = "activations" if widths == (4, 4) else "activations/1"
    # Row 4 is the last of the second graph; its first channel of the second layer.
    place = 4 * 8 + 4 if widths == (4, 4) else 4 * 3
    bits = torch.tensor([value], dtype=getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
    with (tmp_path / "shard-00000.h5").open("r+b") as file:
        file.seek(manifest.shards[0].extents[name][0][0] + place * len(bits))
        file.write(bits)
    sign(tmp_path, lambda value: None)
    (problem,) = verify_cache(tmp_path).problems
    assert "graph 'molécule-1', layer 'layers.1': found a value that is not finite" in problem


@pytest.fixture(scope="module")
def caches(example, tmp_path_factory):
    """One cache of every kind, to be copied before it is damaged."""
    folder = tmp_path_factory.mktemp("caches")
    made = [example(**kind) for kind in KINDS]
    manifests = [
        item.write(folder / str(number), [(0, 2), (2, 5)]) for number, item in enumerate(made)
    ]
    return folder, made, manifests


@contextmanager
def copy_of_one(caches, data):
    folder, made, manifests = caches
    number = data.draw(st.integers(0, len(made) - 1))
    with tempfile.TemporaryDirectory() as name:
        copy = shutil.copytree(folder / str(number), Path(name) / "copy")
        yield copy, made[number], manifests[number]


@given(st.data())
@settings(max_examples=120)
def test_a_flipped_bit_is_found_or_means_nothing(caches, data):
    """In the manifest, the splits and the heads at once; in the activations by verifying."""
    with copy_of_one(caches, data) as (folder, made, manifest):
        path = folder / data.draw(st.sampled_from(FILES))
        position = data.draw(st.integers(0, path.stat().st_size - 1))
        flip(path, position, data.draw(st.integers(0, 7)))
        try:
            cache = Cache.open(folder)
            found = (cache.manifest, cache.splits, cache.ids())
            graphs = list(cache)
        except CacheError:
            found = None
        if found is None:
            assert not verify_cache(folder).ok
            return
        assert found == (manifest, made.splits(), made.ids)
        assert len(graphs) == made.num_graphs
        if path.suffix == ".h5":
            shard = manifest.shards[int(path.stem[-1])]
            assert position >= shard.head_bytes(manifest.layout)
            assert not verify_cache(folder).ok
        else:
            # White space that is other white space now.
            assert verify_cache(folder).ok


@given(st.data())
@settings(max_examples=120)
def test_signed_random_numbers_never_read_outside_of_the_file(caches, sign, data):
    """A stranger may sign any number: the reader refuses it, or stays within the file."""
    aligned = st.integers(0, 300).map(lambda number: 64 * number)
    numbers = st.one_of(st.integers(-2, 200), st.integers(0, 2**64), aligned)

    def scramble(manifest):
        shard = manifest["shards"][0]
        for _ in range(data.draw(st.integers(1, 3))):
            pieces = shard["extents"][data.draw(st.sampled_from(sorted(shard["extents"])))]
            if pieces and data.draw(st.booleans()):
                pieces[0][data.draw(st.integers(0, 1))] = data.draw(numbers)
            else:
                names = ["start", "stop", "num_nodes", "num_edges", "num_labels", "num_bytes"]
                shard[data.draw(st.sampled_from(names))] = data.draw(numbers)

    with copy_of_one(caches, data) as (folder, made, _):
        sign(folder, scramble)
        # Once more, so that the checksums fit the places that are claimed now.
        sign(folder, lambda manifest: None)
        try:
            cache = Cache.open(folder)
            batch = cache.gather(range(len(cache)), edges=True)
        except CacheError:
            assert not verify_cache(folder).ok
        else:
            assert batch.ptr[-1] == made.num_nodes.sum()


@given(st.data())
@settings(max_examples=120)
def test_signed_random_bytes_are_refused_or_read(caches, sign, data):
    """A stranger may sign any bytes: nothing but a known error comes of it."""
    with copy_of_one(caches, data) as (folder, made, manifest):
        path = folder / "shard-00000.h5"
        head = manifest.shards[0].head_bytes(manifest.layout)
        for _ in range(data.draw(st.integers(1, 4))):
            flip(path, data.draw(st.integers(0, head - 1)), data.draw(st.integers(0, 7)))
        sign(folder, lambda manifest: None)
        try:
            cache = Cache.open(folder)
            graphs = list(cache)
            batch = cache.gather(range(len(cache)), edges=True)
        except CacheError:
            assert not verify_cache(folder).ok
        else:
            assert sum(len(graph.labels) for graph in graphs) == made.num_graphs
            assert batch.ptr[-1] == made.num_nodes.sum()
