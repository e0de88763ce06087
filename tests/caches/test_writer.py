"""Shards: planned by bytes, written whole or not at all, the same bytes every time."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from histograph_post.caches import Cache
from histograph_post.caches.manifest import ShardRecord, read_record
from histograph_post.caches.planning import plan_shards
from histograph_post.caches.writer import ShardWriter
from histograph_post.errors import CacheError
from histograph_post.utils.files import atomic_path

from .conftest import writing

KINDS = [
    {},
    {"widths": (4, 3, 2), "dtype": "bfloat16"},
    {"compression": "gzip", "dtype": "float16"},
    {"widths": (2, 5), "level": "link", "output_level": "link", "compression": "gzip"},
]


@given(st.lists(st.integers(0, 20), max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_plan_shards(num_nodes, row_bytes, shard_bytes):
    shards = plan_shards(np.array(num_nodes, dtype=np.int64), row_bytes, shard_bytes)
    covered = [graph for start, stop in shards for graph in range(start, stop)]
    assert covered == list(range(len(num_nodes)))
    for start, stop in shards:
        size = sum(num_nodes[start:stop]) * row_bytes
        assert size <= shard_bytes or stop == start + 1
        if stop < len(num_nodes):
            assert size + num_nodes[stop] * row_bytes > shard_bytes, "another graph had room"


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_cache_has_the_same_bytes(example, tmp_path, kind):
    made = example([30, 1, 25, 0, 40], **kind)
    shards = [(0, 3), (3, 5)]
    for batch_size, name in ((1, "one"), (3, "three")):
        made.write(tmp_path / name, shards, batch_size)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["manifest.json", "shard-00000.h5", "shard-00001.h5", "splits.json"]
    for name in files:
        one, three = (tmp_path / folder / name for folder in ("one", "three"))
        assert one.read_bytes() == three.read_bytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_no_object_carries_a_time_stamp(example, tmp_path, kind):
    example(**kind).write(tmp_path)
    data = (tmp_path / "shard-00000.h5").read_bytes()
    # HDF5 file format, object header version 2: bit 5 of the flags says that times are stored.
    flags = [data[match.end()] for match in re.finditer(b"OHDR\x02", data)]
    assert len(flags) > 5
    assert not any(flag & 0x20 for flag in flags)


@pytest.mark.parametrize("kind", KINDS)
def test_any_hdf5_tool_can_read_a_shard(example, tmp_path, kind):
    made = example([30, 1, 25, 0, 40], **kind)
    made.write(tmp_path, [(0, 2), (2, 5)])
    layout, graphs = made.layout, range(2, 5)
    with h5py.File(tmp_path / "shard-00001.h5") as file:
        assert file.attrs["plan_hash"].decode() == made.plan([(0, 2), (2, 5)])
        assert (file.attrs["index"], file.attrs["start"], file.attrs["stop"]) == (1, 2, 5)
        ids = file["ids"][()].tobytes()
        bounds = file["id_ptr"][()]
        assert ids[bounds[1] : bounds[2]].decode() == made.ids[3]
        assert file["ptr"][()].tolist() == [0, 25, 25, 65]
        np.testing.assert_array_equal(
            file["labels"][()], np.concatenate([made.labels[graph] for graph in graphs])
        )
        edges = torch.cat([made.edge_index[graph] for graph in graphs], dim=1)
        np.testing.assert_array_equal(file["edge_index"][()], edges.numpy())
        outputs = torch.cat([made.outputs[graph] for graph in graphs])
        np.testing.assert_array_equal(file["outputs"][()], outputs.numpy())
        for layer in range(layout.num_layers):
            values = torch.cat([made.histories[graph][layer] for graph in graphs])
            if layout.is_uniform:
                found = file["activations"][:, layer]
            else:
                found = file[f"activations/{layer}"][()]
            if layout.dtype == "bfloat16":
                found = torch.from_numpy(found).view(torch.bfloat16)
            expected = values.to(getattr(torch, layout.dtype))
            assert torch.equal(torch.as_tensor(found), expected)


def test_gzip_is_smaller(example, tmp_path):
    made = example([2000], (8, 8))
    made.histories[0] = [torch.relu(layer).round() for layer in made.histories[0]]
    made.write(tmp_path / "plain")
    zipped = example([2000], (8, 8), compression="gzip")
    zipped.histories = made.histories
    zipped.write(tmp_path / "zipped")
    sizes = [(tmp_path / name / "shard-00000.h5").stat().st_size for name in ("plain", "zipped")]
    assert sizes[1] < sizes[0] / 2


def open_writer(made, folder: Path, layout=None) -> ShardWriter:
    return ShardWriter(folder, 0, layout or made.layout, "0" * 64, made.graphs(0, made.num_graphs))


def append_all(made, folder: Path) -> None:
    with writing(open_writer(made, folder)) as append:
        append(*made.batch(0, made.num_graphs))


def test_a_closed_shard_says_what_it_holds(example, tmp_path):
    made = example()
    shard = open_writer(made, tmp_path)
    with pytest.raises(CacheError, match="found an unfinished shard"):
        assert shard.info
    with writing(shard) as append:
        append(*made.batch(0, made.num_graphs))
    content = (tmp_path / "shard-00000.h5").read_bytes()
    assert read_record(tmp_path / "shard-00000.h5") == ShardRecord("0" * 64, shard.info)
    assert shard.info.sha256 == hashlib.sha256(content).hexdigest()
    head = content[: shard.info.head_bytes(made.layout)]
    assert shard.info.head_sha256 == hashlib.sha256(head).hexdigest()


def test_a_shard_that_fails_leaves_nothing(example, tmp_path):
    made = example()

    def too_few(append):
        append(*made.batch(0, 2))

    def too_many(append):
        append(*made.batch(0, 5))
        append(*made.batch(0, 1))

    def wrong_outputs(append):
        append(2, made.batch(0, 2)[1], made.batch(0, 3)[2])

    def no_outputs(append):
        append(2, made.batch(0, 2)[1])

    for fill, message in (
        (too_few, "found 2 graphs, expected 5"),
        (too_many, "found graphs 5 to 6, expected at most 5, and at least one at a time"),
        (wrong_outputs, r"found outputs of shape \(3, 2\), expected \(2, 2\)"),
        (no_outputs, r"found outputs of shape None, expected \(2, 2\)"),
    ):
        shard = writing(open_writer(made, tmp_path))
        with pytest.raises(CacheError, match=message), shard as append:
            fill(append)
        assert list(tmp_path.iterdir()) == []


def test_a_failure_of_the_caller_leaves_nothing(example, tmp_path):
    made = example()

    def interrupted():
        with writing(open_writer(made, tmp_path)) as append:
            append(*made.batch(0, 5))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_leaves_nothing(example, tmp_path):
    resource = pytest.importorskip("resource")
    made = example([3000], [64, 64])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(OSError, match="too large") as error:
            append_all(made, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(tmp_path / "shard-00000.h5")
    assert list(tmp_path.iterdir()) == []


def test_graphs_that_contradict_themselves(example, tmp_path):
    made = example()
    made.labels[0] = np.zeros((2, 2))
    with pytest.raises(CacheError, match=r"found labels of shape \(6, 2\), expected"):
        append_all(made, tmp_path)
    made = example()
    made.edge_index[1] = torch.tensor([[0], [1]])
    with pytest.raises(CacheError, match=r"edge_index \[0, 1\] in graph 1, expected nodes 0 to 0"):
        append_all(made, tmp_path)
    made = example()
    made.ids[2] = "\udc80"
    with pytest.raises(CacheError, match="expected text that UTF-8 can hold"):
        append_all(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        ("float32", float("nan"), "not finite"),
        ("float32", -float("inf"), "not finite"),
        ("float16", float("nan"), "not finite"),
        ("float16", -65505.0, "65505, expected at most 65504 in float16; use bfloat16 or float32"),
        ("bfloat16", 3.4e38, "expected at most 3.38953e[+]38 in bfloat16; use float32"),
    ],
)
@pytest.mark.parametrize("widths", [(4, 4, 4), (4, 3, 2)])
def test_values_that_cannot_be_stored_name_graph_and_layer(
    example, tmp_path, dtype, value, message, widths
):
    made = example(dtype=dtype, widths=widths)
    made.histories[2][1][3, 1] = value
    with pytest.raises(
        CacheError, match=f"graph 'molécule-2', layer 'layers.1': found .*{message}"
    ):
        append_all(made, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_float16_refuses_a_layer_that_it_would_lose(example, tmp_path):
    made = example(dtype="float16")
    for history in made.histories:
        history[1] *= 1e-6
    with pytest.raises(
        CacheError, match=r"layer 'layers\.1'.*which would lose it; use bfloat16 or float32"
    ):
        append_all(made, tmp_path)
    # All zero loses nothing, and bfloat16 has the range.
    for history in made.histories:
        history[1] *= 0
    append_all(made, tmp_path)
    made = example(dtype="bfloat16")
    for history in made.histories:
        history[1] *= 1e-6
    made.write(tmp_path / "bfloat16")
    found = Cache.open(tmp_path / "bfloat16")[2].history[:, 1]
    assert torch.equal(found, made.histories[2][1].to(torch.bfloat16))


def test_the_largest_float16_is_kept(example, tmp_path):
    made = example(dtype="float16")
    made.histories[0][0][0, 0] = -65504.0
    made.write(tmp_path)
    assert Cache.open(tmp_path)[0].history[0, 0, 0] == -65504.0


def test_gradients_and_double_precision_are_left_behind(example, tmp_path):
    made = example()
    made.histories = [
        [layer.double().requires_grad_() for layer in layers] for layers in made.histories
    ]
    made.outputs = [values.double().requires_grad_() for values in made.outputs]
    made.write(tmp_path)
    found = Cache.open(tmp_path)[0]
    assert torch.equal(found.history[:, 0], made.histories[0][0].detach().float())
    assert not found.history.requires_grad


def test_resume_after_a_killed_process_with_the_same_number(example, tmp_path, monkeypatch):
    made = example()
    monkeypatch.setattr("os.getpid", lambda: 4242)
    with atomic_path(tmp_path / "shard-00000.h5") as partial:
        partial.touch()
    (tmp_path / "shard-00000.h5").unlink()
    partial.write_bytes(b"half a shard")
    append_all(made, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"shard-00000.h5", "shard-00000.json"}
