"""What a cache will hold: probe a model on a few graphs and lay out the shards.

All that decides the bytes of a cache is in the plan and its hash. Nothing here writes a file.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from .. import __version__
from ..capture import Capture, CapturePlan, Parity, check_parity, plan_capture
from ..capture.checks import require_unneeded
from ..capture.edge_blocks import MOST_EDGES, edges_at_once, edges_in_blocks
from ..capture.passes import (
    device_of,
    is_repeatable,
    repeat_note,
    repeatable,
    same_numbers,
)
from ..data import GraphDataset
from ..data.batching import (
    LARGE_GRAPH,
    PROBE_NODES,
    budget_batches,
    make_batch,
    probe_graphs,
    probe_numbers,
    to_device,
)
from ..errors import CacheError, CaptureError, ConfigError, ModelError
from ..models import call_model, prediction
from ..models.checkpoints import weights_sha256
from ..models.model_call import received
from ..models.model_output import OutputForm
from ..models.spec import ModelSpec
from ..splits import Splits
from ..tasks import Task, has_labels, infer_task
from ..utils import Level
from ..utils.machine import NODE_BUDGET, resolve_device, synchronize
from ..utils.specifications import IN_MEMORY
from ..utils.text import listed
from .layout import Layout
from .manifest import plan_hash
from .provenance import Provenance, take_provenance

#: Bytes of a shard's activations, if nobody asks for another size.
SHARD_BYTES = 64 * 2**20

#: With more shards than can be open at a time, every random batch opens files anew.
MOST_SHARDS = 500


@dataclass(frozen=True)
class CacheOptions:
    """What a user can choose about a cache."""

    #: ``auto``, or names, globs and indices of layers.
    layers: str | Sequence[str] = "auto"
    dtype: str = "float32"
    #: A batch takes consecutive graphs while it stays within this many nodes.
    node_budget: int = NODE_BUDGET
    #: A shard, the unit of resuming and of distribution, takes about this many bytes; None for
    #: :data:`SHARD_BYTES`, or more where that would be more than :data:`MOST_SHARDS` shards.
    shard_bytes: int | None = None
    compression: str | None = None
    #: Which of a model's several outputs is its prediction (a key or a position).
    output_key: str | int | None = None
    #: Attributes of the data that the model is not given, such as ``edge_weight``.
    no_pass: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("node_budget", "shard_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: found {getattr(self, name)}, expected 1 or more")


@dataclass(frozen=True)
class OwnOutput:
    """The prediction of the model itself."""

    #: Columns of its prediction; None where it has no row per graph (or node).
    width: int | None = None
    #: Whether they are probabilities; logits otherwise.
    probabilities: bool = False
    #: Why the prediction cannot be scored; None where it can.
    problem: str | None = None


@dataclass(frozen=True)
class CachePlan:
    """All that decides the bytes of a cache, and the model and data that will fill it."""

    model: nn.Module
    device: torch.device
    dataset: GraphDataset
    splits: Splits
    #: Of the data set, NaN where one is missing: ``[rows, num_targets]``.
    labels: np.ndarray
    #: What the labels ask for; None for unlabelled data.
    task: Task | None
    capture: CapturePlan
    #: What each parameter of the model's ``forward`` receives.
    received: tuple[tuple[str, str, str], ...]
    parity: Parity
    layout: Layout
    options: CacheOptions
    #: The model as the user named it, and the arguments of the data.
    model_spec: ModelSpec
    data_args: Mapping[str, Any]
    #: Bytes of a shard's activations, about.
    shard_bytes: int
    #: First and one-past-last graph of every shard.
    shards: tuple[tuple[int, int], ...]
    weights_sha256: str
    own: OwnOutput
    #: Edges that a layer takes at a time; None for all of them.
    edges_at_once: int | None = None
    #: What a user should know, of how a large graph is planned and run.
    notes: tuple[str, ...] = ()

    @contextmanager
    def recording(self) -> Iterator[Capture]:
        """Record the model's history in the way that was planned."""
        with (
            edges_in_blocks(self.model, self.edges_at_once),
            Capture(self.model, self.capture) as recorder,
        ):
            yield recorder

    @property
    def num_bytes(self) -> int:
        """Bytes of the activations, uncompressed."""
        return int(self.dataset.num_nodes.sum()) * self.layout.row_bytes

    @property
    def batch_nodes(self) -> int:
        """Nodes of the largest batch, at most."""
        num_nodes = self.dataset.num_nodes
        largest_shard = max(int(num_nodes[start:stop].sum()) for start, stop in self.shards)
        return min(largest_shard, max(self.options.node_budget, int(num_nodes.max())))

    def to_json(self) -> dict[str, Any]:
        """Return what would be written, as plain values."""
        return {
            "data": self.dataset.spec,
            "num_graphs": len(self.dataset),
            "num_nodes": int(self.dataset.num_nodes.sum()),
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
        return plan_hash(
            tool_version=__version__,
            weights_sha256=self.weights_sha256,
            model={"spec": self.model_spec.spec, "args": dict(self.model_spec.args)},
            data={"spec": self.dataset.spec, "fingerprint": self.dataset.fingerprint()},
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
        """What is recorded of the model's code, and the contents of the canary's file."""
        return take_provenance(self.model, self.capture, self.dataset)

    def batches(self, start: int, stop: int) -> Iterator[range]:
        """Cut graphs ``start`` to ``stop`` into batches within the node budget, in order."""
        sizes = self.dataset.num_nodes[start:stop].tolist()
        for graphs in budget_batches(sizes, self.options.node_budget):
            yield range(start + graphs.start, start + graphs.stop)

    def load(self, graphs: range) -> Batch:
        """Return these graphs as one batch on the model's device."""
        return to_device(make_batch(self.dataset.graphs[graphs.start : graphs.stop]), self.device)

    def outputs(self, output: Any, batch: Batch) -> Tensor | None:
        """Return the model's own prediction for a batch, ``[rows, output_width]``."""
        if self.layout.output_width is None:
            return None
        rows = batch.num_nodes if self.layout.output_level == "node" else batch.num_graphs
        return prediction(output, rows=rows, key=self.options.output_key)


def plan_cache(
    model: nn.Module,
    dataset: GraphDataset,
    splits: Splits,
    *,
    options: CacheOptions | None = None,
    model_spec: ModelSpec | None = None,
    data_args: Mapping[str, Any] | None = None,
    missing: Collection[str] = (),
    device: str = "auto",
) -> CachePlan:
    """Find out what would be captured and how it would be laid out; nothing is written.

    Runs the model on a few graphs to find its layers, and refuses a model whose activations
    change when they are recorded, or when other graphs share the batch.

    Args:
        model: A trained model; it is put into ``eval()`` and onto the device.
        dataset: The graphs to run it on.
        splits: Which rows train, validate and test; stored with the cache.
        options: What a user can choose about a cache.
        model_spec: The model as the user named it; none for one that was handed over in memory.
        data_args: The arguments the data were loaded with.
        missing: Weights that the checkpoint does not have; refused if the history needs them.
        device: ``auto``, ``cpu``, ``cuda`` or ``mps``.
    """
    options = options or CacheOptions()
    where = resolve_device(device)
    model = model.to(where).eval()
    labels = dataset.labels()
    task = infer_task(labels, dataset.level) if has_labels(labels) else None
    capture, parity, own, batch, notes = _try_out(model, dataset, task, options, missing, where)
    edges = int(dataset.num_edges.max())
    sizes = {"num_nodes": int(dataset.num_nodes.max()), "num_edges": edges}
    at_once = edges_at_once(model, capture, batch, **sizes)
    if edges > MOST_EDGES:
        how = (
            "run with all of them at once: with some at a time the layers give something else"
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
    shard_bytes = _shard_bytes(options, dataset, layout)
    return CachePlan(
        model=model,
        device=where,
        dataset=dataset,
        splits=splits,
        labels=labels,
        task=task,
        capture=capture,
        received=tuple(received(model, batch, capture.call)),
        parity=parity,
        layout=layout,
        options=options,
        model_spec=model_spec or ModelSpec(IN_MEMORY),
        data_args=dict(data_args or {}),
        shard_bytes=shard_bytes,
        shards=tuple(plan_shards(dataset.num_nodes, layout.row_bytes, shard_bytes)),
        weights_sha256=weights_sha256(model.state_dict()),
        own=own,
        edges_at_once=at_once,
        notes=tuple(notes),
    )


class _TriedOut(NamedTuple):
    """What a few graphs, or parts of large ones, tell of a model."""

    capture: CapturePlan
    parity: Parity
    own: OwnOutput
    batch: Batch
    notes: list[str]


def _try_out(
    model: nn.Module,
    dataset: GraphDataset,
    task: Task | None,
    options: CacheOptions,
    missing: Collection[str],
    device: torch.device,
) -> _TriedOut:
    """Run a model on a few graphs; of a large one on a part, unless it does not run on that.

    A probe keeps every tensor of its pass. What it finds, layers and their order, does not depend
    on the size of the graph; a model with weights for each node only runs on the whole.
    """
    ids = [dataset.ids[number] for number in probe_numbers(dataset)]
    largest, refused = max(int(dataset.num_nodes[n]) for n in probe_numbers(dataset)), ""
    for whole in (False, True):
        probe = probe_graphs(dataset, whole=whole)
        batch = to_device(Batch.from_data_list(probe), device)
        try:
            with repeatable(device):
                capture = plan_capture(model, batch, layers=options.layers, no_pass=options.no_pass)
                if (note := repeat_note(device)) is not None:
                    capture = replace(capture, notes=(*capture.notes, note))
                _refuse_chance(model, capture, batch)
                require_unneeded(model, batch, capture, missing)
            parity = check_parity(model, capture, probe)
            own = _own_output(model, capture, batch, task, dataset.level, options)
            break
        except ModelError as error:
            if whole or largest <= LARGE_GRAPH:
                raise
            refused = str(error)
    _check(parity, ids, options)
    notes = []
    if largest > LARGE_GRAPH:
        how = (
            f"on the whole of it: on a part it fails ({refused})"
            if refused
            else (f"on {PROBE_NODES:,} of its nodes")
        )
        notes.append(f"a graph of {largest:,} nodes: the model was tried out {how}")
    return _TriedOut(capture, parity, own, batch, notes)


def _shard_bytes(options: CacheOptions, dataset: GraphDataset, layout: Layout) -> int:
    """Return how large shards are: as asked for, else so that there are not too many."""
    if options.shard_bytes is not None:
        return options.shard_bytes
    total = int(dataset.num_nodes.sum()) * layout.row_bytes
    least = -(-total // (MOST_SHARDS - 1))  # the last shard may be any size
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


@torch.inference_mode()
def _refuse_chance(model: nn.Module, capture: CapturePlan, batch: Batch) -> None:
    """Refuse a model that draws random numbers in eval() mode: every run would differ."""
    device = device_of(model)
    name = _differing_layer(model, capture, batch)
    if name is not None and not is_repeatable(device):
        # Some models amplify the rounding of sums a thousandfold: a CPU tells that from chance.
        with suppress(Exception):  # of whatever kind: code that is made for the device
            name = _differing_layer(copy.deepcopy(model).cpu(), capture, batch.clone().cpu())
    if name is not None:
        raise CaptureError(
            f"layer {name!r}: found other activations in a second pass in eval() mode, "
            "expected the same; does the model use dropout without `training=self.training`?"
        )


def _differing_layer(model: nn.Module, capture: CapturePlan, batch: Batch) -> str | None:
    """Return the first layer that is another one with other random numbers."""
    device, histories = device_of(model), []
    seeded = [device] if device.type == "cuda" else []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=seeded), Capture(model, capture) as recorder:
            torch.manual_seed(seed)
            histories.append(recorder.run(batch).history)
    layers = zip(capture.names, *histories, strict=True)
    return next((name for name, one, other in layers if not same_numbers(one, other)), None)


def _check(parity: Parity, ids: Sequence[str], options: CacheOptions) -> None:
    """Refuse a model that capturing disturbs, or whose activations depend on batch-mates."""
    worst = parity.worst
    if worst.max_rel != worst.max_rel:
        raise CacheError(
            f"graph {ids[worst.graph]!r}, layer {worst.layer!r}: found an activation that is not "
            "finite, expected numbers"
        )
    if not parity.same_output:
        raise CaptureError(
            "parity: the model's output changes while its layers are recorded; "
            "name the layers with --layers"
        )
    # With a budget of one node every graph is a batch of its own.
    if not parity.batch_independent and options.node_budget > 1:
        raise CaptureError(
            f"parity: the model mixes the graphs of a batch ({parity.summary()}); "
            "cache one graph at a time with --node-budget 1"
        )


@torch.inference_mode()
def _own_output(
    model: nn.Module,
    capture: CapturePlan,
    batch: Batch,
    task: Task | None,
    level: Level,
    options: CacheOptions,
) -> OwnOutput:
    """Run the model on the probe batch and look at its prediction."""
    if level == "link":
        return OwnOutput(problem="a link task has no output of the model's own")
    rows = int(batch.num_nodes) if level == "node" else int(batch.num_graphs)
    with OutputForm() as form:
        output = call_model(model, batch, capture.call)
        found = prediction(output, rows=rows, key=options.output_key)
    if found is None:
        return OwnOutput(problem=f"the model returns no output with a row per {level}")
    width, probabilities = int(found.shape[1]), form.is_probability(found)
    problem = None
    if task is None:
        problem = "the data has no labels"
    elif not task.accepts(width):
        wanted = "1 or 2" if task.kind == "binary" else str(task.out_dim)
        problem = (
            f"the model's output has {width} columns, the {task.kind} labels ask for {wanted}; "
            "--output-key chooses another of its outputs"
        )
    return OwnOutput(width, probabilities, problem)


def estimate_seconds(plan: CachePlan) -> float:
    """Time the model on one batch and scale up to all nodes: an estimate, not a promise."""
    _, stop = plan.shards[0]
    graphs = next(plan.batches(0, stop))
    with torch.inference_mode(), plan.recording() as recorder:
        recorder.run(plan.load(graphs))  # the first pass warms up allocators and caches
        synchronize(plan.device)
        started = time.perf_counter()
        recorder.run(plan.load(graphs))
        synchronize(plan.device)
        seconds = time.perf_counter() - started
    nodes = int(plan.dataset.num_nodes[graphs.start : graphs.stop].sum())
    return seconds * int(plan.dataset.num_nodes.sum()) / max(nodes, 1)
