"""Resuming reads the structure of the shards that are there, and trusts none of it."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from histograph_post.caches import Cache, verify_cache
from histograph_post.caches.writer import existing_shard
from histograph_post.errors import CacheError

SHARD = "shard-00000.h5"


def replaced(name, make):
    """Replace a dataset by what ``make(file, name, values)`` creates."""

    def damage(file: h5py.File) -> None:
        values = file[name][()]
        del file[name]
        make(file, name, values)

    return damage


def dataset(**options):
    return replaced(
        "labels",
        lambda file, name, values: file.create_dataset(
            name, **{"data": values, "shape": values.shape, **options}
        ),
    )


def activations(**options):
    return replaced(
        "activations",
        lambda file, name, values: file.create_dataset(name, data=values, **options),
    )


def virtual(file, name, values):
    layout = h5py.VirtualLayout(values.shape, values.dtype)
    layout[:] = h5py.VirtualSource("elsewhere.h5", "x", values.shape)
    file.create_virtual_dataset(name, layout)


def external_values(file, name, values):
    file.create_dataset(name, values.shape, values.dtype, external=[("/etc/passwd", 0, 80)])


def without_values(file, name, values):
    file.create_dataset(name, values.shape, values.dtype)


def soft_link(file, name, values):
    file[name] = h5py.SoftLink("/outputs")


def external_link(file, name, values):
    file[name] = h5py.ExternalLink("/etc/passwd", "/")


def attribute(name, value):
    return lambda file: file.attrs.__setitem__(name, value)


GZIP = {"compression": "gzip"}
MIXED = {"widths": (4, 3, 2)}
SHUFFLED = {"compression": "gzip", "shuffle": True}

DAMAGES = [
    ("found no attribute", {}, lambda file: file.attrs.__delitem__("plan_hash")),
    ("found no attribute", {}, attribute("plan_hash", "a text of variable length")),
    ("found no attribute", {}, attribute("index", np.zeros(2, np.int64))),
    ("found no attribute", {}, attribute("num_nodes", 13.0)),
    ("and plan", {}, attribute("format_version", np.array(b"2.0", "S8"))),
    ("found counts", {}, attribute("num_nodes", np.int64(-1))),
    ("found counts", {}, attribute("stop", np.int64(0))),
    ("found shape", {}, attribute("num_nodes", np.int64(14))),
    ("found shape", {}, attribute("num_edges", np.int64(2**60))),
    ("names, expected", {}, lambda file: file.create_group("surprise")),
    ("names, expected", {}, lambda file: file.__delitem__("labels")),
    ("names, expected", MIXED, lambda file: file.create_group("activations/3")),
    ("expected one", {}, lambda file: file.move("labels", "lables")),
    ("expected one", MIXED, lambda file: file.move("activations/1", "activations/3")),
    ("found a link at", {}, replaced("labels", soft_link)),
    ("found a link at", {}, replaced("labels", external_link)),
    ("found a link at", MIXED, replaced("activations/1", external_link)),
    ("found a damaged file", {}, replaced("labels", lambda file, name, _: file.create_group(name))),
    ("found a type of class", {}, dataset(dtype=h5py.string_dtype(), data=None)),
    ("found a type of class", {}, dataset(dtype=h5py.vlen_dtype(np.float64), data=None)),
    ("found a type of class", {}, dataset(dtype=h5py.ref_dtype, data=None)),
    ("found a type of class", {}, dataset(dtype="V8", data=None)),
    ("found a type of class", {}, dataset(dtype=">f8")),
    ("found a type of class", {}, dataset(dtype="<i8", data=None)),
    ("found shape", {}, dataset(shape=(2, 5))),
    ("found shape", {}, replaced("activations", lambda f, n, v: f.create_dataset(n, data=v[1:]))),
    ("found values stored in another way", {}, replaced("labels", virtual)),
    ("found values stored in another way", {}, replaced("labels", external_values)),
    ("found values stored in another way", {}, dataset(chunks=(5, 2))),
    ("found values stored in another way", {}, activations(compression="gzip")),
    ("found values stored in another way", GZIP, activations()),
    ("found filters", GZIP, activations(chunks=(13, 3, 4), compression="lzf")),
    ("found filters", GZIP, activations(chunks=(13, 3, 4), compression="gzip")),
    ("found filters", GZIP, activations(chunks=(13, 3, 4), fletcher32=True, **SHUFFLED)),
    ("found chunks of", GZIP, activations(chunks=(5, 3, 4), **SHUFFLED)),
    (
        "found missing or unfiltered chunks",
        GZIP,
        replaced(
            "activations",
            lambda file, name, values: file.create_dataset(
                name, values.shape, values.dtype, chunks=(13, 3, 4), **SHUFFLED
            ),
        ),
    ),
    ("found no values", {}, replaced("labels", without_values)),
]


@pytest.mark.parametrize(("phrase", "kind", "damage"), DAMAGES)
def test_a_foreign_structure_is_refused(example, tmp_path, phrase, kind, damage):
    made = example(**kind)
    manifest = made.write(tmp_path)
    resume = (tmp_path, 0, made.layout, manifest.plan_hash, 0, made.num_graphs)
    assert existing_shard(*resume) == manifest.shards[0]
    with h5py.File(tmp_path / SHARD, "r+") as file:
        damage(file)
    with pytest.raises(CacheError, match=re.escape(phrase)) as error:
        existing_shard(*resume)
    assert str(error.value).startswith(str(tmp_path / SHARD))
    assert "\n" not in str(error.value)
    # A reader does not even look: it is not the file that was written.
    with pytest.raises(CacheError, match=r"bytes, expected|before the activations"):
        Cache.open(tmp_path)[0]
    assert not verify_cache(tmp_path).ok


@pytest.mark.parametrize("link", [soft_link, external_link, external_values, virtual])
def test_a_signed_link_is_never_followed(example, sign, tmp_path, link):
    """The manifest names the bytes, so what HDF5 would make of the file does not matter."""
    made = example()
    made.write(tmp_path)
    with h5py.File(tmp_path / SHARD, "r+") as file:
        replaced("labels", link)(file)
    sign(tmp_path, lambda manifest: None)
    np.testing.assert_array_equal(Cache.open(tmp_path).labels(), np.concatenate(made.labels))


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 2000, 4900])
def test_a_truncated_shard_is_refused(example, tmp_path, num_bytes):
    made = example()
    manifest = made.write(tmp_path)
    data = (tmp_path / SHARD).read_bytes()
    assert num_bytes < len(data)
    (tmp_path / SHARD).write_bytes(data[:num_bytes])
    with pytest.raises(CacheError, match="found a damaged file"):
        existing_shard(tmp_path, 0, made.layout, manifest.plan_hash, 0, 5)


def test_a_linked_shard_is_refused(example, tmp_path):
    made = example()
    manifest = made.write(tmp_path)
    (tmp_path / SHARD).rename(tmp_path / "elsewhere.h5")
    (tmp_path / SHARD).symlink_to(tmp_path / "elsewhere.h5")
    with pytest.raises(CacheError, match="found a symbolic link"):
        existing_shard(tmp_path, 0, made.layout, manifest.plan_hash, 0, 5)


def test_a_dangling_link_is_not_a_missing_shard(example, tmp_path):
    made = example()
    (tmp_path / SHARD).symlink_to(Path("/nowhere"))
    with pytest.raises(CacheError, match="found a symbolic link"):
        existing_shard(tmp_path, 0, made.layout, "0" * 64, 0, 5)
