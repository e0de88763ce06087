"""Backbones in training: batches of graphs, and the networks that read them.

A backbone has a head over its history, or a readout of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import Batch

from ..capture import Capture, CapturePlan
from ..data import GraphDataset
from ..data.batching import RowBatch, make_batch, to_device
from ..data.labels import NonEdges
from ..errors import ConfigError, ModelError
from ..heads.ragged import Graphs
from ..models import call_model, prediction
from ..tasks import Task
from ..utils.machine import pinned
from .batches import HeadInputs, HeadNetwork, Negatives, RowBatches
from .loop import Step
from .ranks import Ranks

# --- graphs in batches


@dataclass(frozen=True)
class GraphInputs:
    """A batch of graphs, and which rows of the output are asked for."""

    batch: Batch
    #: Output rows that have a label to compare with; None for all: ``[rows]``.
    positions: Tensor | None = None
    #: Node pairs to score, for links, negatives that were drawn for training last: ``[2, rows]``.
    pairs: Tensor | None = None
    #: Nodes of each graph, where the host knows them: ``[num_graphs]``.
    sizes: np.ndarray | None = None

    @property
    def graphs(self) -> Graphs | None:
        """Which graph each node belongs to, if the host knows the sizes."""
        if self.sizes is None:
            return None
        return Graphs(self.batch.batch, self.batch.ptr.diff(), self.sizes)


class GraphBatches(RowBatches):
    """A :class:`~histograph_post.training.loop.Source` over the graphs of a data set.

    Args:
        dataset: The graphs.
        task: What is predicted.
        device: Where batches go.
        ranks: Processes that train together: they split the graphs of every shuffled batch, and
            take whole batches in turn otherwise.
    """

    def __init__(
        self,
        dataset: GraphDataset,
        task: Task,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        if ranks is not None and len(dataset) < ranks.size:
            raise ConfigError(
                f"{dataset.spec}: found {len(dataset)} graphs and WORLD_SIZE={ranks.size}, expected"
                " a graph for every process at least: the graphs of a batch are shared out"
            )
        super().__init__(dataset.labels(), dataset.label_ptr, task, device)
        self.ranks = ranks
        self._dataset = dataset
        self._known_non_edges: dict[int, NonEdges] = {}

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        dataset = self._dataset
        for number, (members, drawn) in enumerate(self._members(rows, batch_size, seed)):
            if self.ranks is not None and seed is None and number % self.ranks.size != self._rank:
                continue
            shares = self.ranks is not None and seed is not None
            # In a batch with fewer graphs than ranks, the rest run the first without its labels.
            stands_in = shares and len(members.graphs) <= self._rank
            if shares:
                members, drawn = self._part_of(members, drawn, 0 if stands_in else self._rank)
            batch = make_batch([dataset.graphs[graph] for graph in members.graphs])
            targets = self._targets[members.rows]  # [rows] or [rows, targets]
            positions = pairs = None
            if dataset.level == "node":
                places = batch.ptr[members.owners] + torch.from_numpy(members.within)  # [rows]
                positions = self._there(places)
            elif dataset.level == "link":
                found = self._pairs(batch, members)  # [2, rows]
                if drawn is not None:
                    found = torch.cat([found, drawn.pairs + batch.ptr[drawn.owners]], dim=1)
                    targets = torch.cat([targets, targets.new_zeros(len(drawn.owners), 1)])
                pairs = self._there(found)
            if stands_in:
                targets = torch.full_like(targets, -1 if targets.ndim == 1 else math.nan)
            yield Step(
                inputs=GraphInputs(
                    to_device(batch, self._device), positions, pairs, batch.ptr.diff().numpy()
                ),
                targets=self._there(targets),
                rows=members.rows[:0] if stands_in else members.rows,
                missing=self._task.missing(targets),
            )

    @property
    def _rank(self) -> int:
        return 0 if self.ranks is None else self.ranks.rank

    def _part_of(
        self, members: RowBatch, drawn: Negatives | None, rank: int
    ) -> tuple[RowBatch, Negatives | None]:
        """Return a rank's part of a batch: every ``size``-th graph."""
        assert self.ranks is not None
        size, graphs = self.ranks.size, members.graphs[rank :: self.ranks.size]
        if self._dataset.level == "graph":
            return RowBatch(graphs, graphs, members.owners, members.within), None
        inside = members.owners % size == rank  # [rows]
        part = RowBatch(
            graphs,
            members.rows[inside],
            members.owners[inside] // size,
            members.within[inside],
        )
        if drawn is not None:
            inside = drawn.owners % size == rank  # [negatives]
            drawn = Negatives(
                drawn.pairs[:, torch.from_numpy(inside)], drawn.owners[inside] // size
            )
        return part, drawn

    def _there(self, values: Tensor) -> Tensor:
        """Send values to the device; the host does not wait for it."""
        return pinned(values, self._device).to(self._device, non_blocking=True)

    def _pairs(self, batch: Batch, members: RowBatch) -> Tensor:
        """Return the labelled pairs that a batch is asked for: ``[2, rows]``."""
        counts = np.diff(self._dataset.label_ptr)[members.graphs]  # [num_graphs]
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # pair of each graph: [num_graphs]
        pairs: Tensor = batch.edge_label_index[:, first[members.owners] + members.within]
        return pairs

    def _non_edges(self, graph: int) -> NonEdges:
        if graph not in self._known_non_edges:
            data = self._dataset.graphs[graph]
            known = torch.cat([data.edge_label_index, data.edge_index], dim=1)  # [2, num_known]
            self._known_non_edges[graph] = NonEdges(int(data.num_nodes), known.numpy())
        return self._known_non_edges[graph]


# --- networks


class HistoryNetwork(nn.Module):
    """Graphs in, outputs of the head out: capture, standardisation and head in one.

    The history is recorded by the same hooks that fill a cache, with gradients on.

    Args:
        backbone: Any model.
        capture: What to record of it.
        head: Reads the recorded layers.
        standardizer: Brings the layers to one scale first.
        statistics: Whether training updates the backbone's running statistics.
        autocast: Run the backbone, not the head, in bfloat16 where that is safe (CUDA).
    """

    def __init__(
        self,
        backbone: nn.Module,
        capture: CapturePlan,
        head: nn.Module,
        standardizer: nn.Module | None = None,
        *,
        statistics: StatisticsMode = "train",
        autocast: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.capture = Capture(backbone, capture)
        self.standardizer = standardizer
        self.readout = HeadNetwork(head)
        self._statistics = statistics
        self._autocast = autocast

    @property
    def aux_loss(self) -> Tensor | None:
        """What the last forward pass adds to the loss, for readouts that have such a term."""
        return self.readout.aux_loss

    def train(self, mode: bool = True) -> HistoryNetwork:
        """Put the head, and what is trained of the backbone, into training mode."""
        super().train(mode)
        if mode:
            set_training_modes(self.backbone, self._statistics)
        return self

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        batch = inputs.batch
        # bfloat16, because float16 needs a scale of the loss to keep small gradients.
        bfloat16 = torch.autocast("cuda", dtype=torch.bfloat16) if self._autocast else nullcontext()
        with bfloat16:
            history = self.capture.run(batch).history  # L of [num_nodes, D_l]
        dtype = next(self.readout.parameters()).dtype
        layers = [layer.to(dtype) for layer in history]  # L of [num_nodes, D_l]
        if self.standardizer is not None:
            layers = self.standardizer(layers)  # L of [num_nodes, D_l]
        uniform = len({layer.shape[1] for layer in layers}) == 1
        outputs: Tensor = self.readout(
            HeadInputs(
                history=torch.stack(layers, dim=1) if uniform else layers,  # [num_nodes, L, D]
                batch=batch.batch if inputs.graphs is None else inputs.graphs,
                num_graphs=int(batch.num_graphs),
                edge_index=batch.edge_index,
                positions=inputs.positions,
                pairs=inputs.pairs,
            )
        )
        return outputs  # [rows, out_dim]


class BackboneNetwork(nn.Module):
    """A model with a readout of its own, as the training loop calls it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Return the model's prediction for the rows that are asked for: ``[rows, out_dim]``."""
        wanted = inputs.batch.num_graphs if inputs.positions is None else inputs.batch.num_nodes
        output = call_model(self.model, inputs.batch)
        found = prediction(output, rows=int(wanted))  # [wanted, out_dim]
        if found is None:
            raise ModelError(f"the model's output has no tensor of {wanted} rows to train on")
        return found if inputs.positions is None else found[inputs.positions]


# --- which modules of a partly frozen model train: dropout, and running statistics

#: ``frozen`` leaves running statistics as they are, bit for bit; ``train`` updates those of the
#: normalisations that are trained.
StatisticsMode = Literal["frozen", "train"]

#: Buffers of normalisations that change while they are in training mode.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def set_training_modes(
    module: nn.Module, statistics: StatisticsMode, *, around: bool = False
) -> None:
    """Leave what is trained in training mode, and put the rest into ``eval()``: it runs as cached.

    A module is trained if a parameter in it is; one without parameters goes with the module it is
    in (``around``). A normalisation with frozen statistics stays in ``eval()``, whether its scale
    is trained or not.
    """
    parameters = list(module.parameters())
    trains = any(parameter.requires_grad for parameter in parameters) if parameters else around
    if statistics == "frozen" and statistics_of(module):
        trains = False
    # A model whose own train() leaves a part in eval() has its reasons.
    module.training = module.training and trains
    for child in module.children():
        set_training_modes(child, statistics, around=trains)


def statistics_of(module: nn.Module) -> list[str]:
    """Return the names of the running statistics that are the module's own."""
    return [name for name in _STATISTICS if module._buffers.get(name) is not None]


# --- gradient checkpointing


def checkpoint_layers(model: nn.Module, plan: CapturePlan) -> int:
    """Let every layer of the history be computed again in the backward pass; return how many.

    Weights, outputs and gradients do not change. The model is modified.

    Args:
        model: The backbone.
        plan: Names its layers.
    """
    modules = dict(model.named_modules())
    # Called `a+b` where layers are parallel, and `a#2` on the second call.
    labels = {label.partition("#")[0] for name in plan.names for label in name.split("+")}
    layers = [modules[label] for label in sorted(labels) if label and label in modules]
    if not layers:
        raise ConfigError(
            "checkpoint_layers: found no layer of the history that is a module of its own, "
            "expected at least one"
        )
    for layer in layers:
        _checkpoint(layer)
    return len(layers)


def _checkpoint(layer: nn.Module) -> None:
    forward = layer.forward

    @functools.wraps(forward)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), _statistics_stay(layer)),
            **kwargs,
        )

    layer.forward = again


@contextmanager
def _statistics_stay(layer: nn.Module) -> Iterator[None]:
    """Let normalisations see a batch again without updating their running statistics."""
    kept = [
        (module, name, module.get_buffer(name))
        for module in layer.modules()
        for name in statistics_of(module)
    ]
    for module, name, buffer in kept:
        setattr(module, name, buffer.clone())
    try:
        yield
    finally:
        for module, name, buffer in kept:
            setattr(module, name, buffer)
