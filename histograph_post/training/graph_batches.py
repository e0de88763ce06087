"""Training batches of whole graphs, for training a backbone itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import overload

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from ..data import GraphDataset
from ..data.batching import (
    RowBatch,
    count_batches,
    make_batch,
    row_batches,
    to_device,
)
from ..data.links import LinkNegatives, NonEdges
from ..errors import ModelError
from ..heads.ragged import Graphs
from ..models import call_model, prediction
from ..tasks import Task
from ..utils.machine import pinned
from .loop import Step


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


class GraphBatches:
    """A :class:`~histograph_post.training.loop.Source` over the graphs of a data set.

    Its batches have the graphs, rows and drawn negatives that
    :class:`~.head_batches.HeadBatches` would give for a cache of the same data.
    """

    def __init__(self, dataset: GraphDataset, task: Task, device: torch.device) -> None:
        self.labels = dataset.labels()
        self._dataset = dataset
        self._task = task
        self._targets = task.targets(self.labels)
        self._device = device
        self._negatives = LinkNegatives(task, self._targets, lru_cache(None)(self._non_edges))

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._dataset.label_ptr, batch_size=batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        dataset, random = self._dataset, self._negatives.generator(rows, seed)
        for members in row_batches(
            rows, dataset.level, dataset.label_ptr, batch_size=batch_size, seed=seed
        ):
            batch = make_batch([dataset.graphs[graph] for graph in members.graphs])
            targets = self._targets[members.rows]  # [rows] or [rows, targets]
            positions = pairs = None
            if dataset.level == "node":
                positions = batch.ptr[members.owners] + torch.from_numpy(members.within)  # [rows]
            elif dataset.level == "link":
                pairs = self._pairs(batch, members)  # [2, rows]
                if random is not None:
                    drawn, owners = self._negatives.draw(members, random)
                    pairs = torch.cat([pairs, drawn + batch.ptr[owners]], dim=1)
                    targets = torch.cat([targets, targets.new_zeros(len(owners), 1)])
            yield Step(
                inputs=GraphInputs(
                    to_device(batch, self._device),
                    self._there(positions),
                    self._there(pairs),
                    batch.ptr.diff().numpy(),
                ),
                targets=self._there(targets),
                rows=members.rows,
                missing=self._task.missing(targets),
            )

    @overload
    def _there(self, values: Tensor) -> Tensor: ...

    @overload
    def _there(self, values: Tensor | None) -> Tensor | None: ...

    def _there(self, values: Tensor | None) -> Tensor | None:
        """Send values to the device; the host does not wait for it."""
        if values is None:
            return None
        return pinned(values, self._device).to(self._device, non_blocking=True)

    def _pairs(self, batch: Batch, members: RowBatch) -> Tensor:
        """Return the labelled pairs that a batch is asked for: ``[2, rows]``."""
        counts = np.diff(self._dataset.label_ptr)[members.graphs]  # [num_graphs]
        first = np.concatenate([[0], np.cumsum(counts)[:-1]])  # pair of each graph: [num_graphs]
        pairs: Tensor = batch.edge_label_index[:, first[members.owners] + members.within]
        return pairs

    def _non_edges(self, number: int) -> NonEdges:
        graph = self._dataset.graphs[number]
        known = torch.cat([graph.edge_label_index, graph.edge_index], dim=1)  # [2, num_known]
        return NonEdges(int(graph.num_nodes), known.numpy())


class BackboneNetwork(nn.Module):
    """A model with a readout of its own, as the training loop calls it."""

    def __init__(self, model: nn.Module, *, output_key: str | int | None = None) -> None:
        super().__init__()
        self.model = model
        self._output_key = output_key

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Return the model's prediction for the rows that are asked for: ``[rows, out_dim]``."""
        wanted = inputs.batch.num_graphs if inputs.positions is None else inputs.batch.num_nodes
        output = call_model(self.model, inputs.batch)
        found = prediction(output, rows=int(wanted), key=self._output_key)  # [wanted, out_dim]
        if found is None:
            raise ModelError(f"the model's output has no tensor of {wanted} rows to train on")
        return found if inputs.positions is None else found[inputs.positions]
