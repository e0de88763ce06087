"""A backbone with a readout over its history, as one network that gradients flow through."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from ..capture import Capture, CapturePlan
from ..experiments.head_fits import HeadNetwork
from .graph_batches import GraphInputs
from .head_batches import HeadInputs
from .modes import StatisticsMode, set_training_modes


class HistoryNetwork(nn.Module):
    """Graphs in, outputs of the head out: capture, standardisation and head in one.

    The history is recorded by the same hooks that fill a cache, with gradients on.

    Args:
        backbone: Any model.
        capture: What to record of it.
        head: Reads the recorded layers.
        standardizer: Brings the layers to one scale first.
        statistics: Whether running statistics of the backbone move while it trains.
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
        """Put the head, and what moves of the backbone, into training mode."""
        super().train(mode)
        if mode:
            set_training_modes(self.backbone, self._statistics)
        return self

    def forward(self, inputs: GraphInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        batch = inputs.batch
        with self._precision():
            history = self.capture.run(batch).history  # L of [num_nodes, D_l]
        dtype = next(self.readout.parameters()).dtype
        layers = [layer.to(dtype) for layer in history]  # L of [num_nodes, D_l]
        if self.standardizer is not None:
            layers = self.standardizer(layers)  # L of [num_nodes, D_l]
        uniform = len({layer.shape[1] for layer in layers}) == 1
        outputs: Tensor = self.readout(
            HeadInputs(
                history=torch.stack(layers, dim=1) if uniform else layers,  # [num_nodes, L, D]
                batch=batch.batch,
                num_graphs=int(batch.num_graphs),
                edge_index=batch.edge_index,
                positions=inputs.positions,
                pairs=inputs.pairs,
            )
        )
        return outputs  # [rows, out_dim]

    def _precision(self) -> AbstractContextManager[None]:
        # bfloat16, because float16 needs a scale of the loss to keep small gradients.
        return torch.autocast("cuda", dtype=torch.bfloat16) if self._autocast else nullcontext()
