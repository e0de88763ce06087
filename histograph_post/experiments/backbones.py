"""A backbone that is trained: built for the data, fitted with its head, and what changed in it."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Batch

from ..capture import CapturePlan
from ..data import DataSpec, GraphDataset
from ..data.batching import probe_graphs
from ..errors import ConfigError
from ..models import BUILT_IN, ModelSpec, call_model
from ..models.checkpoints import weights_sha256
from ..runs.fits import Fit, FitSpec, train_fit
from ..runs.run import MODEL_NAME
from ..tasks import Task
from ..training.graph_batches import GraphBatches
from ..training.loop import OnEpoch, Trainer
from ..training.networks import BackboneNetwork, HistoryNetwork, checkpoint_layers
from ..training.ranks import current_ranks
from ..utils.tensors import save_tensors
from .folds import write_folds
from .options import HeadSpec
from .stage import ReadoutStage
from .unfreezing import BackboneOptions, Unfreezing

# --- a backbone before training: built for the data, with weights drawn by a seed


def untrained_model(
    spec: ModelSpec,
    dataset: GraphDataset,
    out_dim: int,
    *,
    seed: int,
    filled: dict[str, Any] | None = None,
) -> nn.Module:
    """Build a model with initial weights of its own.

    Args:
        spec: Names the model and its arguments.
        dataset: Says how many features, or categories of features, the nodes have.
        out_dim: Number of outputs that the labels ask for.
        seed: Of the weights.
        filled: Receives the arguments that were filled in.
    """
    torch.manual_seed(seed)
    sizes = _input_sizes(spec.spec, dataset)
    built = replace(spec, out_dim=out_dim).build(in_dim=sizes, filled=filled)
    if any(is_lazy(parameter) for parameter in built.parameters()):
        with torch.no_grad():
            call_model(built.eval(), Batch.from_data_list(probe_graphs(dataset)))
    # A specification may name a module that exists: every caller gets its own.
    return copy.deepcopy(built)


def _input_sizes(model: str, dataset: GraphDataset) -> int | list[int]:
    """Return the number of node features, or the categories of each column of integers."""
    width = int(dataset.graphs[0].num_node_features)
    if dataset.graphs[0].x.is_floating_point() or model not in BUILT_IN:
        return width
    highest = torch.stack(
        [graph.x.reshape(-1, width).amax(dim=0) for graph in dataset.graphs]
    )  # [num_graphs, columns]
    sizes: list[int] = (highest.amax(dim=0) + 1).tolist()
    return sizes


@torch.no_grad()
def output_width(model: nn.Module, dataset: GraphDataset, task: Task) -> int:
    """Run the model on the first rows; return how many columns it predicts."""
    source = GraphBatches(dataset, task, torch.device("cpu"))
    rows = np.arange(min(2, int(dataset.label_ptr[-1])))
    step = next(source.batches(rows, batch_size=2, seed=None))
    return int(BackboneNetwork(model).eval()(step.inputs).shape[1])


# --- training a backbone together with its head


@dataclass(frozen=True)
class NetworkParts:
    """A backbone and a head that are to be trained together."""

    backbone: nn.Module
    capture: CapturePlan
    #: Layer of each parameter, from :func:`~.unfreezing.layers_of_parameters`.
    layers: Mapping[str, int]
    head: nn.Module
    standardizer: nn.Module | None


@dataclass(frozen=True)
class BackboneStage(ReadoutStage):
    """A stage that trains backbones together with a head over their history."""

    trains_backbone: ClassVar[bool] = True
    #: What its fits are called after the name of their head.
    STAGE: ClassVar[str]

    head: HeadSpec
    options: BackboneOptions

    @property
    def name(self) -> str:
        """What the network is called in tables and results."""
        return f"{self.head.name}-{self.STAGE}"

    @property
    @abstractmethod
    def named_as(self) -> tuple[ModelSpec, DataSpec]:
        """The model and the data as the user names them."""

    def check(self, device: torch.device) -> None:
        """Refuse mixed precision on a device that has none."""
        self.options.check(device)

    def finish(self, folder: Path, fits: Sequence[Fit], chosen: str) -> dict[str, Any]:
        """Write a checkpoint per fold."""
        write_folds(folder, fits, chosen, self.task, self.splits, *self.named_as)
        return {}

    def fit_network(
        self,
        spec: FitSpec,
        parts: NetworkParts,
        dataset: GraphDataset,
        folder: Path,
        *,
        device: torch.device,
        before: nn.Module,
        on_epoch: OnEpoch | None = None,
    ) -> Fit:
        """Train a backbone and its head on one fold, or go on with it.

        Args:
            spec: What is fitted.
            parts: Backbone and head as they start.
            dataset: The graphs.
            folder: The run.
            device: Where to train.
            before: The backbone before training, which this leaves alone, to count what changed.
            on_epoch: Told after every epoch.
        """
        options = self.options
        unfreezing = Unfreezing(parts.backbone, parts.layers, len(parts.capture.points), options)
        if options.checkpoint_layers:
            checkpoint_layers(parts.backbone, parts.capture)
        network = HistoryNetwork(
            parts.backbone,
            parts.capture,
            parts.head,
            parts.standardizer,
            statistics=options.bn,
            autocast=options.autocast,
        ).to(device)
        trainable = ParameterCounts.trainable(
            parts.backbone, [*unfreezing.layers, *unfreezing.statistics], parts.head
        )
        head_before = parameters_of(parts.head)
        head_parameters = [p for p in parts.head.parameters() if p.requires_grad]
        if not head_parameters:
            raise ConfigError(f"head {spec.head!r}: found no trainable parameters, expected some")
        trainer = Trainer(
            network,
            GraphBatches(dataset, self.task, device, current_ranks()),
            self.splits.folds[spec.fold],
            self.task,
            spec.training,
            seed=spec.seed,
            parameters=[
                {"params": head_parameters, "lr": spec.training.lr},
                {"params": unfreezing.parameters, "lr": options.lr},
            ],
            before_epoch=unfreezing.enter,
        )

        def save_backbone(folder: Path) -> dict[str, Any]:
            state = parts.backbone.state_dict()
            save_tensors(folder / MODEL_NAME, state)
            changed = ParameterCounts.changed(parts.backbone, before, parts.head, head_before)
            return {
                "weights_sha256": weights_sha256(state),
                "asked": trainable.to_json(),
                "moved": changed.to_json(),
            }

        return train_fit(
            spec,
            trainer,
            folder / spec.folder,
            head=parts.head,
            standardizer=parts.standardizer,
            on_epoch=on_epoch,
            save_backbone=save_backbone,
        )


# --- how many parameters and buffer values of a network are trainable, and how many changed


@dataclass(frozen=True)
class ParameterCounts:
    """How many values of a network are trainable, or have changed, and how many there are."""

    head: int
    parameters: int
    all_parameters: int
    buffers: int
    all_buffers: int

    def __str__(self) -> str:
        return (
            f"{self.parameters:,} of {self.all_parameters:,} parameters and {self.buffers:,} of "
            f"{self.all_buffers:,} buffer values of the backbone, and {self.head:,} parameters "
            "of the head"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def trainable(
        cls, backbone: nn.Module, names: Collection[str], head: nn.Module
    ) -> ParameterCounts:
        """Count what training may change: the backbone's tensors of these names, and the head."""
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=sum(p.numel() for p in head.parameters() if p.requires_grad),
            parameters=sum(p.numel() for name, p in parameters.items() if name in names),
            all_parameters=sum(p.numel() for p in parameters.values()),
            buffers=sum(b.numel() for name, b in buffers.items() if name in names),
            all_buffers=sum(b.numel() for b in buffers.values()),
        )

    @classmethod
    def changed(
        cls,
        backbone: nn.Module,
        before: nn.Module,
        head: nn.Module,
        head_before: Mapping[str, Tensor],
    ) -> ParameterCounts:
        """Count what training has changed, bit for bit."""
        parameters, buffers = dict(backbone.named_parameters()), dict(backbone.named_buffers())
        return cls(
            head=_changed(dict(head.named_parameters()), head_before),
            parameters=_changed(parameters, dict(before.named_parameters())),
            all_parameters=sum(p.numel() for p in parameters.values()),
            buffers=_changed(buffers, dict(before.named_buffers())),
            all_buffers=sum(b.numel() for b in buffers.values()),
        )


def _changed(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> int:
    return sum(
        int((value.detach().cpu() != before[name].detach().cpu()).sum())
        for name, value in after.items()
    )


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return a copy of the current parameters."""
    return {
        name: parameter.detach().clone(memory_format=torch.contiguous_format)
        for name, parameter in module.named_parameters()
    }
