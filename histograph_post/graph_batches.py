"""Training batches of whole graphs, for training a backbone itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch

from .backbone import call_model, prediction
from .data import GraphDataset
from .errors import ModelError
from .row_batches import count_batches, row_batches
from .tasks import Task
from .training import Step


@dataclass(frozen=True)
class GraphInputs:
    """A batch of graphs, and which rows of the model's output are asked for."""

    batch: Batch
    #: Output rows that have a label to compare with; None for all: ``[rows]``.
    positions: Tensor | None


class GraphBatches:
    """A :class:`~histograph_post.training.Source` over the graphs of a data set."""

    def __init__(self, dataset: GraphDataset, task: Task, device: torch.device) -> None:
        self.labels = dataset.labels()
        self._dataset = dataset
        self._targets = task.targets(self.labels)
        self._device = device

    def num_batches(self, rows: np.ndarray, *, batch_size: int) -> int:
        """Return how many batches these rows make."""
        return count_batches(rows, self._dataset.label_ptr, batch_size=batch_size)

    def batches(self, rows: np.ndarray, *, batch_size: int, seed: int | None) -> Iterator[Step]:
        """Yield the rows in batches of at most ``batch_size`` graphs."""
        for members in row_batches(
            rows,
            self._dataset.level,
            self._dataset.label_ptr,
            batch_size=batch_size,
            seed=seed,
        ):
            batch = Batch.from_data_list([self._dataset.graphs[graph] for graph in members.graphs])
            positions = None
            if self._dataset.level != "graph":
                positions = batch.ptr[members.owners] + torch.from_numpy(members.within)  # [rows]
                positions = positions.to(self._device)
            yield Step(
                inputs=GraphInputs(batch.to(self._device), positions),
                targets=self._targets[members.rows].to(self._device),
                rows=members.rows,
            )


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
