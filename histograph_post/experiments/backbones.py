"""Backbones that are trained: built for the data, or rebuilt from caches, fitted with a head."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Batch, Data

from ..caches import Cache
from ..capture import CapturePlan
from ..data import DataSpec, GraphDataset, from_graphs
from ..data.batching import probe_graphs
from ..errors import CacheError, ConfigError, DataError, HistographError, NotFoundError
from ..models import BUILT_IN, ModelSpec, call_model
from ..models.checkpoints import weights_sha256
from ..runs.fits import Fit, FitSpec, train_fit
from ..runs.run import MODEL_NAME
from ..runs.saved_backbone import SavedBackbone
from ..runs.verdict import name_after
from ..tasks import Task
from ..training.graph_batches import GraphBatches
from ..training.loop import OnEpoch, Trainer
from ..training.networks import BackboneNetwork, HistoryNetwork, checkpoint_layers
from ..training.ranks import current_ranks
from ..utils.specifications import IN_MEMORY
from ..utils.tensors import save_tensors
from .folds import fold_checkpoints, write_folds
from .options import HeadSpec
from .stage import ReadoutStage
from .unfreezing import (
    BackboneOptions,
    ParameterCounts,
    Unfreezing,
)

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
        dataset: Says how many features, or categories of features, the nodes have.
        out_dim: Number of outputs that the labels ask for.
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


# --- the backbones of caches, with the cached weights


@dataclass(frozen=True)
class CachedBackbones:
    """The backbones of some caches, one or one per fold, and the data they ran on."""

    models: tuple[nn.Module, ...]
    dataset: GraphDataset
    #: The model and the data as they were named, for the checkpoints to come.
    model: ModelSpec
    data: DataSpec
    #: The layers that are captured of each.
    capture: CapturePlan
    #: Whether the models were handed over, not built from their specification.
    in_memory: bool

    # Another process builds the models anew: a class from a user's file cannot be imported there.
    def __getstate__(self) -> dict[str, Any]:
        weights = tuple(model.state_dict() for model in self.models)
        return vars(self) if self.in_memory else {**vars(self), "models": weights}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self.in_memory:
            vars(self)["models"] = tuple(map(self._build, state["models"]))

    def _build(self, weights: Mapping[str, Tensor]) -> nn.Module:
        in_dim = int(self.dataset.graphs[0].num_node_features)
        built = self.model.build(state_dict=weights, in_dim=in_dim)
        built.load_state_dict(weights)
        return copy.deepcopy(built).eval()  # a specification may name a module that exists


def load_backbones(
    caches: Sequence[Cache],
    *,
    data: str | Path | GraphDataset | Iterable[Data] | None,
    data_root: Path | None,
    model: nn.Module | str | None,
    checkpoint: Path | None,
    key_map: Path | None,
    trust: bool,
) -> CachedBackbones:
    """Build the models of the caches anew, with the cached weights, and load the cached data."""
    known = [SavedBackbone.of_cache(cache) for cache in caches]
    for saved in known[1:]:
        if saved.capture != known[0].capture:
            raise CacheError(
                f"{saved.folder}: found other layers than those of {known[0].folder.name}, "
                "expected the caches of one model, trained fold by fold"
            )
    # Asked of all caches before anything is built or loaded: a manifest names no code.
    models = [
        saved.model if isinstance(model, nn.Module) else saved.model.to_follow(model)
        for saved in known
    ]
    data_spec = known[0].find_data()
    if data is None or isinstance(data, (str, Path)):
        data_spec = data_spec.to_follow(None if data is None else str(data))
    files = [_checkpoint_file(saved, checkpoint, model) for saved in known]
    root = data_root or _data_root(known[0], files[0], models[0], data_spec)
    data_spec = replace(data_spec, root=root)
    if data is None or isinstance(data, (str, Path)):
        dataset = data_spec.load()
    else:
        dataset = data if isinstance(data, GraphDataset) else from_graphs(data)
    if dataset.fingerprint() != known[0].data.fingerprint:
        raise DataError(
            f"{dataset.spec}: found data with fingerprint {dataset.fingerprint()}, expected "
            f"{known[0].data.fingerprint}, which {known[0].folder} was made from"
        )
    built = [
        saved.build(
            # The user's own one stays as it is.
            model=copy.deepcopy(model) if isinstance(model, nn.Module) else model,
            checkpoint=file,
            key_map=key_map,
            trust=trust,
            in_dim=int(dataset.graphs[0].num_node_features),
        )
        for saved, file in zip(known, files, strict=True)
    ]
    return CachedBackbones(
        tuple(module.eval() for module in built),
        dataset,
        models[0],
        data_spec,
        known[0].capture,
        in_memory=isinstance(model, nn.Module),
    )


def _checkpoint_file(
    saved: SavedBackbone, given: Path | None, model: nn.Module | str | None
) -> Path | None:
    """Return the file with a backbone's weights; None for a model that has them."""
    if given is None:
        in_memory = isinstance(model, nn.Module) or saved.model.spec == IN_MEMORY
        return None if in_memory else saved.find_checkpoint()
    found = saved.checkpoint_in(given)
    if found is None:
        name = saved.model.checkpoint and saved.model.checkpoint.name
        raise NotFoundError(f"{given}: found no {name!r}, expected the weights")
    return found


def _data_root(
    saved: SavedBackbone, checkpoint: Path | None, model: ModelSpec, data: DataSpec
) -> Path | None:
    """Return the data root of the cache's command, or of the training that made the checkpoint."""
    found = saved.option_path("data_root")
    if found is not None or checkpoint is None:
        return found
    try:
        folds = fold_checkpoints(checkpoint.parent, model=model.spec, data=data.spec)
        return folds[0].data.root
    except HistographError:  # a checkpoint from elsewhere
        return None


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
        return name_after(self.head.name, self.STAGE)

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
        """Train a backbone and its head on one fold, or resume that.

        ``before`` is the backbone before training, which this leaves alone: what changed in the
        one among the parts is counted.
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
        trainable = ParameterCounts.trainable(parts.backbone, unfreezing, parts.head)
        head_before = {
            name: value.detach().clone() for name, value in parts.head.named_parameters()
        }
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
                "asked": asdict(trainable),
                "moved": asdict(changed),
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
