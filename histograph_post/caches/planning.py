"""What a cache will hold: which layers of a model are captured, and how shards are laid out.

Everything that determines the bytes of a cache is in the plan and its hash. Nothing here writes a
file.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from .. import __version__
from ..capture import Capture, CapturePlan, Parity
from ..capture.edge_blocks import MOST_EDGES, edges_at_once, edges_in_blocks
from ..data import GraphDataset, from_graphs
from ..data.batching import batch_of, budget_batches, to_device
from ..data.spec import OnProgress
from ..errors import ModelError
from ..models import prediction
from ..models.checkpoints import weights_sha256
from ..models.model_call import RECEIVED_COLUMNS, received
from ..models.spec import ModelSpec
from ..splits import Splits, resolve_splits
from ..splits.making import Splittable, check_split
from ..tasks import Task, has_labels, infer_task
from ..utils.machine import resolve_device, synchronize
from ..utils.specifications import IN_MEMORY
from ..utils.text import listed, text_table
from .layout import Layout
from .manifest import Provenance, plan_hash
from .probing import MOST_SHARDS, SHARD_BYTES, CacheOptions, OwnOutput, probe_model
from .provenance import take_provenance


@dataclass(frozen=True)
class CachePlan:
    """Everything that determines the bytes of a cache, and the model and data that will fill it."""

    model: nn.Module
    device: torch.device
    #: A sample of a long table, until :meth:`reading` replaces it.
    dataset: GraphDataset
    #: How splits are made, until all graphs are known.
    splits: Splits | Callable[[Splittable], Splits]
    #: NaN where a label is missing: ``[rows, num_targets]``.
    labels: np.ndarray
    capture: CapturePlan
    #: What each parameter of the model's ``forward`` receives.
    received: tuple[tuple[str, str, str], ...]
    parity: Parity
    layout: Layout
    options: CacheOptions
    #: The model as the user named it, and the arguments of the data.
    model_spec: ModelSpec
    data_args: Mapping[str, Any]
    #: Approximate bytes of a shard's activations.
    shard_bytes: int
    #: Nodes of each graph: ``[num_graphs]``; an estimate of those of each row of a long table.
    num_nodes: np.ndarray
    #: First and one-past-last graph of every shard; rows of a long table, for which borders then
    #: do not depend on which rows have a graph, and of what size.
    shards: tuple[tuple[int, int], ...]
    weights_sha256: str
    own: OwnOutput
    #: Edges that a layer takes at a time; None for all of them.
    edges_at_once: int | None = None
    #: What a user should know about how a large graph is planned and run.
    notes: tuple[str, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[Capture]:
        """Record the model's history as planned."""
        with (
            edges_in_blocks(self.model, self.edges_at_once),
            Capture(self.model, self.capture) as recorder,
        ):
            yield recorder

    @cached_property
    def task(self) -> Task | None:
        """Inferred from the labels; None for unlabelled data."""
        return infer_task(self.labels, self.layout.level) if has_labels(self.labels) else None

    @property
    def problem(self) -> str | None:
        """Why the model's own prediction cannot be scored; None where it can."""
        return self.own.problem_for(self.task)

    @property
    def num_bytes(self) -> int:
        """Bytes of the activations, uncompressed."""
        return int(self.num_nodes.sum()) * self.layout.row_bytes

    @property
    def batch_nodes(self) -> int:
        """Nodes of the largest batch, at most."""
        num_nodes = self.dataset.num_nodes
        bounds = map(self.bounds, range(len(self.shards)))
        largest_shard = max(int(num_nodes[start:stop].sum()) for start, stop in bounds)
        most = max(self.options.node_budget, int(num_nodes.max(initial=0)))
        return max(1, min(largest_shard, most))

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first and one-past-last graph of a shard in :attr:`dataset`."""
        if self.dataset.source is None or self.dataset.rows is None:
            return self.shards[index]
        first, stop = np.searchsorted(self.dataset.rows, self.shards[index]).tolist()
        return first, stop

    def reading(self, shards: Sequence[int] | None, on_progress: OnProgress = None) -> CachePlan:
        """Return the plan with the graphs of these shards; with all graphs, and their splits."""
        dataset, splits = self.dataset, self.splits
        if dataset.source is None:
            return self
        if dataset.is_sample:
            rows = None if shards is None else [range(*self.shards[index]) for index in shards]
            dataset = replace(dataset.source.read(rows, on_progress), spec=dataset.spec)
        if shards is None and not isinstance(splits, Splits):
            splits = splits(dataset)
        return replace(self, dataset=dataset, labels=dataset.labels(), splits=splits)

    def to_json(self) -> dict[str, Any]:
        """Return what would be written, as plain values."""
        return {
            "data": self.dataset.spec,
            "num_graphs": len(self.num_nodes),
            "num_nodes": int(self.num_nodes.sum()),
            "capture": self.capture.to_json(),
            "received": [list(row) for row in self.received],
            "dtype": self.layout.dtype,
            "bytes": self.num_bytes,
            "shards": len(self.shards),
            "weights_sha256": self.weights_sha256,
            "parity": self.parity.summary(),
        }

    @cached_property
    def hash(self) -> str:
        """Identity of the plan: equal hashes mean equal shards."""
        source = self.dataset.source
        fingerprint = self.dataset.fingerprint() if source is None else source.key
        return plan_hash(
            tool_version=__version__,
            weights_sha256=self.weights_sha256,
            model={"spec": self.model_spec.spec, "args": dict(self.model_spec.args)},
            data={"spec": self.dataset.spec, "fingerprint": fingerprint},
            capture=self.capture.to_json(),
            layout=self.layout,
            shards=self.shards,
            settings={
                "node_budget": self.options.node_budget,
                "device": self.device.type,
                "output_key": self.options.output_key,
            },
        )

    @cached_property
    def provenance(self) -> tuple[Provenance, bytes | None]:
        """What is recorded about the model's code, and the contents of the canary's file."""
        source = self.dataset.source
        dataset = self.dataset if source is None else source.sample
        return take_provenance(self.model, self.capture, dataset)

    def batches(self, start: int, stop: int) -> Iterator[range]:
        """Cut graphs ``start`` to ``stop`` into batches within the node budget, in order."""
        sizes = self.dataset.num_nodes[start:stop].tolist()
        for graphs in budget_batches(sizes, self.options.node_budget):
            yield range(start + graphs.start, start + graphs.stop)

    def load(self, graphs: range) -> Batch:
        """Return these graphs as one batch on the model's device."""
        return to_device(batch_of(self.dataset.graphs, graphs), self.device)

    def outputs(self, output: Any, batch: Batch) -> Tensor | None:
        """Return the model's own prediction for a batch, ``[rows, output_width]``."""
        if self.layout.output_width is None:
            return None
        rows = batch.num_nodes if self.layout.output_level == "node" else batch.num_graphs
        return prediction(output, rows=rows, key=self.options.output_key)


def _require_module(model: object) -> None:
    """Refuse what is no model, such as the name of a built-in one."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model: found {type(model).__name__}, expected a torch.nn.Module")


def plan_cache(
    model: nn.Module,
    dataset: GraphDataset,
    splits: Splits | Callable[[Splittable], Splits],
    *,
    options: CacheOptions | None = None,
    model_spec: ModelSpec | None = None,
    data_args: Mapping[str, Any] | None = None,
    missing: Collection[str] = (),
    device: str = "auto",
) -> CachePlan:
    """Determine what would be captured and how it would be laid out; nothing is written.

    Runs the model on a few graphs to find its layers, and refuses a model whose activations
    change when they are recorded, or when other graphs share the batch.

    Args:
        model: A trained model; it is put into ``eval()`` and onto the device.
        splits: Which rows train, validate and test, or what says so once all graphs are known;
            stored with the cache.
        model_spec: The model as the user named it; None for one that was passed in memory.
        missing: Weights that the checkpoint does not have; refused if the history needs them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    options = options or CacheOptions()
    where = resolve_device(device)
    _require_module(model)
    model = model.to(where).eval()
    given, source = dataset, dataset.source
    # The plan of a long table follows from its text and a sample: jobs that read other rows agree.
    dataset = given if source is None else source.sample
    num_nodes = given.num_nodes if source is None else source.num_nodes()
    capture, parity, own, batch, notes = probe_model(model, dataset, options, missing, where)
    edges = int(dataset.num_edges.max())
    sizes = {"num_nodes": int(dataset.num_nodes.max()), "num_edges": edges}
    at_once = edges_at_once(model, capture, batch, **sizes)
    if edges > MOST_EDGES:
        how = (
            "run with all of them at once, since the layers give other results in blocks of edges"
            if at_once is None
            else f"run layer by layer, {at_once:,} edges at a time"
        )
        notes.append(f"a graph of {edges:,} edges: {how}")
    if missing:
        own = OwnOutput(problem=f"the checkpoint has no weights for {listed(missing)}")
    layout = Layout(
        layer_names=tuple(point.name for point in capture.points),
        widths=tuple(capture.widths),
        dtype=options.dtype,
        level=dataset.level,
        target_names=tuple(dataset.target_names),
        output_width=own.width,
        output_level=None if own.width is None else dataset.level,
        compression=options.compression,
    )
    shard_bytes = _shard_bytes(options, int(num_nodes.sum()) * layout.row_bytes)
    return CachePlan(
        model=model,
        device=where,
        dataset=given,
        splits=splits,
        labels=given.known_labels(),
        capture=capture,
        received=tuple(received(model, batch, capture.call)),
        parity=parity,
        layout=layout,
        options=options,
        model_spec=model_spec or ModelSpec(IN_MEMORY),
        data_args=dict(data_args or {}),
        shard_bytes=shard_bytes,
        num_nodes=num_nodes,
        shards=tuple(plan_shards(num_nodes, layout.row_bytes, shard_bytes)),
        weights_sha256=weights_sha256(model.state_dict()),
        own=own,
        edges_at_once=at_once,
        notes=tuple(notes),
    )


def choose_splits(
    dataset: GraphDataset, split: Splits | str | None, *, seed: int = 0
) -> Splits | Callable[[Splittable], Splits]:
    """Return the splits that are asked for; of a sample, what returns them once all is known."""
    if isinstance(split, Splits):
        return (lambda known: split) if dataset.is_sample else split
    check_split(split)
    choose = functools.partial(resolve_splits, spec=split, seed=seed)
    return choose if dataset.is_sample else choose(dataset)


def _shard_bytes(options: CacheOptions, total: int) -> int:
    """Return the size of a shard: as the user asked, else so that there are not too many."""
    if options.shard_bytes is not None:
        return options.shard_bytes
    least = -(-total // (MOST_SHARDS - 1))  # the last shard may have any size
    return max(SHARD_BYTES, -(-least // 2**20) * 2**20)


def plan_shards(num_nodes: np.ndarray, row_bytes: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Return the first and one-past-last graph of every shard.

    A shard takes graphs in order while their activations stay within ``shard_bytes``, and at least
    one, however large.
    """
    # ends[i] is the number of bytes of the graphs up to and including i.  [num_graphs]
    ends = np.cumsum(num_nodes, dtype=np.int64) * row_bytes
    shards, start, done = [], 0, 0
    while start < len(ends):
        stop = max(start + 1, int(np.searchsorted(ends, done + shard_bytes, side="right")))
        shards.append((start, stop))
        start, done = stop, int(ends[stop - 1])
    return shards


def estimate_seconds(plan: CachePlan) -> float:
    """Estimate the time of the model by one batch, scaled up to all nodes."""
    graphs = next(plan.batches(0, len(plan.dataset)))
    with torch.inference_mode(), plan.recording() as recorder:
        recorder.run(plan.load(graphs))  # the first pass warms up allocators and caches
        synchronize(plan.device)
        started = time.perf_counter()
        recorder.run(plan.load(graphs))
        synchronize(plan.device)
        seconds = time.perf_counter() - started
    nodes = int(plan.dataset.num_nodes[graphs.start : graphs.stop].sum())
    return seconds * int(plan.num_nodes.sum()) / max(nodes, 1)


# --- what a user is shown


@dataclass(frozen=True, repr=False)
class Inspection:
    """What a cache of a model would hold; printed, it is a few tables and notes."""

    plan: CachePlan

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the data and the layers."""
        return (*self.plan.dataset.notes, *self.plan.capture.notes, *self.plan.notes)

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers."""
        return self.plan.capture.names

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of each layer."""
        return self.plan.capture.widths

    def tables(self) -> list[tuple[str, Sequence[str], Sequence[Sequence[str]]]]:
        """Return the title, the columns and the rows of every table."""
        capture = self.plan.capture
        return [
            ("What forward receives", RECEIVED_COLUMNS, self.plan.received),
            ("What is captured", capture.COLUMNS, capture.table()),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return self.plan.to_json()

    def __repr__(self) -> str:
        shown = [f"{title}\n{text_table(columns, rows)}" for title, columns, rows in self.tables()]
        return "\n\n".join([*shown, *(f"note: {note}" for note in self.notes)])


def inspect(
    model: nn.Module,
    dataset: GraphDataset | Iterable[Data],
    *,
    missing: Sequence[str] = (),
    device: str = "cpu",
    **options: Any,
) -> Inspection:
    """Show what :func:`~histograph_post.cache` would capture of a model; nothing is written.

    The model runs on a few graphs. A model that cannot be cached is refused here, too.

    Args:
        model: Any trained module; it is put into ``eval()`` and not changed otherwise.
        dataset: A :class:`~histograph_post.data.GraphDataset`, a PyG data set or a list of graphs.
        missing: Names of weights that the checkpoint does not have.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
        options: Fields of :class:`~histograph_post.caches.probing.CacheOptions`, such as
            ``layers`` and ``no_pass``.
    """
    if not isinstance(dataset, GraphDataset):
        dataset = from_graphs(dataset)
    splits, asked = choose_splits(dataset, None), CacheOptions(**options)
    return Inspection(
        plan_cache(model, dataset, splits, options=asked, missing=missing, device=device)
    )
