"""The networks that are trained: a head, a backbone with a head over its history, or a backbone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..capture import Capture, CapturePlan
from ..errors import ConfigError, ModelError
from ..heads.histograph.accelerate import read_out
from ..models import call_model, prediction
from .batches import GraphInputs, HeadInputs


class HeadNetwork(nn.Module):
    """A readout as the training loop calls it: on rows that are standardised already."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    @property
    def aux_loss(self) -> Tensor | None:
        """What the last forward pass adds to the loss, for readouts that have such a term."""
        return getattr(self.head, "aux_loss", None)

    def forward(self, inputs: HeadInputs) -> Tensor:
        """Return an output for every row that is asked for: ``[rows, out_dim]``."""
        given = {"statistics": inputs.statistics, "whole": inputs.whole}
        outputs = read_out(
            self.head,
            inputs.history,
            inputs.batch,
            num_graphs=inputs.num_graphs,
            edge_index=inputs.edge_index,
            **{name: value for name, value in given.items() if value is not None},
        )
        if inputs.pairs is not None:
            scores: Tensor = self.head.score(outputs, inputs.pairs)  # type: ignore[operator]
            return scores.unsqueeze(-1)  # [rows, 1]
        return outputs if inputs.positions is None else outputs[inputs.positions]


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
