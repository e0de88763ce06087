"""Every error of the format is documented, and happens when the document says so."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
import zlib
from hashlib import sha256
from pathlib import Path

import h5py
import numpy as np
import pytest

from histograph_post.caches import Cache, verify_cache
from histograph_post.errors import CacheError, HistographError

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache-format.md"
SHARD = "shard-00000.h5"
GZIP = {"compression": "gzip"}
LINK = {"level": "link", "output_level": "link"}


def read_everything(folder: Path) -> None:
    cache = Cache.open(folder)
    for graph in cache:
        assert graph.id
    cache.gather(range(len(cache)), edges=cache.manifest.layout.has_edges)
    cache.labels(), cache.outputs(), cache.splits


def put(container, *path_and_value):
    """Set ``container[a][b] = value``."""
    *path, last, value = path_and_value
    for key in path:
        container = container[key]
    container[last] = value


def change(*path_and_value):
    return lambda manifest: put(manifest, *path_and_value)


def piece(name, *offset_and_bytes):
    return change("shards", 0, "extents", name, [list(offset_and_bytes)])


#: What somebody writes into a manifest who can sign it, and what the reader says.
MANIFEST_DAMAGES = [
    ("expected an object", {}, change("model", [])),
    ("expected an object", {}, change("own_metrics", 3)),
    ("expected an object", {}, change("data", "args", None)),
    ("expected an object", {}, change("layout", None)),
    ("expected an object", {}, change("shards", 0, 17)),
    ("found format version", {}, change("format_version", "2.0")),
    ("found format version", {}, change("format_version", "")),
    ("found no 'tool_version'", {}, lambda manifest: manifest.pop("tool_version")),
    ("found the unknown field", {}, change("surprise", 1)),
    ("found the unknown field", {}, change("shards", 0, "surprise", 1)),
    ("found the unknown field", {}, change("layout", "surprise", 1)),
    ("found the unknown field", {}, change("data", "surprise", 1)),
    ("expected a text", {}, change("tool_version", 1)),
    ("expected a text", {}, change("checkpoint", 1)),
    ("expected a whole number", {}, change("data", "num_graphs", -1)),
    ("expected a whole number", {}, change("data", "num_nodes", True)),
    ("expected a whole number", {}, change("data", "num_nodes", 13.0)),
    ("expected a whole number", {}, change("shards", 0, "num_edges", 2**63)),
    ("expected true or false", {}, change("layout", "has_edges", 1)),
    ("expected 64 hexadecimal digits", {}, change("weights_sha256", "A" * 64)),
    ("expected 64 hexadecimal digits", {}, change("plan_hash", "a" * 63)),
    ("expected 64 hexadecimal digits", {}, change("data", "fingerprint", None)),
    ("expected a list", {}, change("shards", {})),
    ("expected a list", {}, change("layout", "widths", 4)),
    ("expected a list", {}, change("shards", 0, "extents", "ptr", 5)),
    ("expected a list", {}, piece("ptr", 8192)),
    ("expected a list", {}, piece("ptr", 8192, -48)),
    ("expected a file name without path", {}, change("checkpoint", "../model.pt")),
    ("expected a file name without path", {}, change("checkpoint", "..")),
    ("expected a file name without path", {}, change("checkpoint", "c:\\model.pt")),
    ("expected either own_metrics or no_metrics_because", {}, change("own_metrics", None)),
    ("expected either own_metrics or no_metrics_because", {}, change("no_metrics_because", "x")),
    ("layout: found", {}, change("layout", "layer_names", [])),
    ("layout: found", {}, change("layout", "layer_names", [1, 2, 3])),
    ("layout: found", {}, change("layout", "target_names", [None, ""])),
    ("layout: found", {}, change("layout", "widths", [4, 4])),
    ("layout: found", {}, change("layout", "widths", [4, 4, 0])),
    ("layout: found", {}, change("layout", "widths", [4, 4, "4"])),
    ("layout: found", {}, change("layout", "dtype", "float64")),
    ("layout: found", {}, change("layout", "level", "edge")),
    ("layout: found", {}, change("layout", "compression", "lzma")),
    ("layout: found", {}, change("layout", "output_width", None)),
    ("layout: found", {}, change("layout", "output_width", 2.5)),
    ("layout: found", {}, change("layout", "output_level", "link")),
    ("expected shard", {}, lambda manifest: manifest["shards"].append(manifest["shards"][0])),
    ("expected shard", {}, change("shards", 0, "index", 1)),
    ("expected shard", {}, change("shards", 0, "start", 1)),
    ("and at least one shard", {}, change("shards", [])),
    ("and at least one shard", {}, change("data", "num_graphs", 6)),
    ("and at least one shard", {}, change("data", "num_nodes", 14)),
    ("label rows", {}, change("shards", 0, "num_labels", 6)),
    ("label rows", {}, change("shards", 0, "stop", 0)),
    ("label rows", {"level": "node"}, change("shards", 0, "num_labels", 12)),
    ("edges, expected none", {"has_edges": False}, change("shards", 0, "num_edges", 1)),
    ("expected ['activations", {}, change("shards", 0, "extents", "../ptr", [])),
    ("expected ['activations", {}, lambda value: value["shards"][0]["extents"].pop("ids")),
    ("expected ['activations", {}, change("layout", "widths", [4, 4, 3])),
    ("expected a multiple of 64", {}, piece("ptr", 8193, 48)),
    ("found pieces of", {}, piece("ptr", 8192, 40)),
    ("found pieces of", {}, change("shards", 0, "extents", "ptr", [])),
    ("found pieces of", {}, change("shards", 0, "num_nodes", 2**62)),
    ("found pieces of", {}, change("layout", "dtype", "bfloat16")),
    ("chunks, expected", GZIP, change("shards", 0, "extents", "activations", [])),
    ("times its size", GZIP, change("shards", 0, "extents", "activations", [[64 * 200, 0]])),
    ("where the dataset before it ends", {}, piece("activations", 3200, 13 * 3 * 4 * 4)),
    ("bytes of the file", {}, piece("activations", 64 * 2**40, 13 * 3 * 4 * 4)),
    ("bytes of the file", {}, change("shards", 0, "num_bytes", 4000)),
]


@pytest.mark.parametrize(("phrase", "kind", "damage"), MANIFEST_DAMAGES)
def test_a_signed_manifest_is_not_believed(example, sign, tmp_path, phrase, kind, damage):
    example(**kind).write(tmp_path)
    read_everything(tmp_path)
    sign(tmp_path, damage)
    with pytest.raises(CacheError, match=re.escape(phrase)) as error:
        Cache.open(tmp_path)
    assert "manifest.json" in str(error.value)
    assert "\n" not in str(error.value)


def rewrite(name, edit):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(edit(path.read_bytes()))

    return damage


def replace_file(name, make):
    def damage(folder: Path) -> None:
        path = folder / name
        path.rename(folder / "elsewhere")
        make(path, folder / "elsewhere")

    return damage


def signed(name, values, dtype, at=0):
    """Overwrite values of a dataset and sign the result."""

    def damage(folder: Path, sign) -> None:
        manifest = json.loads((folder / "manifest.json").read_text())
        offset = manifest["shards"][0]["extents"][name][0][0]
        data = np.asarray(values, dtype)
        with (folder / SHARD).open("r+b") as file:
            file.seek(offset + at * data.itemsize)
            file.write(data.tobytes())
        sign(folder, lambda manifest: None)

    return damage


def chunk(stored):
    """Put other compressed data at the end of a shard, and point its chunk there."""

    def damage(folder: Path, sign) -> None:
        with (folder / SHARD).open("ab") as file:
            file.write(bytes(-file.tell() % 64))
            place = file.tell()
            file.write(stored)
        sign(folder, piece("activations", place, len(stored)))
        sign(folder, lambda manifest: None)  # the head reaches further now

    return damage


def splits(edit):
    def damage(folder: Path, sign) -> None:
        path = folder / "splits.json"
        path.write_bytes(edit(path.read_bytes()))
        sign(folder, change("splits_sha256", sha256(path.read_bytes()).hexdigest()))

    return damage


def grown(name, num_bytes):
    return lambda folder: os.truncate(folder / name, num_bytes)


def flipped(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


DEEP = b"[" * 100_000 + b"]" * 100_000
CHUNK_BYTES = 13 * 3 * 4 * 4

FILE_DAMAGES = [
    ("found no folder", {}, lambda folder: folder.rename(folder.parent / "moved")),
    ("but no manifest.json", {}, lambda folder: (folder / "manifest.json").unlink()),
    ("found nothing, expected a regular file", {}, lambda folder: (folder / SHARD).unlink()),
    ("found a symbolic link", {}, replace_file(SHARD, lambda path, old: path.symlink_to(old))),
    (
        "found a symbolic link",
        {},
        replace_file("manifest.json", lambda path, old: path.symlink_to(old)),
    ),
    (
        "found a symbolic link",
        {},
        replace_file("splits.json", lambda path, old: path.symlink_to(old)),
    ),
    ("found a folder, pipe or device", {}, replace_file(SHARD, lambda path, old: path.mkdir())),
    (
        "found a folder, pipe or device",
        {},
        replace_file("manifest.json", lambda path, old: os.mkfifo(path)),
    ),
    ("bytes, expected at most", {}, grown("manifest.json", 65 * 2**20)),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: data[:-10])),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: DEEP)),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: b"\xff\xfe")),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: b'{"a": 1, "a": 2}')),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: b'{"a": NaN}')),
    ("found broken JSON", {}, rewrite("manifest.json", lambda data: b"9" * 5000)),
    ("expected an object", {}, rewrite("manifest.json", lambda data: b"[]")),
    (
        "found manifest_sha256",
        {},
        rewrite("manifest.json", lambda data: data.replace(b'"gin"', b'"gcn"')),
    ),
    ("bytes, expected", {}, rewrite(SHARD, lambda data: data[:-1])),
    ("bytes, expected", {}, rewrite(SHARD, lambda data: data + b"\0")),
    ("bytes, expected", {}, rewrite(SHARD, lambda data: b"")),
    ("before the activations", {}, rewrite(SHARD, lambda data: flipped(data, 100))),
    ("before the activations", {}, rewrite(SHARD, lambda data: flipped(data, 1000))),
    ("expected it to rise from 0", {}, signed("ptr", [1], "<i8")),
    ("expected it to rise from 0", {}, signed("ptr", [5], "<i8", at=1)),
    ("expected it to rise from 0", {}, signed("ptr", [-1], "<i8", at=2)),
    ("expected it to rise from 0", {}, signed("id_ptr", [2**60], "<i8", at=5)),
    ("expected it to rise from 0", {}, signed("edge_ptr", [2**60], "<i8", at=2)),
    ("expected it to rise from 0", LINK, signed("label_ptr", [9], "<i8", at=1)),
    ("expected nodes 0 to", {}, signed("edge_index", [3], "<i4")),
    ("expected nodes 0 to", {}, signed("edge_index", [-1], "<i4", at=5)),
    ("expected nodes 0 to", LINK, signed("edge_label_index", [2**30], "<i4", at=3)),
    ("ids that are not UTF-8", {}, signed("ids", [255], "u1")),
    ("found a damaged chunk", GZIP, chunk(b"this is not compressed data")),
    ("does not expand to the expected", GZIP, chunk(zlib.compress(bytes(CHUNK_BYTES + 1)))),
    ("does not expand to the expected", GZIP, chunk(zlib.compress(bytes(CHUNK_BYTES - 1)))),
    ("does not expand to the expected", GZIP, chunk(zlib.compress(bytes(CHUNK_BYTES))[:-6])),
    ("found checksum", {}, rewrite("splits.json", lambda data: data.replace(b"0", b"1", 1))),
    (
        "found splits of",
        {},
        splits(lambda data: data.replace(b'"total": 5', b'"total": 99999999999')),
    ),
    ("found splits of", {}, splits(lambda data: b"[]")),
    ("splits.json: found", {}, splits(lambda data: data.replace(b'"seed": 0', b'"seed": "0"'))),
    ("found the unknown field", {}, splits(lambda data: data.replace(b'"train"', b'"training"'))),
]


@pytest.mark.parametrize(("phrase", "kind", "damage"), FILE_DAMAGES)
def test_a_damaged_file_is_refused(example, sign, tmp_path, phrase, kind, damage):
    folder = tmp_path / "example.cache"
    example(**kind).write(folder)
    if damage.__code__.co_argcount == 2:
        damage(folder, sign)
    else:
        damage(folder)
    with pytest.raises(HistographError, match=re.escape(phrase)) as error:
        read_everything(folder)
    assert "example.cache" in str(error.value)
    assert "\n" not in str(error.value)
    if phrase != "found no folder":
        assert isinstance(error.value, CacheError)
        assert not verify_cache(folder).ok


def test_a_compression_bomb_is_not_expanded(example, sign, tmp_path):
    example(compression="gzip").write(tmp_path)
    chunk(zlib.compress(bytes(64 * 2**20), 1))(tmp_path, sign)
    cache = Cache.open(tmp_path)
    tracemalloc.start()
    with pytest.raises(CacheError, match="does not expand to the expected"):
        cache[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("link", [h5py.SoftLink("/outputs"), h5py.ExternalLink("/etc/passwd", "/")])
def test_a_signed_link_is_never_followed(example, sign, tmp_path, link):
    """The manifest names the bytes, so what HDF5 would make of the file does not matter."""
    made = example()
    made.write(tmp_path)
    with h5py.File(tmp_path / SHARD, "r+") as file:
        del file["labels"]
        file["labels"] = link
    sign(tmp_path, lambda manifest: None)
    np.testing.assert_array_equal(Cache.open(tmp_path).labels(), np.concatenate(made.labels))


def test_a_newer_minor_version_may_have_more_fields(example, sign, tmp_path):
    example().write(tmp_path)
    sign(tmp_path, lambda manifest: manifest.update(format_version="1.7", comment="new"))
    read_everything(tmp_path)


def test_a_manifest_written_by_hand_is_read(example, sign, tmp_path):
    manifest = example().write(tmp_path)
    sign(tmp_path, lambda value: None)
    assert Cache.open(tmp_path).manifest == manifest


def test_every_error_is_documented_and_every_documented_error_is_tested():
    tables = DOCUMENT.read_text().split("## Errors")[1]
    cells = re.findall(r"^\| (`.+?`) \|", tables, re.MULTILINE)
    documented = {phrase for cell in cells for phrase in re.findall("`(.+?)`", cell)}
    tested = {phrase for phrase, *_ in MANIFEST_DAMAGES + FILE_DAMAGES}
    assert tested <= documented
    others = "".join(
        (Path(__file__).parent / name).read_text()
        for name in (
            "test_manifest.py",
            "test_reader.py",
            "test_folder.py",
            "test_verify.py",
            "test_writer.py",
        )
    )
    assert [phrase for phrase in documented - tested if phrase not in others] == []
