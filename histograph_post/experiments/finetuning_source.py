"""Where fine-tuning starts: a run's trained heads, and the backbones and data of its caches."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import Data

from ..caches import Cache
from ..capture import CapturePlan
from ..data import DataSpec, GraphDataset, from_graphs
from ..errors import CacheError, ConfigError, DataError, HistographError, NotFoundError
from ..models import ModelSpec
from ..runs.run import RUN_NAME, Run
from ..runs.saved_backbone import SavedBackbone
from ..utils.specifications import IN_MEMORY
from .folds import load_folds, open_caches
from .head_training import Experiment
from .options import ExperimentOptions, HeadSpec
from .trained_backbones import fold_checkpoints


def open_source(source: str | Path | Run | Cache) -> Run | None:
    """Return the run on a cache that fine-tuning starts from; None for a cache."""
    if isinstance(source, Cache):
        return None
    folder = source.folder if isinstance(source, Run) else Path(source)
    if not (folder / RUN_NAME).is_file():
        return None
    run = Run.of(source)
    if run.backbone.in_run:
        raise ConfigError(
            f"{folder}: found a run that trained its backbone; cache that first: "
            f"histograph cache {folder} -o CACHES"
        )
    return run


def source_head(run: Run) -> HeadSpec:
    """Return the readout that a run is about, with its options."""
    name = run.saved_head.name
    return next(head for head in _heads(run) if head.name == name)


def _heads(run: Run) -> list[HeadSpec]:
    return [HeadSpec(entry["name"], entry["options"]) for entry in run.plan["heads"]]


def source_experiment(
    run: Run, options: ExperimentOptions, *, cache: str | Path | None
) -> Experiment:
    """Return the experiment of a run, on its caches and splits.

    Args:
        run: A finished run on a cache, whose heads are to be trained further.
        options: How to train; the seeds are some of the run's, all by default.
        cache: Where the cache, or the folder of caches, is now, if it was moved.
    """
    plan, place = run.plan, run.backbone.cache
    known = tuple(plan["seeds"])
    for seed in options.seeds or ():
        if seed not in known:
            raise ConfigError(f"seeds: found {seed}, expected some of the run's, {list(known)}")
    weights = plan["weights"]
    caches = open_caches(cache or (place.parent if len(weights) > 1 else place))
    found = [member.weights_sha256 for member in caches]
    if found != weights:
        raise CacheError(
            f"{caches[0].path}: found weights {', '.join(w[:12] for w in found)}, expected "
            f"{', '.join(w[:12] for w in weights)}, on which {run.folder} was trained"
        )
    return Experiment(
        splits=run.splits,
        task=run.saved_head.task,
        seeds=tuple(options.seeds or known),
        caches=tuple(caches),
        folds=tuple(load_folds(caches, run.splits, memory_limit=options.memory_limit)),
        heads=tuple(_heads(run)),
        training=options.training_options(),
        standardize=plan["standardize"],
        warm_start=plan["warm_start"],
        calibrate=plan.get("calibrate", True),
    )


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
    _check_data(known[0], dataset)
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


def _check_data(saved: SavedBackbone, dataset: GraphDataset) -> None:
    """Refuse other data than those of a cache."""
    if dataset.fingerprint() != saved.data.fingerprint:
        raise DataError(
            f"{dataset.spec}: found data with fingerprint {dataset.fingerprint()}, expected "
            f"{saved.data.fingerprint}, which {saved.folder} was made from"
        )
