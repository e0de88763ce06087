"""Backbones to train: built for the data or rebuilt from caches, and trained with a head."""

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
from ..runs.fits import Fit, FitSpec, named, train_fit
from ..runs.run import MODEL_NAME, staged_name
from ..runs.saved_backbone import SavedBackbone, write_provenance
from ..tasks import Task
from ..training.loop import OnEpoch, Trainer
from ..training.networks import BackboneNetwork, GraphBatches, HistoryNetwork, checkpoint_layers
from ..training.ranks import current_ranks
from ..utils.files import copy_file, save_tensors
from ..utils.specifications import IN_MEMORY
from .checkpoints import fold_checkpoints, fold_name, save_fold
from .options import HeadSpec
from .results import Averages, choose_fit
from .stage import ReadoutStage
from .unfreezing import BackboneOptions, ParameterCounts, Unfreezing

# --- a backbone before training: built for the data, with random weights


def untrained_model(
    spec: ModelSpec,
    dataset: GraphDataset,
    out_dim: int,
    *,
    seed: int,
    filled: dict[str, Any] | None = None,
) -> nn.Module:
    """Build a model with random weights.

    Args:
        dataset: Gives the number of features, or of categories of each feature.
        out_dim: Number of outputs that the labels ask for.
        filled: Receives the arguments that were filled in.
    """
    torch.manual_seed(seed)
    sizes = _input_sizes(spec.spec, dataset)
    built = replace(spec, out_dim=out_dim).build(in_dim=sizes, filled=filled)
    if any(is_lazy(parameter) for parameter in built.parameters()):
        with torch.no_grad():
            call_model(built.eval(), Batch.from_data_list(probe_graphs(dataset)))
    # A specification may name an existing module: every caller gets its own.
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
class Backbones:
    """Backbones of one model, the data they run on, and their layers."""

    #: Before training: one, or one per fold; none if each fit starts at random weights of its own.
    models: tuple[nn.Module, ...]
    dataset: GraphDataset
    #: The model and the data as the user names them.
    model: ModelSpec
    data: DataSpec
    #: The layers that are captured of each.
    capture: CapturePlan
    #: Whether the models were handed over, not built from their specification.
    in_memory: bool = False

    # Another process rebuilds the models: a class from a user's file cannot be imported there.
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
        return copy.deepcopy(built).eval()  # a specification may name an existing module


def load_backbones(
    caches: Sequence[Cache],
    *,
    data: str | Path | GraphDataset | Iterable[Data] | None,
    data_root: Path | None,
    model: nn.Module | str | None,
    checkpoint: Path | None,
    key_map: Path | None,
    trust: bool,
) -> Backbones:
    """Rebuild the models of the caches, with the cached weights, and load the cached data."""
    known = [SavedBackbone.of_cache(cache) for cache in caches]
    for saved in known[1:]:
        if saved.capture != known[0].capture:
            raise CacheError(
                f"{saved.folder}: found other layers than those of {known[0].folder.name}, "
                "expected the caches of one model, trained fold by fold"
            )
    # Checked for all caches before anything is built: a manifest does not decide what code runs.
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
            # The user's own module is not changed.
            model=copy.deepcopy(model) if isinstance(model, nn.Module) else model,
            checkpoint=file,
            key_map=key_map,
            trust=trust,
            in_dim=int(dataset.graphs[0].num_node_features),
        )
        for saved, file in zip(known, files, strict=True)
    ]
    return Backbones(
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
    except HistographError:  # a checkpoint that we did not train
        return None


# --- training a backbone together with its head


@dataclass(frozen=True)
class BackboneStage(ReadoutStage):
    """A stage that trains backbones together with a head over their history."""

    trains_backbone: ClassVar[bool] = True
    #: The stage of its fits.
    STAGE: ClassVar[str]

    head: HeadSpec
    options: BackboneOptions
    backbones: Backbones
    #: Layer of each of its parameters, from :func:`~.unfreezing.layers_of_parameters`.
    layers: Mapping[str, int]

    @property
    def name(self) -> str:
        """The name of its fits in tables and results."""
        return staged_name(self.head.name, self.STAGE)

    @abstractmethod
    def start(self, spec: FitSpec, folder: Path) -> tuple[nn.Module, SavedBackbone]:
        """Return the backbone of a fit before training, and its record in the run's folder."""

    def check(self, device: torch.device) -> None:
        """Refuse mixed precision on a device that has none."""
        self.options.check(device)

    def finish(self, folder: Path, averages: Averages, chosen: str) -> dict[str, Any]:
        """Write the best backbone of every fold, by validation, as a checkpoint."""
        fits = averages.fits
        for number in dict.fromkeys(fit.spec.fold for fit in named(fits, chosen)):
            best = choose_fit([fit for fit in fits if fit.spec.fold == number], chosen, self.task)
            place = folder / fold_name(number)
            place.mkdir(exist_ok=True)
            copy_file(folder / best.spec.folder / MODEL_NAME, place / MODEL_NAME)
            specs = (self.backbones.model, self.backbones.data)
            save_fold(place, best, best.spec.head, *specs, self.splits)
        return {}

    def backbone(self, fit: Fit, folder: Path) -> dict[str, Any]:
        """Return how to rebuild the backbone of a fit, whose weights are in the run."""
        assert fit.backbone is not None  # of a fit with a head
        before, saved = self.start(fit.spec, folder)
        weights = folder / fit.spec.folder / MODEL_NAME
        code = write_provenance(
            folder, before, weights, self.backbones.capture, self.backbones.dataset
        )
        sha256 = fit.backbone["weights_sha256"]
        model = replace(saved.model, checkpoint=Path(MODEL_NAME), weights_sha256=sha256)
        return replace(saved, model=model, in_run=True, provenance=code).to_json(folder)

    def fit_network(
        self,
        spec: FitSpec,
        before: nn.Module,
        head: nn.Module,
        standardizer: nn.Module | None,
        folder: Path,
        *,
        device: torch.device,
        on_epoch: OnEpoch | None = None,
    ) -> Fit:
        """Train a copy of a backbone and a head on one fold, or resume that.

        ``before`` is the backbone before training, which stays as it is.
        """
        options, backbone = self.options, copy.deepcopy(before)
        unfreezing = Unfreezing(backbone, self.layers, len(self.backbones.capture.points), options)
        if options.checkpoint_layers:
            checkpoint_layers(backbone, self.backbones.capture)
        network = HistoryNetwork(
            backbone,
            self.backbones.capture,
            head,
            standardizer,
            statistics=options.bn,
            autocast=options.autocast,
        ).to(device)
        trainable = ParameterCounts.trainable(backbone, unfreezing, head)
        head_before = {name: value.detach().clone() for name, value in head.named_parameters()}
        head_parameters = [p for p in head.parameters() if p.requires_grad]
        if not head_parameters:
            raise ConfigError(f"head {spec.head!r}: found no trainable parameters, expected some")
        trainer = Trainer(
            network,
            GraphBatches(self.backbones.dataset, self.task, device, current_ranks()),
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
            state = backbone.state_dict()
            save_tensors(folder / MODEL_NAME, state)
            changed = ParameterCounts.changed(backbone, before, head, head_before)
            return {
                "weights_sha256": weights_sha256(state),
                "asked": asdict(trainable),
                "moved": asdict(changed),
            }

        return train_fit(
            spec,
            trainer,
            folder / spec.folder,
            head=head,
            standardizer=standardizer,
            on_epoch=on_epoch,
            save_backbone=save_backbone,
        )
