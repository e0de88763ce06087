"""Trying out a model on a few graphs before it is cached, and the options of a cache.

A model that draws random numbers, whose output changes when it is captured, or that mixes the
graphs of a batch is refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn
from torch_geometric.data import Batch

from ..capture import Capture, CapturePlan, Parity, check_parity, plan_capture
from ..capture.checks import require_unneeded
from ..capture.passes import (
    device_of,
    frozen,
    is_repeatable,
    repeat_note,
    repeatable,
    same_numbers,
)
from ..data import GraphDataset
from ..data.batching import LARGE_GRAPH, PROBE_NODES, probe_graphs, probe_numbers, to_device
from ..errors import CacheError, CaptureError, ConfigError, ModelError
from ..models import call_model, prediction
from ..models.model_call import OutputForm
from ..tasks import Task
from ..utils import Level
from ..utils.machine import NODE_BUDGET

#: Default bytes of a shard's activations.
SHARD_BYTES = 64 * 2**20

#: With more shards than can be open at a time, every random batch would open files again.
MOST_SHARDS = 500


@dataclass(frozen=True)
class CacheOptions:
    """The options of a cache."""

    #: ``auto``, or names, globs and indices of layers.
    layers: str | Sequence[str] = "auto"
    dtype: str = "float32"
    #: A batch takes consecutive graphs while it stays within this many nodes.
    node_budget: int = NODE_BUDGET
    #: Approximate bytes of a shard, the unit of resuming and of distribution; None for
    #: :data:`SHARD_BYTES`, or more where that would make more than :data:`MOST_SHARDS` shards.
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
                raise ConfigError(f"{name}: found {value}, expected 1 or more")


@dataclass(frozen=True)
class OwnOutput:
    """The form of the model's own prediction."""

    #: Columns; None where it has no row per graph (or node).
    width: int | None = None
    #: Whether they are probabilities; logits otherwise.
    probabilities: bool = False
    #: Why the prediction could not be scored whatever the labels; None where it could.
    problem: str | None = None

    def problem_for(self, task: Task | None) -> str | None:
        """Return why the prediction cannot be scored on a task; None where it can."""
        if self.problem is not None or self.width is None:
            return self.problem
        if task is None:
            return "the data has no labels"
        if task.accepts(self.width):
            return None
        wanted = "1 or 2" if task.kind == "binary" else str(task.out_dim)
        return (
            f"the model's output has {self.width} columns, the {task.kind} labels ask for "
            f"{wanted}; --output-key chooses another of its outputs"
        )


class ProbedModel(NamedTuple):
    """What was found by running a model on a few graphs, or parts of large ones."""

    capture: CapturePlan
    parity: Parity
    own: OwnOutput
    batch: Batch
    notes: list[str]


def probe_model(
    model: nn.Module,
    dataset: GraphDataset,
    options: CacheOptions,
    missing: Collection[str],
    device: torch.device,
) -> ProbedModel:
    """Run a model on a few graphs; on a part of a large one, unless the model fails on it.

    A probe keeps every tensor of its pass, so a large graph could exhaust the memory. What it
    finds, layers and their order, does not depend on the size of the graph. A model with weights
    for each node only runs on the whole graph.
    """
    numbers = probe_numbers(dataset)
    largest, refused = max(int(dataset.num_nodes[number]) for number in numbers), ""
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
            own = _own_output(model, capture, batch, dataset.level, options)
            break
        except ModelError as error:
            if whole or largest <= LARGE_GRAPH:
                raise
            refused = str(error)
    _check(parity, [dataset.ids[number] for number in numbers], options)
    notes = []
    if largest > LARGE_GRAPH:
        how = (
            f"on the whole of it, since it fails on a part ({refused})"
            if refused
            else f"on {PROBE_NODES:,} of its nodes"
        )
        notes.append(f"a graph of {largest:,} nodes: the model was tried out {how}")
    return ProbedModel(capture, parity, own, batch, notes)


@torch.inference_mode()
def _refuse_chance(model: nn.Module, capture: CapturePlan, batch: Batch) -> None:
    """Refuse a model that draws random numbers in eval() mode: every run would differ."""
    device = device_of(model)
    name = _differing_layer(model, capture, batch)
    if name is not None and not is_repeatable(device):
        # Some models amplify the rounding of sums a thousandfold; on a CPU the order is fixed.
        with suppress(Exception):  # the user's code may fail in any way on another device
            name = _differing_layer(copy.deepcopy(model).cpu(), capture, batch.clone().cpu())
    if name is not None:
        raise CaptureError(
            f"layer {name!r}: found other activations in a second pass in eval() mode, "
            "expected the same; does the model use dropout without `training=self.training`?"
        )


def _differing_layer(model: nn.Module, capture: CapturePlan, batch: Batch) -> str | None:
    """Return the first layer whose activations depend on the random seed."""
    device, histories = device_of(model), []
    seeded = [device] if device.type == "cuda" else []
    for seed in (0, 1):
        with torch.random.fork_rng(devices=seeded), Capture(model, capture) as recorder:
            torch.manual_seed(seed)
            histories.append(recorder.run(batch).history)
    layers = zip(capture.names, *histories, strict=True)
    return next((name for name, one, other in layers if not same_numbers(one, other)), None)


def _check(parity: Parity, ids: Sequence[str], options: CacheOptions) -> None:
    """Refuse a model that changes when captured, or whose activations depend on batch-mates."""
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
    level: Level,
    options: CacheOptions,
) -> OwnOutput:
    """Run the model on the probe batch and describe its prediction."""
    if level == "link":
        return OwnOutput(problem="a link task has no output of the model's own")
    rows = int(batch.num_nodes) if level == "node" else int(batch.num_graphs)
    with frozen(model), OutputForm() as form:
        output = call_model(model, batch, capture.call)
        found = prediction(output, rows=rows, key=options.output_key)
    if found is None:
        return OwnOutput(problem=f"the model returns no output with a row per {level}")
    return OwnOutput(int(found.shape[1]), form.is_probability(found))
