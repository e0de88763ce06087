"""A small data set with known contents, and the cache that is made of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from histograph_post.caches import Manifest
from histograph_post.caches.blocks import BlockMemory, ShardGraphs
from histograph_post.caches.layout import Layout, ShardInfo
from histograph_post.caches.manifest import plan_hash, write_manifest
from histograph_post.caches.writer import ShardWriter
from histograph_post.data import DataSpec
from histograph_post.models import ModelSpec
from histograph_post.splits import Split, Splits
from histograph_post.utils.files import sha256_file


@contextmanager
def writing(writer: ShardWriter) -> Iterator[Callable[..., None]]:
    """Write a shard; yields what appends a number of graphs, their layers and their outputs."""
    done = 0

    def append(num_graphs: int, history: Sequence[Tensor], outputs: Tensor | None = None) -> None:
        nonlocal done
        num_nodes = len(history[0])
        memory = BlockMemory(writer._layout, num_nodes)
        block = writer.block(range(done, done + num_graphs), memory)
        for layer, values in enumerate(history):
            block.put(layer, values)
        writer.write(block, outputs)
        done += num_graphs

    try:
        writer.open()
        yield append
        writer.close()
    finally:
        writer.discard()


@dataclass
class Example:
    """Graphs with everything a cache can store of them, one list entry per graph."""

    layout: Layout
    ids: list[str]
    num_nodes: np.ndarray
    histories: list[list[Tensor]]
    outputs: list[Tensor] | None
    labels: list[np.ndarray]
    edge_index: list[Tensor]
    edge_label_index: list[Tensor] | None

    @property
    def num_graphs(self) -> int:
        return len(self.ids)

    def graphs(self, start: int, stop: int) -> ShardGraphs:
        pairs = self.edge_label_index
        return ShardGraphs(
            start=start,
            ids=self.ids[start:stop],
            num_nodes=self.num_nodes[start:stop],
            labels=np.concatenate(self.labels[start:stop]),
            edge_index=self.edge_index[start:stop],
            edge_label_index=() if pairs is None else pairs[start:stop],
        )

    def batch(self, start: int, stop: int) -> tuple[int, list[Tensor], Tensor | None]:
        """Return what is appended to a shard for these graphs."""
        history = [torch.cat(layers) for layers in zip(*self.histories[start:stop], strict=True)]
        outputs = None if self.outputs is None else torch.cat(self.outputs[start:stop])
        return stop - start, history, outputs

    def plan(self, shards: Sequence[tuple[int, int]]) -> str:
        return plan_hash(
            tool_version="0.1.0",
            weights_sha256="a" * 64,
            model={"spec": "gin", "args": {}},
            data={"spec": "memory", "args": {}, "fingerprint": "b" * 64},
            capture={"points": list(self.layout.layer_names)},
            layout=self.layout,
            shards=shards,
            settings={"node_budget": 8},
        )

    def write_shard(
        self, folder: Path, index: int, shards: Sequence[tuple[int, int]], batch_size: int = 2
    ) -> ShardInfo:
        start, stop = shards[index]
        graphs = self.graphs(start, stop)
        writer = ShardWriter(folder, index, self.layout, self.plan(shards), graphs)
        with writing(writer) as append:
            for first in range(start, stop, batch_size):
                append(*self.batch(first, min(first + batch_size, stop)))
        return writer.info

    def splits(self) -> Splits:
        total = sum(len(rows) for rows in self.labels)
        rows = np.arange(total)
        return Splits("random", self.layout.level, total, 0, (Split(rows, rows[:0], rows[:0]),))

    def write(
        self, folder: Path, shards: Sequence[tuple[int, int]] | None = None, batch_size: int = 2
    ) -> Manifest:
        """Write the whole cache into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        shards = shards or [(0, self.num_graphs)]
        self.splits().save(folder / "splits.json")
        manifest = Manifest(
            tool_version="0.1.0",
            weights_sha256="a" * 64,
            checkpoint="model.pt",
            model=ModelSpec("gin", {}),
            data=DataSpec(
                "memory",
                fingerprint="b" * 64,
                num_graphs=self.num_graphs,
                num_nodes=int(self.num_nodes.sum()),
            ),
            capture={"points": list(self.layout.layer_names)},
            layout=self.layout,
            plan_hash=self.plan(shards),
            splits_sha256=sha256_file(folder / "splits.json"),
            own_metrics={"accuracy": 0.75},
            no_metrics_because=None,
            shards=tuple(
                self.write_shard(folder, index, shards, batch_size) for index in range(len(shards))
            ),
        )
        write_manifest(folder, manifest)
        return manifest


def make_example(
    num_nodes: Sequence[int] = (3, 1, 4, 0, 5),
    widths: Sequence[int] = (4, 4, 4),
    *,
    seed: int = 0,
    level: str = "graph",
    targets: int = 2,
    output_width: int | None = 2,
    output_level: str | None = "graph",
    dtype: str = "float32",
    **layout: Any,
) -> Example:
    """Return random graphs of these sizes, every fourth label missing."""
    generator = np.random.default_rng(seed)
    nodes = np.asarray(num_nodes, dtype=np.int64)
    # A graph without nodes can have neither edges nor labelled pairs.
    pairs = [
        [torch.from_numpy(generator.integers(0, n, (2, int(n) * degree))) for n in nodes]
        for degree in (2, 1)
    ]
    rows = {
        "graph": [1] * len(nodes),
        "node": nodes.tolist(),
        "link": [pair.shape[1] for pair in pairs[1]],
    }
    labels = [generator.normal(size=(count, targets)) for count in rows[level]]
    for label in labels:
        label[generator.random(label.shape) < 0.25] = np.nan
    outputs = None
    if output_width is None:
        output_level = None
    else:
        shapes = [(count, output_width) for count in rows[output_level or level]]
        outputs = [torch.from_numpy(generator.normal(size=shape)).float() for shape in shapes]
    return Example(
        layout=Layout(
            layer_names=tuple(f"layers.{index}" for index in range(len(widths))),
            widths=tuple(widths),
            dtype=dtype,
            level=level,  # type: ignore[arg-type]
            target_names=tuple(f"target {index}" for index in range(targets)),
            output_width=output_width,
            output_level=output_level,  # type: ignore[arg-type]
            **layout,
        ),
        ids=[f"molécule-{index}" for index in range(len(nodes))],
        num_nodes=nodes,
        histories=[
            [torch.from_numpy(generator.normal(size=(n, width))).float() for width in widths]
            for n in nodes
        ],
        outputs=outputs,
        labels=labels,
        edge_index=pairs[0],
        edge_label_index=pairs[1] if level == "link" else None,
    )


def sign_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as somebody would who knows the format: hashes of shards and all.

    Written from ``docs/cache-format.md`` alone, not with the library.
    """
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    for shard in value["shards"]:
        data = (folder / f"shard-{shard['index']:05d}.h5").read_bytes()
        starts = [
            piece[0]
            for name, pieces in shard["extents"].items()
            if name.startswith("activations")
            for piece in pieces
        ]
        head = data[: min(starts, default=len(data))]
        shard["num_bytes"] = len(data)
        shard["sha256"] = hashlib.sha256(data).hexdigest()
        shard["head_sha256"] = hashlib.sha256(head).hexdigest()
    change(value)
    value.pop("manifest_sha256", None)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    value["manifest_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(value))


@pytest.fixture(scope="session")
def example() -> Callable[..., Example]:
    """The function that makes an :class:`Example`."""
    return make_example


@pytest.fixture(scope="session")
def sign() -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    """The function that signs a changed manifest."""
    return sign_manifest
