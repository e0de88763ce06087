"""Large caches open at once: a million graphs, and 60 GB in sparse files.

Opening, one graph and the nodes of every graph are read in a fresh process; a second of its CPU
time for the first two and 300 MB beside what the imports take are the most that may cost.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

import histograph_post as hg
from histograph_post.caches.layout import ShardInfo
from histograph_post.caches.manifest import Manifest, read_manifest, write_manifest

from ..helpers import make_model
from .attacks import Outcome

#: Shards of a large cache, as many as ``histograph cache`` makes at most by itself.
_SHARDS = 500
_SECONDS, _BYTES = 1.0, 300 * 2**20

_OPEN = """
import json, re, sys, time
from histograph_post.caches import Cache
def peak():  # of this process alone, unlike what getrusage says
    return int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) * 1024
before, started = peak(), time.process_time()
cache = Cache.open(sys.argv[1])
opened = time.process_time() - started
graph = cache[len(cache) // 2]
used = time.process_time() - started
nodes = int(cache.num_nodes.sum())
print(json.dumps({"seconds": opened, "with a graph": used, "bytes": peak() - before,
                  "graphs": len(cache), "nodes": nodes, "imports": before}))
"""


def large_caches(work: Path) -> Outcome:
    """Make both caches, open them, and say what that took."""
    outcome = Outcome("large caches", "Cache.open")
    for name, graphs, num_bytes in (("million", 1_000_000, 0), ("sparse", 5_000, 60 * 10**9)):
        folder = work / f"{name}.cache"
        _make(folder, graphs // _SHARDS, num_bytes // _SHARDS)
        command = [sys.executable, "-c", _OPEN, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        print(f"{name}: {found}", file=sys.stderr, flush=True)
        wrong = found["with a graph"] > _SECONDS or found["bytes"] > _BYTES
        wrong = wrong or found["graphs"] != graphs
        outcome.count(f"{name}: {found}" if wrong else None)
    return outcome


def _make(folder: Path, graphs: int, num_bytes: int) -> None:
    """Make a cache of many shards of one kind, their activations a hole where they are many."""
    dataset = hg.load_data("demo:", args={"num_graphs": 3})
    hg.cache(make_model(hidden=8), dataset, folder)
    _, manifest = read_manifest(folder)
    (first,) = manifest.shards
    shards = [
        _shard(folder, manifest, first, number, graphs, num_bytes) for number in range(_SHARDS)
    ]
    data = replace(
        manifest.data,
        num_graphs=graphs * _SHARDS,
        num_nodes=sum(shard.num_nodes for shard in shards),
    )
    splits = json.dumps(
        {**json.loads((folder / "splits.json").read_text()), "total": graphs * _SHARDS}
    )
    (folder / "splits.json").write_text(splits)
    write_manifest(
        folder,
        replace(
            manifest,
            data=data,
            shards=tuple(shards),
            splits_sha256=hashlib.sha256(splits.encode()).hexdigest(),
        ),
    )


def _shard(
    folder: Path, manifest: Manifest, like: ShardInfo, number: int, graphs: int, num_bytes: int
) -> ShardInfo:
    """Write a shard of graphs without edges, each with as many nodes."""
    layout = manifest.layout
    nodes = max(1, num_bytes // graphs // layout.row_bytes)
    info = replace(
        like,
        index=number,
        start=number * graphs,
        stop=(number + 1) * graphs,
        num_nodes=graphs * nodes,
        num_edges=0,
        num_labels=graphs,
    )
    ids = [f"{number * graphs + graph}".encode() for graph in range(graphs)]
    columns = {
        "ptr": np.arange(graphs + 1) * nodes,
        "edge_ptr": np.zeros(graphs + 1),
        "id_ptr": np.cumsum([0, *map(len, ids)]),
        "ids": np.frombuffer(b"".join(ids), np.uint8),
    }
    size = sum(map(len, ids))
    extents, place = {}, 512
    written: list[tuple[int, bytes]] = []
    every = layout.descriptors(info.counts, size) + layout.activations(info.num_nodes)
    for dataset in every:
        extents[dataset.name] = ((place, dataset.num_bytes),) if dataset.num_bytes else ()
        if not dataset.is_activations:
            values = columns.get(dataset.name, np.zeros(dataset.shape))
            written.append((place, values.astype(dataset.dtype).tobytes()))
        place += -(-dataset.num_bytes // 64) * 64
    path = folder / f"shard-{number:05d}.h5"
    with path.open("wb") as file:
        file.truncate(place)
        for offset, data in written:
            file.seek(offset)
            file.write(data)
    info = replace(info, num_bytes=place, extents=extents)
    with path.open("rb") as file:
        head = hashlib.sha256(file.read(info.head_bytes(layout))).hexdigest()
    return replace(info, head_sha256=head)
